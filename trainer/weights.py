"""Weights from and to a Hugging Face folder: config.json and safetensors, one file or many with an index.

Leaf by leaf and part by part: a process reads what its own devices hold and no more, and writes one file at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trainer import huggingface
from trainer.errors import SpecError
from trainer.huggingface import Leaf
from trainer.spec import Published

INDEX = "model.safetensors.index.json"
FILE_BYTES = 2 * 2**30  # of a written file: what the host holds at once
Slices = tuple[slice, ...]


class Files:
    """The tensors of a folder by name. Raises SpecError when there are none, or a file is not what it should be."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._places, self._open = folder, _places(folder), dict[Path, Any]()
        self._stack = stack

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Any:
        """A tensor that is read where it is sliced."""
        path = self._places[name]
        try:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, "np"))
            return self._open[path].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise SpecError(f"train.model.init_from: {path} cannot be read: {error}") from None


def _places(folder: Path) -> dict[str, Path]:
    """Tensor -> file. Without an index all safetensors files of the folder are looked through."""
    index = folder / INDEX
    try:
        if index.exists():
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        found: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "np") as file:
                found |= dict.fromkeys(file.keys(), path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SpecError(f"train.model.init_from = {folder} cannot be read: {error}") from None
    if not found:
        raise SpecError(f"train.model.init_from = {folder}: there is no folder here with safetensors files in it")
    return found


# --- in ---------------------------------------------------------------------------------------------------------------


def load(model: Published, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """The parameters of `model` out of its folder, as `wanted` describes them: name -> shape, dtype and sharding.

    Raises SpecError when config.json describes another model, or a tensor is missing, left over or of another shape.
    """
    folder = Path(model.init_from or "")
    _check_config(model, folder)
    with contextlib.ExitStack() as stack:
        files = Files(folder, stack)
        leaves = _renamed(huggingface.family(model), files)
        _check_tensors(model, leaves, wanted, files)
        return {name: _read(leaves[name], like, files) for name, like in wanted.items()}


def _check_config(model: Published, folder: Path) -> None:
    try:
        given = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"train.model.init_from = {folder}: config.json cannot be read: {error}") from None
    differing = huggingface.differences(model, given)
    if differing:
        raise SpecError(f"{folder / 'config.json'} describes another model than train.model: {'; '.join(differing)}")


def _renamed(family: huggingface.Family, files: Files) -> dict[str, Leaf]:
    """The leaves by the names of this folder: those of a model without its head begin later."""
    if any(name.startswith(family.prefix) for name in files):
        return dict(family.leaves)
    return {
        ours: Leaf(leaf.ours, leaf.theirs, leaf.name.removeprefix(family.prefix))
        for ours, leaf in family.leaves.items()
    }


def _check_tensors(
    model: Published, leaves: Mapping[str, Leaf], wanted: Mapping[str, jax.ShapeDtypeStruct], files: Files
) -> None:
    strangers = [name for name in wanted if name not in leaves]
    if strangers:
        raise SpecError(f"train.model.init_from: Hugging Face has no counterpart of {', '.join(strangers)}")
    shapes = {name: shape for ours, like in wanted.items() for name, shape in tensors(leaves[ours], like.shape)}
    faults = [f"{name} is missing" for name in shapes if name not in files]
    for name, shape in shapes.items():
        if name in files and tuple(files[name].get_shape()) != shape:
            faults.append(f"{name} is {files[name].get_shape()}, train.model makes it {list(shape)}")
    unread = huggingface.family(model).unread
    faults += [f"{name} is of no use" for name in files if name not in shapes and not name.endswith(unread)]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise SpecError(f"{model.init_from} does not hold train.model: {'; '.join(faults[:5])}{more}")


def _read(leaf: Leaf, like: jax.ShapeDtypeStruct, files: Files) -> Array:
    """A parameter, each device's part read by itself; replicas are read once."""
    parts: dict[str, np.ndarray[Any, Any]] = {}

    def part(index: Slices | None) -> np.ndarray[Any, Any]:
        assert index is not None, "every device of ours holds a part"
        spans = tuple(slice(*each.indices(size)[:2]) for each, size in zip(index, like.shape, strict=True))
        if str(spans) not in parts:
            parts[str(spans)] = _part(leaf, spans, like, files)
        return parts[str(spans)]

    assert like.sharding is not None, "a parameter has its place before it has numbers"
    return jax.make_array_from_callback(like.shape, like.sharding, part)


def _part(leaf: Leaf, spans: Slices, like: jax.ShapeDtypeStruct, files: Files) -> np.ndarray[Any, Any]:
    """`parameter[spans]`, assembled tensor by tensor in the dtype it will have."""
    sizes, span = dict(zip(leaf.ours, like.shape, strict=True)), dict(zip(leaf.ours, spans, strict=True))
    cuts = [_cut(group.strip("1"), sizes, span) for group in leaf.theirs.split()]
    shape = [size for cut in cuts for size in cut.shape]
    inside = tuple(each for cut in cuts for each in cut.inside)
    part: np.ndarray[Any, Any] = np.empty([each.stop - each.start for each in spans], like.dtype)
    for places in _places_within(leaf, span):
        tensor = files[leaf.tensor(places)][tuple(cut.read for cut in cuts)]
        where = tuple(places[axis] - span[axis].start if axis in places else slice(None) for axis in leaf.ours)
        part[where] = tensor.reshape(shape)[inside].transpose(_order(leaf))
    return part


class Cut(NamedTuple):
    """What is read along one axis of theirs, and how what was read is cut into axes of ours."""

    read: slice
    shape: list[int]
    inside: list[slice]


def _cut(letters: str, sizes: Mapping[str, int], span: Mapping[str, slice]) -> Cut:
    """The span along an axis of theirs that runs over these axes of ours; whole where it does not lie in one piece."""
    whole = [sizes[axis] for axis in letters]
    if not letters:
        return Cut(slice(0, 1), [], [])
    if all(span[axis] == slice(0, sizes[axis]) for axis in letters[1:]):
        first, step = span[letters[0]], math.prod(whole[1:])
        shape = [first.stop - first.start, *whole[1:]]
        return Cut(slice(first.start * step, first.stop * step), shape, [slice(None)] * len(whole))
    return Cut(slice(0, math.prod(whole)), whole, [span[axis] for axis in letters])


def _order(leaf: Leaf) -> list[int]:
    """Where each axis of a tensor's part in ours lies among the axes of theirs."""
    letters = "".join(leaf.theirs.split()).replace("1", "")
    return [letters.index(axis) for axis in leaf.inside]


def _places_within(leaf: Leaf, span: Mapping[str, slice]) -> Iterator[dict[str, int]]:
    """The places along the stacked axes that lie in the span: one tensor each."""
    ranges = [range(span[axis].start, span[axis].stop) for axis in leaf.stacked]
    return (dict(zip(leaf.stacked, places, strict=True)) for places in itertools.product(*ranges))


def tensors(leaf: Leaf, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors that make a parameter of this shape."""
    sizes = dict(zip(leaf.ours, shape, strict=True))
    theirs = tuple(math.prod(sizes[axis] for axis in group.strip("1")) for group in leaf.theirs.split())
    for places in _places_within(leaf, {axis: slice(0, size) for axis, size in sizes.items()}):
        yield leaf.tensor(places), theirs


# --- out --------------------------------------------------------------------------------------------------------------


class Tensor(NamedTuple):
    """A tensor to be written: `parameter[where]`, its axes permuted and grouped."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    where: tuple[int | slice, ...]
    nbytes: int


def save(folder: str, model: Published, params: Mapping[str, Array], file_bytes: int = FILE_BYTES) -> None:
    """Writes the parameters of `model` as a Hugging Face folder, in files of up to `file_bytes` (or of one tensor).

    The host holds one file at a time, which is read from the devices tensor by tensor. One process must see them whole.
    """
    leaves, target = huggingface.family(model).leaves, Path(folder)
    files = list(_grouped(_tensors(leaves, params), file_bytes))
    target.mkdir(parents=True, exist_ok=True)
    total, places = 0, dict[str, str]()
    for number, group in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        content = {each.name: _theirs(leaves[each.parameter], params[each.parameter], each) for each in group}
        save_file(content, target / name, metadata={"format": "pt"})
        total += sum(array.nbytes for array in content.values())
        places |= dict.fromkeys(content, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    dtype = next(iter(params.values())).dtype.name
    (target / "config.json").write_text(json.dumps(huggingface.config(model) | {"dtype": dtype}, indent=2) + "\n")


def _tensors(leaves: Mapping[str, Leaf], params: Mapping[str, Array]) -> Iterator[Tensor]:
    for parameter, array in params.items():
        leaf, sizes = leaves[parameter], dict(zip(leaves[parameter].ours, array.shape, strict=True))
        places = _places_within(leaf, {axis: slice(0, size) for axis, size in sizes.items()})
        for at, (name, shape) in zip(places, tensors(leaf, array.shape), strict=True):
            where = tuple(at.get(axis, slice(None)) for axis in leaf.ours)
            yield Tensor(name, shape, parameter, where, math.prod(shape) * array.dtype.itemsize)


def _theirs(leaf: Leaf, array: Array, tensor: Tensor) -> np.ndarray[Any, Any]:
    back = np.argsort(_order(leaf))
    return np.ascontiguousarray(np.asarray(array[tensor.where]).transpose(back).reshape(tensor.shape))


def _grouped(each: Iterable[Tensor], file_bytes: int) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for tensor in each:
        if group and sum(held.nbytes for held in group) + tensor.nbytes > file_bytes:
            yield group
            group = []
        group.append(tensor)
    yield group
