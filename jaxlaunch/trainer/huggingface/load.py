"""Loads weights from a Hugging Face folder with config.json and safetensors.

Parameters are loaded one by one, and a process reads only the parts for its own devices. The folder
may be local or in gs:// or s3://; of an object in a store only the needed rows are fetched, as
ranges.

A ViT for images of another size than its folder's gets its positions interpolated, as in
transformers and PyTorch. N positions: a class token's, then those of the patches, row by row; D
model.
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

# Coefficient of the cubic kernel, as in PyTorch.
CUBIC_COEFFICIENT = -0.75
# Kinds of faults that one message names.
MAX_FAULTS = 5
# Rows of a matrix that are compared at a time.
COMPARED_ROWS = 4096
# What programs that wrap a model put before the names of its tensors.
WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|base_model\.model|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)

Grid = tuple[int, int]  # rows and columns of patches


def load_parameters(
    model: PublishedModel, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    """Load the parameters of `model`, shaped and placed as `targets`, by name.

    Raises SpecError if config.json describes another model, or a tensor is missing, unexpected or
    of another shape.
    """
    return dict(iterate_parameters(model, targets))


def iterate_parameters(
    model: PublishedModel, targets: Mapping[str, jax.ShapeDtypeStruct], *, is_cast: bool = True
) -> Iterator[tuple[str, Array]]:
    """Yield the parameters of `load_parameters` one by one, so that the caller can release them.

    Unless `is_cast`, each has the smallest dtype that holds all of its tensors in the folder,
    float32 for a double.
    """
    path = model.init_from or ""
    folder_model = folder.read_model(path)
    folder.check_model(model, folder_model, path)
    files = TensorFiles(path)
    leaves, new_names = folder_leaves(model, files), names.new_parameters(model)
    targets = {name: like for name, like in targets.items() if name not in new_names}
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
        # The grid of patches differs from the folder's: each process reads all positions and
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
    """Return the leaves as this folder names them.

    As in transformers, the names may lack the prefix of the model below the head, or all have one
    more; a tied matrix may have the name of the embedding, that of the head, or both. With both,
    the head is the leaf `TIED_HEAD`.
    """
    leaves, prefix = names.parameter_leaves(model), names.NAME_PREFIXES[model.kind]
    if (tied_head := names.tied_head(model)) is not None:
        leaves[TIED_HEAD] = tied_head

    def count_names(leaves: Mapping[str, Leaf]) -> int:
        places = (dict.fromkeys(leaf.stacked_axes, 0) for leaf in leaves.values())
        named = zip(leaves.values(), places, strict=True)
        return sum(leaf.tensor_name(first) in files for leaf, first in named)

    def rename_leaves(rename: Callable[[str], str]) -> dict[str, Leaf]:
        return {
            ours: dataclasses.replace(leaf, name=rename(leaf.name)) for ours, leaf in leaves.items()
        }

    shorter = rename_leaves(lambda name: name.removeprefix(prefix))
    leaves = max(leaves, shorter, rename_leaves(prefix.__add__), key=count_names)
    if tied_head is not None:
        head = leaves.pop(TIED_HEAD)
        if head.name in files:
            is_twice = leaves["embedding"].name in files
            leaves[TIED_HEAD if is_twice else "embedding"] = head
    return leaves


def check_tensors(
    path: str,
    key: str,
    leaves: Mapping[str, Leaf],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    files: TensorFiles,
    unread: tuple[str, ...] = (),
) -> None:
    """Raise SpecError unless the folder holds exactly the tensors that block `key` needs.

    Tensors whose names end with one of `unread` are allowed.
    """
    if unknown := [name for name in targets if name not in leaves]:
        raise SpecError(f"{key}.init_from: Hugging Face has no counterpart of {', '.join(unknown)}")
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter, target in targets.items():
        shapes.update(leaves[parameter].tensor_shapes(target.shape))
    # Names of tensors by what is wrong with them.
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
        texts = [_join_names(faults[fault], fault) for fault in [*faults][:MAX_FAULTS]]
        raise SpecError(f"{path} does not match {key}: {'; '.join(texts)}{more}")


def _join_names(names: Sequence[str], fault: str) -> str:
    if len(names) == 1:
        return f"{names[0]} is {fault}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} are {fault}"


def check_tied_head(
    path: str, leaves: Mapping[str, Leaf], target: jax.ShapeDtypeStruct, files: TensorFiles
) -> None:
    """Raise SpecError if a tied head differs from the embedding [V, D] in a part of this process.

    transformers 5 uses both then, and transformers 4 the embedding alone.
    """
    embedding, head = leaves["embedding"], leaves[TIED_HEAD]
    like = jax.ShapeDtypeStruct(target.shape, jnp.float32)
    assert target.sharding is not None, "the train step gives every parameter a sharding"
    indexes = target.sharding.addressable_devices_indices_map(target.shape).values()
    spans = {
        tuple(cut.indices(size)[:2] for cut, size in zip(index, target.shape, strict=True))
        for index in indexes
    }
    for (first, last), columns in spans:
        for start in range(first, last, COMPARED_ROWS):
            span = slice(start, min(start + COMPARED_ROWS, last)), slice(*columns)
            rows_VD = read_part(embedding, span, like, files)
            if not np.array_equal(rows_VD, read_part(head, span, like, files)):
                raise SpecError(
                    f"{path}: {head.name} differs from {embedding.name}, and config.json says that "
                    "they are tied (tie_word_embeddings): transformers 5 uses both, transformers 4 "
                    f"drops {head.name}. Set tie_word_embeddings to false to keep both, or remove "
                    "the tensor"
                )
    files.close()


def read_parameter(leaf: Leaf, target: jax.ShapeDtypeStruct, files: TensorFiles) -> Array:
    """Read a parameter, one part for each device; replicas are read once."""
    parts: dict[str, np.ndarray[Any, Any]] = {}

    def read_shard(index: Slices | None) -> np.ndarray[Any, Any]:
        assert index is not None, "every local device holds a part"
        cuts = zip(index, target.shape, strict=True)
        spans = tuple(slice(*cut.indices(size)[:2]) for cut, size in cuts)
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
    """Read `parameter[spans]`, assembled tensor by tensor in the dtype it will have."""
    sizes = dict(zip(leaf.ours, target.shape, strict=True))
    span_by_axis = dict(zip(leaf.ours, spans, strict=True))
    cuts = [_cut_axis(group.strip("1"), sizes, span_by_axis) for group in leaf.theirs.split()]
    shape = [size for cut in cuts for size in cut.shape]
    inner_slices = tuple(inner for cut in cuts for inner in cut.inside)
    part_shape = [extent.stop - extent.start for extent in spans]
    part: np.ndarray[Any, Any] = np.empty(part_shape, target.dtype)
    for places in leaf.stacked_indexes(span_by_axis):
        tensor = files[leaf.tensor_name(places)][tuple(cut.read for cut in cuts)]
        destination = tuple(
            places[axis] - span_by_axis[axis].start if axis in places else slice(None)
            for axis in leaf.ours
        )
        part[destination] = tensor.reshape(shape)[inner_slices].transpose(leaf.axis_order)
    return part


class _Cut(NamedTuple):
    """The slice to read along a tensor's axis, and how it is cut into our axes."""

    read: slice
    shape: list[int]
    inside: list[slice]


def _cut_axis(letters: str, sizes: Mapping[str, int], span: Mapping[str, slice]) -> _Cut:
    """Return the slice of a tensor's axis that covers `span`, or all of the axis."""
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
    """Interpolate the positions of patches bicubically, keeping the class token's."""
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
