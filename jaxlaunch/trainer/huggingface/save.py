"""Saves a model as a folder of config.json and safetensors, one file or shards with an index.

A folder is written tensor by tensor under a temporary name and then renamed, so that no reader sees
a partial folder. Models that Hugging Face supports are written in its format. It does not support
the MLP of a table. Its arrays have our names and axes, so that a few lines of NumPy can evaluate
it, and config.json contains its sizes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import pydantic
from etils import epath
from jax import Array

from jaxlaunch.trainer.errors import SpecError, pydantic_message
from jaxlaunch.trainer.huggingface import config_json, load, names
from jaxlaunch.trainer.huggingface.folder import (
    GENERATION_FILE,
    TOKEN_KEYS,
    render_generation_config,
)
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.tensor_files import INDEX_FILE, MODEL_STEM, TensorFiles
from jaxlaunch.trainer.spec import GPT2, MLP, ImageModel, PublishedModel

# The default of the largest size of a safetensors file.
MAX_FILE_BYTES = 2 * 2**30
# The names of dtypes in safetensors.
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
MLP_TYPE = "jaxlaunch_mlp"
MLP_SIZES = ("layers", "width", "classes")


class Parameter(Protocol):
    """An array on a device, on the host, or in a file that is read when it is sliced."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> Any:
        """NumPy or JAX dtype, one of DTYPES."""

    def __getitem__(self, index: Any, /) -> Any: ...


def save_model(
    target: str,
    model: PublishedModel,
    params: Mapping[str, Parameter],
    file_bytes: int = MAX_FILE_BYTES,
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
    classes: Sequence[str] = (),
    turn_ends: Sequence[int] = (),
) -> list[str]:
    """Write a model in the format of Hugging Face, and return the names of its safetensors files.

    Parameters are read tensor by tensor, with at most one tensor in memory. The special tokens are
    those of `model.init_from`, or otherwise those of the tokenizer in `extra_files`.

    Args:
        target: Folder to write.
        model: Model.
        params: Parameters by name, all of which this process can read.
        file_bytes: Largest size of a safetensors file, unless a single tensor is larger.
        extra_files: Contents of further files, by name.
        classes: Names of the labels, if they have names.
        turn_ends: Tokens that end a turn of a chat.

    Raises:
        SpecError: Hugging Face has no counterpart of a parameter, or `target` is not empty.
    """
    leaves, counts = names.parameter_leaves(model), names.batch_counts(model)
    if unknown := [name for name in params if name not in leaves]:
        raise SpecError(f"train.model: Hugging Face has no counterpart of {', '.join(unknown)}")
    if missing := [name for name in leaves if name not in params]:
        raise SpecError(
            f"train.model: Hugging Face's {model.kind} also needs parameters that it does not "
            f"have: {', '.join(missing)}"
        )
    generation = render_generation_config(model.init_from, extra_files, turn_ends)
    dtype = next(iter(params.values())).dtype.name
    config = config_json.render_config(model)
    files: dict[str, Mapping[str, Any] | bytes] = {}
    if isinstance(model, ImageModel):
        if len(classes) == model.classes:
            config |= config_json.label_keys(classes)
    else:
        # Tokens that are not known must be null. If the keys were missing, transformers would use
        # the tokens of the family's original vocabulary.
        if not (isinstance(model, GPT2) and model.vocab > config_json.GPT2_END_TOKEN):
            config |= dict.fromkeys(TOKEN_KEYS)
        config |= {key: generation[key] for key in TOKEN_KEYS if key in generation}
        files[GENERATION_FILE] = generation
    # transformers requires the batch counters, but does not use them for norms with a momentum.
    arrays = {**params, **{name: np.zeros((), np.int64) for name in counts}} if counts else params
    files = {"config.json": config | {"dtype": dtype}, **files, **extra_files}
    return write_folder(target, leaves | counts, arrays, files, file_bytes=file_bytes)


def write_folder(
    target: str,
    leaves: Mapping[str, Leaf],
    params: Mapping[str, Parameter],
    files: Mapping[str, Mapping[str, Any] | bytes],
    *,
    stem: str = MODEL_STEM,
    file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write a folder of safetensors and other files, and return the names of the safetensors files.

    Args:
        target: Folder to write.
        leaves: Layout of each parameter.
        params: Parameters by name.
        files: Other files by name, as bytes or as an object to encode as JSON.
        stem: Beginning of the names of the weight files.
        file_bytes: Largest size of a safetensors file, unless a single tensor is larger.

    Raises:
        SpecError: `target` is not empty.
    """
    with _complete_folder(check_target(target)) as folder:
        groups = list(_group_tensors(_list_tensors(leaves, params), file_bytes))
        stems = [stem]
        if len(groups) > 1:
            stems = [f"{stem}-{index + 1:05}-of-{len(groups):05}" for index in range(len(groups))]
        paths = [f"{file_stem}.safetensors" for file_stem in stems]
        tensor_files: dict[str, str] = {}
        for name, group in zip(paths, groups, strict=True):
            with _open_synced(folder / name) as file:
                _write_tensors(file, group, leaves, params)
            tensor_files |= dict.fromkeys((tensor.name for tensor in group), name)
        if len(groups) > 1:
            metadata = {"total_size": sum(tensor.nbytes for group in groups for tensor in group)}
            files = {INDEX_FILE: {"metadata": metadata, "weight_map": tensor_files}, **files}
        for name, content in files.items():
            # Chat templates may be in a subfolder.
            (folder / name).parent.mkdir(exist_ok=True)
            with _open_synced(folder / name) as file:
                file.write(content if isinstance(content, bytes) else encode_json(content))
    return paths


def check_target(target: str) -> Path:
    """Return the absolute path of a folder to write.

    Raises SpecError if the path is not local, is not empty, or cannot be replaced.
    """
    if "://" in target:
        raise SpecError(
            f"{target} is not a local folder; write to a local one, and copy it from there"
        )
    folder = Path(target).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} already exists; name a new folder or an empty one")
    if folder.is_symlink() or folder.is_mount():
        raise SpecError(
            f"{folder} is a symbolic link or a mount point, which cannot be replaced; name a "
            "folder in it"
        )
    return folder


@contextlib.contextmanager
def _complete_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that is renamed to `target` at the end, or removed after an exception."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.part-{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        yield folder
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _open_synced(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file and sync it at the end, so that the folder survives a power failure."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def encode_json(content: Mapping[str, Any]) -> bytes:
    """Encode a block of keys as a JSON file."""
    return json.dumps(content, indent=2).encode() + b"\n"


class _Tensor(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Name of the tensor in the file.
        shape: Shape of the tensor in the file.
        parameter: Name of the parameter that contains it.
        slices: Part of the parameter, whose axes are then permuted and merged.
        dtype: Dtype of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    slices: tuple[int | slice, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def _list_tensors(leaves: Mapping[str, Leaf], params: Mapping[str, Parameter]) -> Iterator[_Tensor]:
    for parameter, array in params.items():
        leaf = leaves[parameter]
        stacked_indexes = leaf.stacked_indexes(leaf.full_span(array.shape))
        tensor_shapes = leaf.tensor_shapes(array.shape)
        for indexes, (name, shape) in zip(stacked_indexes, tensor_shapes, strict=True):
            slices = tuple(indexes.get(axis, slice(None)) for axis in leaf.ours)
            yield _Tensor(name, shape, parameter, slices, np.dtype(array.dtype))


def _group_tensors(tensors: Iterable[_Tensor], file_bytes: int) -> Iterator[list[_Tensor]]:
    group: list[_Tensor] = []
    for tensor in tensors:
        if group and sum(other.nbytes for other in group) + tensor.nbytes > file_bytes:
            yield group
            group = []
        group.append(tensor)
    yield group


def _write_tensors(
    file: IO[bytes],
    tensors: Iterable[_Tensor],
    leaves: Mapping[str, Leaf],
    params: Mapping[str, Parameter],
) -> None:
    """Write a safetensors file: the length of the header, the header, and the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        dtype, offsets = DTYPES[tensor.dtype.name], [start, start := start + tensor.nbytes]
        header[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The header is padded, so that the tensors are aligned to 8 bytes.
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        array = np.asarray(params[tensor.parameter][tensor.slices])
        array = array.transpose(np.argsort(leaves[tensor.parameter].axis_order))
        file.write(np.ascontiguousarray(array.reshape(tensor.shape)).view(np.uint8).data)
        # The array must be released before the next one is read.
        del array


# --- the MLP of a table ---------------------------------------------------------------------------


def save_mlp(
    target: str, model: MLP, params: Mapping[str, Parameter], extra_files: Mapping[str, bytes]
) -> list[str]:
    """Write an MLP as a folder, and return the names of its safetensors files. Raises SpecError."""
    config = {"model_type": MLP_TYPE, **{key: getattr(model, key) for key in MLP_SIZES}}
    leaves = {name: _mlp_leaf(name, len(array.shape)) for name, array in params.items()}
    return write_folder(target, leaves, params, {"config.json": config, **extra_files})


def read_mlp_model(folder: str) -> MLP | None:
    """Read the model of a folder that `save_mlp` wrote, or return None for other folders.

    Raises SpecError.
    """
    try:
        config = json.loads((epath.Path(folder) / "config.json").read_text())
        if not isinstance(config, dict) or config.get("model_type") != MLP_TYPE:
            return None
        return MLP.model_validate({"kind": "mlp", **{key: config.get(key) for key in MLP_SIZES}})
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        problem = f"{fault['loc'][0]} {pydantic_message(fault)}"
        raise SpecError(f"{folder}: config.json: {problem}") from None
    except ValueError as error:
        raise SpecError(f"{folder}: config.json cannot be read: {error}") from None


def load_mlp(folder: str, targets: Mapping[str, Any]) -> dict[str, Array]:
    """Load the parameters of an MLP, with shapes and shardings of `targets`. Raises SpecError."""
    files = TensorFiles(folder, "the export")
    leaves = {name: _mlp_leaf(name, len(target.shape)) for name, target in targets.items()}
    load.check_tensors(folder, "its config.json", leaves, targets, files)
    return {
        name: load.read_parameter(leaves[name], target, files) for name, target in targets.items()
    }


def _mlp_leaf(name: str, axes: int) -> Leaf:
    return Leaf("io"[-axes:], " ".join("io"[-axes:]), name)
