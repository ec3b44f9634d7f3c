"""Weights to a Hugging Face folder: config.json and safetensors, one file or many with an index.

Written tensor by tensor, under another name until all is there: no reader takes a part for the whole.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from trainer import huggingface
from trainer.errors import SpecError
from trainer.huggingface import Leaf
from trainer.spec import Published
from trainer.weights import INDEX

FILE_BYTES = 2 * 2**30  # of a written file
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # what safetensors calls them


class Parameter(Protocol):
    """An array on a device, on the host, or still on storage."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, where: Any, /) -> Any: ...


class Tensor(NamedTuple):
    """A tensor to be written: `parameter[where]`, its axes permuted and grouped."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    where: tuple[int | slice, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(to: str, model: Published, params: Mapping[str, Parameter], file_bytes: int = FILE_BYTES) -> list[str]:
    """Writes the parameters of `model` as a folder, in files of up to `file_bytes` (or of one tensor); their names.

    Each parameter is read once, tensor by tensor, and no more than one tensor is held here. One process must see them
    whole. Raises SpecError where Hugging Face has no counterpart of a parameter, or `to` holds something already.
    """
    leaves = huggingface.family(model).leaves
    _check(model, leaves, params)
    with _whole_or_not_at_all(target(to)) as folder:
        files = _named(list(_grouped(_tensors(leaves, params), file_bytes)))
        for name, group in files.items():
            with _synced(folder / name) as file:
                _write(file, group, leaves, params)
        if len(files) > 1:
            _write_json(folder / INDEX, _index(files))
        dtype = next(iter(params.values())).dtype.name
        _write_json(folder / "config.json", huggingface.config(model) | {"dtype": dtype})
    return list(files)


def _check(model: Published, leaves: Mapping[str, Leaf], params: Mapping[str, Parameter]) -> None:
    strangers = [name for name in params if name not in leaves]
    if strangers:
        raise SpecError(f"train.model: Hugging Face has no counterpart of {', '.join(strangers)}")
    absent = [name for name in leaves if name not in params and not (name == "head" and getattr(model, "tied", False))]
    if absent:
        raise SpecError(f"train.model: Hugging Face's {model.kind} also has what is not here: {', '.join(absent)}")


def target(to: str) -> Path:
    """The folder to write. Raises SpecError where no other folder can get that name."""
    if "://" in to:
        raise SpecError(f"{to} is no folder of this machine; write to one, and copy it from there")
    folder = Path(to).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} is there already; name a folder that is not, or an empty one")
    if folder.is_symlink() or folder.is_mount():
        raise SpecError(f"{folder} is a link or a volume's own folder, which cannot be made anew; name a folder in it")
    return folder


@contextlib.contextmanager
def _whole_or_not_at_all(wanted: Path) -> Iterator[Path]:
    """A new folder beside the one that is wanted, which it becomes at the end, unless something is raised."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    folder = wanted.with_name(f".{wanted.name}.part-{secrets.token_hex(4)}")
    folder.mkdir()
    try:
        yield folder
        folder.rename(wanted)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is on the disk at the end: after a power cut the folder's name must not stand for less."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with _synced(path) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")


def _write(
    file: IO[bytes], each: Iterable[Tensor], leaves: Mapping[str, Leaf], params: Mapping[str, Parameter]
) -> None:
    """One file of safetensors: the header's length, the header, and the tensors' bytes in its order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in each:
        place = [start, start := start + tensor.nbytes]
        header[tensor.name] = {"dtype": DTYPES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in each:
        theirs = _theirs(leaves[tensor.parameter], params[tensor.parameter], tensor)
        file.write(theirs.view(np.uint8).data)


def _theirs(leaf: Leaf, parameter: Parameter, tensor: Tensor) -> np.ndarray[Any, Any]:
    back = np.argsort(leaf.order)
    return np.ascontiguousarray(np.asarray(parameter[tensor.where]).transpose(back).reshape(tensor.shape))


def _tensors(leaves: Mapping[str, Leaf], params: Mapping[str, Parameter]) -> Iterator[Tensor]:
    for parameter, array in params.items():
        leaf = leaves[parameter]
        places = leaf.places(leaf.whole(array.shape))
        for at, (name, shape) in zip(places, leaf.tensors(array.shape), strict=True):
            where = tuple(at.get(axis, slice(None)) for axis in leaf.ours)
            yield Tensor(name, shape, parameter, where, np.dtype(array.dtype))


def _grouped(each: Iterable[Tensor], file_bytes: int) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for tensor in each:
        if group and sum(held.nbytes for held in group) + tensor.nbytes > file_bytes:
            yield group
            group = []
        group.append(tensor)
    yield group


def _named(groups: list[list[Tensor]]) -> dict[str, list[Tensor]]:
    """The groups by the names of their files."""
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _index(files: Mapping[str, list[Tensor]]) -> dict[str, Any]:
    total = sum(tensor.nbytes for tensor in itertools.chain.from_iterable(files.values()))
    places = {tensor.name: name for name, group in files.items() for tensor in group}
    return {"metadata": {"total_size": total}, "weight_map": places}
