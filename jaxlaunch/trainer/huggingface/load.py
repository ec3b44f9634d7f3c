"""Loads weights from a Hugging Face folder with config.json and safetensors.

Parameters are loaded one by one, and a process reads only the parts for its own devices. The folder
may be local or in gs:// or s3://; of an object in a store only the needed rows are fetched, as
ranges.

A ViT for images of another size than its folder's gets its positions interpolated, as in
transformers and PyTorch. N positions: a class token's, then those of the patches, row by row; D
model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import Array
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder, names
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.spec import PublishedModel, ViT

INDEX_FILE = "model.safetensors.index.json"
DEFAULT_KEY = "train.model.init_from"
DTYPES: dict[str, Any] = dict(F32=np.float32, F16=np.float16, BF16=jnp.bfloat16, F64=np.float64)
# Size of the field that holds the length of the header.
LENGTH_BYTES = 8
# Coefficient of the cubic kernel, as in PyTorch.
CUBIC_COEFFICIENT = -0.75

Slices = tuple[slice, ...]
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
    check_tensors(path, "train.model", leaves, stored, files, names.unread_suffixes(model))
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
    """Return the leaves as this folder names them: without a head there is no prefix."""
    leaves, prefix = names.parameter_leaves(model), names.NAME_PREFIXES[model.kind]
    if any(name.startswith(prefix) for name in files):
        return leaves
    return {
        ours: dataclasses.replace(leaf, name=leaf.name.removeprefix(prefix))
        for ours, leaf in leaves.items()
    }


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
    faults = [f"{name} is missing" for name in shapes if name not in files]
    for name, shape in shapes.items():
        if name in files and tuple(files[name].get_shape()) != shape:
            is_head = name.startswith("classifier.")
            hint = "; for classes of your own set new_head: true" if is_head else ""
            stored_shape = files[name].get_shape()
            faults.append(f"{name} is {stored_shape}, {key} makes it {list(shape)}{hint}")
    unused = [name for name in files if name not in shapes and not name.endswith(unread)]
    faults += [f"{name} is not used by {key}" for name in unused]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise SpecError(f"{path} does not match {key}: {'; '.join(faults[:5])}{more}")


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


# --- tensors by name ------------------------------------------------------------------------------


class TensorFiles:
    """The tensors of a folder by name. Raises SpecError without any, or for an unreadable file."""

    def __init__(self, folder: str, key: str = DEFAULT_KEY) -> None:
        self._key = key
        storage: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if remote.is_remote(folder):
            remote.check_url(key, folder)
            storage = remote.convert_errors(f"reading {key} = {folder}", SpecError)
        with storage:
            self._paths = _tensor_paths(folder, key)
        self._open: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def __getitem__(self, name: str) -> Any:
        """Return a lazy tensor, read when it is sliced. Raises SpecError."""
        path = self._paths[name]
        try:
            if path not in self._open:
                self._open[path] = _open_file(path, self._key)
            return self._open[path].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise SpecError(f"{self._key}: {path} cannot be read: {error}") from None

    def tensor_dtype(self, name: str) -> np.dtype[Any]:
        """Return the stored dtype of a tensor. Raises SpecError if it is not floating-point."""
        stored_dtype = self[name].get_dtype()
        if stored_dtype not in DTYPES:
            raise SpecError(
                f"{self._key}: {name} is {stored_dtype}; {', '.join(DTYPES)} are supported"
            )
        dtype: np.dtype[Any] = np.dtype(DTYPES[stored_dtype])
        return dtype

    def close(self) -> None:
        """Close the local files, whose mapped pages count as memory of this process."""
        for path in [path for path in self._open if not remote.is_remote(path)]:
            del self._open[path]


def _open_file(path: str, key: str) -> Any:
    return RemoteFile(path, key) if remote.is_remote(path) else safe_open(path, "np")


def _tensor_paths(folder: str, key: str) -> dict[str, str]:
    """Return the file of each tensor, by the index or by opening all files."""
    root = epath.Path(folder)
    try:
        if (root / INDEX_FILE).exists():
            weights = json.loads((root / INDEX_FILE).read_text())["weight_map"]
            return {name: str(root / file) for name, file in weights.items()}
        paths: dict[str, str] = {}
        for path in sorted(map(str, root.glob("*.safetensors"))):
            paths |= dict.fromkeys(_open_file(path, key).keys(), path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SpecError(f"{key} = {folder} cannot be read: {error}") from None
    if not paths:
        raise SpecError(f"{key} = {folder} is not a folder with safetensors files")
    return paths


class RemoteFile:
    """A safetensors file in an object store, with the interface of `safe_open`.

    Raises SpecError for an invalid or truncated file, and StorageError.
    """

    def __init__(self, url: str, key: str = DEFAULT_KEY) -> None:
        self._url, self._key = url, key
        with remote.convert_errors(f"reading {url}", SpecError):
            size = int(remote.open_filesystem(url).size(url))
        self._start = LENGTH_BYTES
        if size > LENGTH_BYTES:
            self._start += int.from_bytes(self.read_range(0, LENGTH_BYTES), "little")
        try:
            is_complete = LENGTH_BYTES < self._start <= size
            header = json.loads(self.read_range(LENGTH_BYTES, self._start)) if is_complete else {}
            self._header = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = self._start + max(entry["data_offsets"][1] for entry in self._header.values())
        except (ValueError, TypeError, LookupError, AttributeError):
            raise SpecError(
                f"{key}: {url} is not a safetensors file: its {size} bytes do not begin "
                "with a header"
            ) from None
        if size < end:
            raise SpecError(f"{key}: {url} is cut off: it has {size} bytes of {end}")

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._header)

    def get_slice(self, name: str) -> RemoteTensor:
        """Return a lazy tensor. Raises SpecError if it is not in the file or not floating-point."""
        if name not in self._header:
            place = f"{self._url}, where {INDEX_FILE} says it is"
            raise SpecError(f"{self._key}: {name} is not in {place}")
        entry = self._header[name]
        dtype, start = entry["dtype"], self._start + entry["data_offsets"][0]
        if dtype not in DTYPES:
            supported = f"{', '.join(DTYPES)} are supported"
            raise SpecError(f"{self._key}: {name} in {self._url} is {dtype}; {supported}")
        return RemoteTensor(self, entry["shape"], dtype, start)

    def read_range(self, start: int, end: int) -> bytes:
        """Read the bytes from `start` to `end`. Raises SpecError, StorageError."""
        with remote.convert_errors(f"reading {self._url}", SpecError):
            return remote.read_range(self._url, start, end)


@dataclasses.dataclass(frozen=True)
class RemoteTensor:
    """A lazy tensor in an object store: slicing fetches the needed rows along the first axis."""

    file: RemoteFile
    shape: list[int]
    dtype: str
    start: int

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return self.shape

    def get_dtype(self) -> str:
        """Return the dtype as named by safetensors."""
        return self.dtype

    def __getitem__(self, slices: Slices) -> np.ndarray[Any, Any]:
        dtype, rows = np.dtype(DTYPES[self.dtype]), range(*slices[0].indices(self.shape[0]))
        row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        start, end = (self.start + row * row_bytes for row in (rows.start, rows.stop))
        data = self.file.read_range(start, end)
        array: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(len(rows), *self.shape[1:])
        return array[(slice(None), *slices[1:])]
