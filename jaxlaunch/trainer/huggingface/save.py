"""Saves weights as a Hugging Face folder: config.json and safetensors, one file or many with an index.

Written tensor by tensor, under another name until it is complete: no reader sees a partial folder.
"""

from __future__ import annotations

import contextlib
import itertools
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

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import config_json, names, special_tokens
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.tensors import INDEX
from jaxlaunch.trainer.spec import GPT2, OfImages, Published

FILE_BYTES = 2 * 2**30  # of a written file
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}  # what safetensors calls them


class Parameter(Protocol):
    """An array on a device, on the host, or still on storage."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""

    @property
    def dtype(self) -> Any:
        """A dtype of numpy or JAX: float32, float16 or bfloat16."""

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
        """Bytes of the tensor in its file."""
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    to: str,
    model: Published,
    params: Mapping[str, Parameter],
    file_bytes: int = FILE_BYTES,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    classes: Sequence[str] = (),
) -> list[str]:
    """Writes the parameters of `model` as a folder, in files of up to `file_bytes` or of one tensor; their names.

    `beside` are the files of its tokenizer, by name, which say the special tokens that `model.init_from` does not;
    `classes` the names of its labels, if they have names.

    Each parameter is read once, tensor by tensor, and no more than one is held in memory. One process must be able
    to read them whole. Raises SpecError where Hugging Face has no counterpart of a parameter, or `to` is not empty.
    """
    leaves, counts = names.leaves(model), names.counts(model)
    _check(model, leaves, params)
    generation = {**special_tokens.of_tokenizer(beside), **special_tokens.generation(model.init_from)}
    dtype = next(iter(params.values())).dtype.name
    config = config_json.config(model) | _special(model, generation) | {"dtype": dtype}
    if isinstance(model, OfImages) and len(classes) == model.classes:
        config |= {"id2label": dict(enumerate(classes)), "label2id": {name: at for at, name in enumerate(classes)}}
    said = {"config.json": config} | ({} if isinstance(model, OfImages) else {special_tokens.GENERATION: generation})
    zeros = {name: np.zeros((), np.int64) for name in counts}  # of batches, which nothing reads: there is a momentum
    return write(
        to, leaves | counts, {**params, **zeros} if zeros else params, {**said, **beside}, file_bytes=file_bytes
    )


def write(
    to: str,
    leaves: Mapping[str, Leaf],
    params: Mapping[str, Parameter],
    described_in: Mapping[str, Mapping[str, Any] | bytes],
    *,
    stem: str = "model",
    file_bytes: int = FILE_BYTES,
) -> list[str]:
    """Writes parameters, stored as `leaves` say, and other files by name, as a folder; the names of its safetensors.

    As `save` does, whose file of weights is named after `stem`. Raises SpecError where `to` is not empty.
    """
    with _whole_or_not_at_all(target(to)) as folder:
        files = _named(list(_grouped(_tensors(leaves, params), file_bytes)), stem)
        for name, group in files.items():
            with _synced(folder / name) as file:
                _write(file, group, leaves, params)
        if len(files) > 1:
            with _synced(folder / INDEX) as file:
                file.write(encoded(_index(files)))
        for name, content in described_in.items():
            (folder / name).parent.mkdir(exist_ok=True)  # chat templates have a folder of their own
            with _synced(folder / name) as file:
                file.write(content if isinstance(content, bytes) else encoded(content))
    return list(files)


def _special(model: Published, generation: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens that begin, end and pad a text; null where not known: left out, transformers takes its own."""
    if isinstance(model, OfImages):
        return {}
    theirs = isinstance(model, GPT2) and model.vocab > config_json.GPT2_END  # where its own vocabulary has them
    known = {key: generation[key] for key in special_tokens.KEYS if key in generation}
    return {**({} if theirs else dict.fromkeys(special_tokens.KEYS)), **known}


def _check(model: Published, leaves: Mapping[str, Leaf], params: Mapping[str, Parameter]) -> None:
    unknown = [name for name in params if name not in leaves]
    if unknown:
        raise SpecError(f"train.model: Hugging Face has no counterpart of {', '.join(unknown)}")
    absent = [name for name in leaves if name not in params]
    if absent:
        raise SpecError(
            f"train.model: Hugging Face's {model.kind} also needs parameters that it does not have: {', '.join(absent)}"
        )


def target(to: str) -> Path:
    """The folder to write, as an absolute path. Raises SpecError where no new folder can be renamed to it."""
    if "://" in to:
        raise SpecError(f"{to} is not a local folder; write to a local one, and copy it from there")
    folder = Path(to).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} already exists; name a new folder or an empty one")
    if folder.is_symlink() or folder.is_mount():
        raise SpecError(f"{folder} is a symbolic link or a mount point, which cannot be replaced; name a folder in it")
    return folder


@contextlib.contextmanager
def _whole_or_not_at_all(wanted: Path) -> Iterator[Path]:
    """A new folder beside `wanted`, renamed to it at the end, or removed when something is raised."""
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
    """A new file, synced to the disk at the end: after a power cut the renamed folder must be complete."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def encoded(content: Mapping[str, Any]) -> bytes:
    """A block of keys as the text of its file."""
    return json.dumps(content, indent=2).encode() + b"\n"


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
        # Without a name: what was written is let go before the next one is read.
        file.write(_theirs(leaves[tensor.parameter], params[tensor.parameter], tensor).view(np.uint8).data)


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


def _named(groups: list[list[Tensor]], stem: str) -> dict[str, list[Tensor]]:
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _index(files: Mapping[str, list[Tensor]]) -> dict[str, Any]:
    total = sum(tensor.nbytes for tensor in itertools.chain.from_iterable(files.values()))
    places = {tensor.name: name for name, group in files.items() for tensor in group}
    return {"metadata": {"total_size": total}, "weight_map": places}
