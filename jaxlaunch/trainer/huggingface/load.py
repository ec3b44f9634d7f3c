"""Loads weights from a Hugging Face folder with config.json and safetensors.

Parameters are loaded one by one, and a process reads only the parts for its own devices. The folder
may be local or in gs:// or s3://, from where only ranges of bytes are fetched. The positions of a
ViT are interpolated for images of another size, as in transformers and PyTorch.

N positions (the class token, then the patches row by row), Y rows and X columns of patches, D
model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder, names
from jaxlaunch.trainer.huggingface.names import TIED_HEAD, Leaf
from jaxlaunch.trainer.huggingface.tensor_files import Slices, TensorFiles
from jaxlaunch.trainer.spec import PublishedModel, ViT

# The coefficient of the cubic kernel, as in PyTorch.
CUBIC_COEFFICIENT = -0.75
# The number of kinds of faults that a message lists.
MAX_FAULTS = 5
# The number of rows of a matrix that are compared at a time.
COMPARED_ROWS = 4096
# Prefixes of tensor names that wrappers of a model add.
WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|base_model\.model|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)

# Rows and columns of patches.
Grid = tuple[int, int]


def load_parameters(
    model: PublishedModel, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    """Load the parameters of `model` by name, with shapes, dtypes and shardings of `targets`.

    Raises SpecError if config.json describes another model, or a tensor is missing, unexpected or
    of another shape.
    """
    return dict(iterate_parameters(model, targets))


def iterate_parameters(
    model: PublishedModel, targets: Mapping[str, jax.ShapeDtypeStruct], *, is_cast: bool = True
) -> Iterator[tuple[str, Array]]:
    """Yield the parameters of `load_parameters` one by one, so that the caller can release each.

    Without `is_cast` a parameter keeps the dtype of its tensors in the folder: the smallest that
    holds all of them, but float32 for float64.
    """
    path = model.init_from or ""
    folder_model = folder.read_model(path)
    folder.check_model(model, folder_model, path)
    files = TensorFiles(path)
    leaves, new_names = folder_leaves(model, files), names.new_parameters(model)
    targets = {name: target for name, target in targets.items() if name not in new_names}
    stored = dict(targets)
    if isinstance(model, ViT) and isinstance(folder_model, ViT) and "positions" in targets:
        target = targets["positions"]
        count = target.shape[0] - model.patch_count + folder_model.patch_count
        stored["positions"] = jax.ShapeDtypeStruct((count, *target.shape[1:]), target.dtype)
    if TIED_HEAD in leaves and "embedding" in targets:
        stored[TIED_HEAD] = targets["embedding"]
    check_tensors(path, "train.model", leaves, stored, files, names.unread_suffixes(model))
    if TIED_HEAD in stored:
        check_tied_head(path, leaves, targets["embedding"], files)
    for name, target in targets.items():
        leaf, shape, dtype = leaves[name], stored[name].shape, target.dtype
        if not is_cast:
            tensors = leaf.tensor_shapes(target.shape)
            dtype = jnp.result_type(*{files.tensor_dtype(tensor) for tensor, _ in tensors})
        cast_target = jax.ShapeDtypeStruct(target.shape, dtype, sharding=target.sharding)
        if target.shape == shape:
            yield name, read_parameter(leaf, cast_target, files)
            continue
        # The grid of patches differs from that of the folder. Each process reads all positions and
        # interpolates them.
        assert isinstance(model, ViT) and isinstance(folder_model, ViT), "no other model has a grid"
        assert cast_target.sharding is not None, "the train step gives every parameter a sharding"
        spans = tuple(slice(0, size) for size in shape)
        stored_ND = read_part(leaf, spans, jax.ShapeDtypeStruct(shape, jnp.float32), files)
        files.close()
        grids = folder_model.patch_grid, model.patch_grid
        positions_ND = interpolate_positions(stored_ND, *grids).astype(dtype)
        read_slice = positions_ND.__getitem__
        placement = cast_target.shape, cast_target.sharding
        yield name, jax.make_array_from_callback(*placement, read_slice)


def folder_leaves(model: PublishedModel, files: TensorFiles) -> dict[str, Leaf]:
    """Return the leaves of a model with the names that this folder uses.

    As in transformers, the prefix of the model below the head may be missing from all names, or
    repeated. A tied matrix may have the name of the embedding, of the head, or both, in which case
    the head is the leaf `TIED_HEAD`.
    """
    leaves, prefix = names.parameter_leaves(model), names.NAME_PREFIXES[model.kind]
    if (tied_head := names.tied_head(model)) is not None:
        leaves[TIED_HEAD] = tied_head

    def count_matches(leaves: Mapping[str, Leaf]) -> int:
        """Count the leaves whose first tensor is in the folder."""
        return sum(
            leaf.tensor_name(dict.fromkeys(leaf.stacked_axes, 0)) in files
            for leaf in leaves.values()
        )

    def rename_leaves(rename: Callable[[str], str]) -> dict[str, Leaf]:
        return {
            ours: dataclasses.replace(leaf, name=rename(leaf.name)) for ours, leaf in leaves.items()
        }

    unprefixed = rename_leaves(lambda name: name.removeprefix(prefix))
    leaves = max(leaves, unprefixed, rename_leaves(prefix.__add__), key=count_matches)
    if tied_head is not None:
        head = leaves.pop(TIED_HEAD)
        if head.name in files:
            has_both = leaves["embedding"].name in files
            leaves[TIED_HEAD if has_both else "embedding"] = head
    return leaves


def check_tensors(
    path: str,
    key: str,
    leaves: Mapping[str, Leaf],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    files: TensorFiles,
    unread: tuple[str, ...] = (),
) -> None:
    """Raise SpecError unless the folder holds exactly the tensors of the parameters in `targets`.

    Args:
        path: Folder, for messages.
        key: Block of the job that defines the parameters, for messages.
        leaves: Layout of each parameter.
        targets: Shapes of the parameters.
        files: Tensors of the folder.
        unread: Suffixes of further tensors that the folder may hold.
    """
    if unknown := [name for name in targets if name not in leaves]:
        raise SpecError(f"{key}.init_from: Hugging Face has no counterpart of {', '.join(unknown)}")
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter, target in targets.items():
        shapes.update(leaves[parameter].tensor_shapes(target.shape))
    # The names of tensors with each kind of fault.
    faults: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        if name not in files:
            faults.setdefault("missing", []).append(name)
            continue
        if not files.is_supported(name):
            fault = f"{files[name].get_dtype()}, as in quantized weights, which are not supported"
            faults.setdefault(fault, []).append(name)
        if (stored_shape := files[name].get_shape()) != list(shape):
            is_head = name.startswith("classifier.")
            hint = "; for classes of your own set new_head: true" if is_head else ""
            fault = f"{stored_shape}, {key} makes it {list(shape)}{hint}"
            faults.setdefault(fault, []).append(name)
    unused = [name for name in files if name not in shapes and not name.endswith(unread)]
    if unused:
        faults[f"not used by {key}"] = unused
    wrapped = next(filter(WRAPPERS.search, unused), None)
    if wrapped is not None and not any(map(WRAPPERS.search, shapes)):
        raise SpecError(
            f"{path} was saved from a wrapped model, as the name {wrapped} shows: "
            "DistributedDataParallel adds module., torch.compile _orig_mod., and peft "
            "base_model.model., and transformers does not read such names either; save the model "
            "that is inside, of peft after merge_and_unload()"
        )
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
        texts = [_describe_fault(faults[fault], fault) for fault in [*faults][:MAX_FAULTS]]
        raise SpecError(f"{path} does not match {key}: {'; '.join(texts)}{more}")


def _describe_fault(names: Sequence[str], fault: str) -> str:
    if len(names) == 1:
        return f"{names[0]} is {fault}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} are {fault}"


def check_tied_head(
    path: str, leaves: Mapping[str, Leaf], target: jax.ShapeDtypeStruct, files: TensorFiles
) -> None:
    """Raise SpecError if a tied head differs from the embedding [V, D].

    A process compares the parts of its own devices. If the two differ, transformers 5 uses both,
    and transformers 4 only the embedding.
    """
    embedding, head = leaves["embedding"], leaves[TIED_HEAD]
    float32_target = jax.ShapeDtypeStruct(target.shape, jnp.float32)
    assert target.sharding is not None, "the train step gives every parameter a sharding"
    indexes = target.sharding.addressable_devices_indices_map(target.shape).values()
    spans = {
        tuple(
            axis_slice.indices(size)[:2]
            for axis_slice, size in zip(index, target.shape, strict=True)
        )
        for index in indexes
    }
    for (first, last), columns in spans:
        for start in range(first, last, COMPARED_ROWS):
            span = slice(start, min(start + COMPARED_ROWS, last)), slice(*columns)
            rows_VD = read_part(embedding, span, float32_target, files)
            if not np.array_equal(rows_VD, read_part(head, span, float32_target, files)):
                raise SpecError(
                    f"{path}: {head.name} differs from {embedding.name}, and config.json says that "
                    "they are tied (tie_word_embeddings): transformers 5 uses both, transformers 4 "
                    f"drops {head.name}. Set tie_word_embeddings to false to keep both, or remove "
                    "the tensor"
                )
    files.close()


def read_parameter(leaf: Leaf, target: jax.ShapeDtypeStruct, files: TensorFiles) -> Array:
    """Read a parameter, a part for each device of this process. Replicas are read once."""
    parts: dict[str, np.ndarray[Any, Any]] = {}

    def read_shard(index: Slices | None) -> np.ndarray[Any, Any]:
        assert index is not None, "every local device holds a part"
        sizes = zip(index, target.shape, strict=True)
        spans = tuple(slice(*axis_slice.indices(size)[:2]) for axis_slice, size in sizes)
        if str(spans) not in parts:
            parts[str(spans)] = read_part(leaf, spans, target, files)
        return parts[str(spans)]

    assert target.sharding is not None, "the train step gives every parameter a sharding"
    array = jax.make_array_from_callback(target.shape, target.sharding, read_shard)
    files.close()
    return array


def read_part(
    leaf: Leaf, spans: Slices, target: jax.ShapeDtypeStruct, files: TensorFiles
) -> np.ndarray[Any, Any]:
    """Read `parameter[spans]` tensor by tensor, in the dtype of `target`."""
    sizes = dict(zip(leaf.ours, target.shape, strict=True))
    span_by_axis = dict(zip(leaf.ours, spans, strict=True))
    cuts = [_cut_axis(letters.strip("1"), sizes, span_by_axis) for letters in leaf.theirs.split()]
    shape = [size for cut in cuts for size in cut.shape]
    inner_slices = tuple(inner for cut in cuts for inner in cut.inner)
    part_shape = [span.stop - span.start for span in spans]
    part: np.ndarray[Any, Any] = np.empty(part_shape, target.dtype)
    for indexes in leaf.stacked_indexes(span_by_axis):
        tensor = files[leaf.tensor_name(indexes)][tuple(cut.read for cut in cuts)]
        destination = tuple(
            indexes[axis] - span_by_axis[axis].start if axis in indexes else slice(None)
            for axis in leaf.ours
        )
        part[destination] = tensor.reshape(shape)[inner_slices].transpose(leaf.axis_order)
    return part


class _Cut(NamedTuple):
    """The conversion of an axis of a tensor to our axes.

    Attributes:
        read: Slice to read along the axis.
        shape: Sizes of our axes into which the slice is split.
        inner: Slices to take of our axes afterwards.
    """

    read: slice
    shape: list[int]
    inner: list[slice]


def _cut_axis(letters: str, sizes: Mapping[str, int], span: Mapping[str, slice]) -> _Cut:
    """Return the smallest slice of a tensor's axis that covers `span`, or the whole axis.

    A slice is possible if `span` covers all of our axes in it except for the first one.
    """
    axis_sizes = [sizes[axis] for axis in letters]
    if not letters:
        return _Cut(slice(0, 1), [], [])
    if all(span[axis] == slice(0, sizes[axis]) for axis in letters[1:]):
        first, step = span[letters[0]], math.prod(axis_sizes[1:])
        shape = [first.stop - first.start, *axis_sizes[1:]]
        read = slice(first.start * step, first.stop * step)
        return _Cut(read, shape, [slice(None)] * len(axis_sizes))
    return _Cut(slice(0, math.prod(axis_sizes)), axis_sizes, [span[axis] for axis in letters])


def interpolate_positions(
    positions_ND: NDArray[np.float32], old_grid: Grid, new_grid: Grid
) -> NDArray[np.float32]:
    """Interpolate the positions of patches bicubically, and keep that of the class token."""
    patches_YXD = positions_ND[1:].reshape(*old_grid, -1).astype(np.float64)
    weights = [_bicubic_weights(*sizes) for sizes in zip(old_grid, new_grid, strict=True)]
    patches_YXD = np.einsum("ry,cx,yxd->rcd", *weights, patches_YXD, optimize=True)
    patches_ND = patches_YXD.reshape(new_grid[0] * new_grid[1], -1)
    return np.concatenate([positions_ND[:1], patches_ND]).astype(np.float32)


def _bicubic_weights(old_size: int, new_size: int) -> NDArray[np.float64]:
    """Return the weights [new, old] of bicubic interpolation, with edge padding."""
    weights = np.zeros((new_size, old_size))
    centers = (np.arange(new_size) + 0.5) * old_size / new_size - 0.5
    for offset in range(-1, 3):
        neighbors = np.floor(centers) + offset
        distance = np.abs(centers - neighbors)
        near = ((CUBIC_COEFFICIENT + 2) * distance - (CUBIC_COEFFICIENT + 3)) * distance**2 + 1
        far = CUBIC_COEFFICIENT * (((distance - 5) * distance + 8) * distance - 4)
        columns = np.clip(neighbors, 0, old_size - 1).astype(int)
        np.add.at(weights, (np.arange(new_size), columns), np.where(distance <= 1, near, far))
    return weights
