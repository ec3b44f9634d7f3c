"""Loads weights from a Hugging Face folder: config.json and safetensors, one file or many with an index.

Parameter by parameter and part by part: a process reads only what its own devices hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder, names, resolution
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.tensors import Files
from jaxlaunch.trainer.spec import Published, ViT

Slices = tuple[slice, ...]


def load(model: Published, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
    """The parameters of `model` from its folder, with the shapes, dtypes and shardings of `wanted`, by name.

    Raises SpecError when config.json describes another model, or a tensor is missing, left over or of another shape.
    """
    return dict(each(model, wanted))


def each(
    model: Published, wanted: Mapping[str, jax.ShapeDtypeStruct], *, is_cast: bool = True
) -> Iterator[tuple[str, Array]]:
    """What `load` returns, one parameter after the other: those that the caller lets go take no memory.

    Unless `is_cast`, each has the dtype that the folder has it in.
    """
    path = model.init_from or ""
    theirs = folder.described_by(path)
    folder.check(model, theirs, path)
    files = Files(path)
    leaves, drawn = renamed(model, files), names.drawn(model)
    wanted = {name: like for name, like in wanted.items() if name not in drawn}
    stored = _stored(model, theirs, wanted)
    check_tensors(path, "train.model", leaves, stored, files, names.unread(model))
    for name, like in wanted.items():
        dtype = like.dtype if is_cast else _dtype(leaves[name], like, files)
        cast = jax.ShapeDtypeStruct(like.shape, dtype, sharding=like.sharding)
        if like.shape == stored[name].shape:
            yield name, read(leaves[name], cast, files)
        else:
            yield name, _interpolated(leaves[name], stored[name].shape, cast, files, model, theirs)


def _stored(
    model: Published, theirs: Published, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """What is wanted, a ViT's positions as many as the folder has them."""
    if not isinstance(model, ViT) or not isinstance(theirs, ViT) or "positions" not in wanted:
        return dict(wanted)
    like = wanted["positions"]
    count = like.shape[0] - model.patches + theirs.patches
    return {**wanted, "positions": jax.ShapeDtypeStruct((count, *like.shape[1:]), like.dtype)}


def _interpolated(
    leaf: Leaf, shape: tuple[int, ...], like: jax.ShapeDtypeStruct, files: Files, model: Published, theirs: Published
) -> Array:
    """The positions of another grid of patches than the folder's, of which each process reads all."""
    assert isinstance(model, ViT) and isinstance(theirs, ViT), "no other model has a grid"
    whole = part(leaf, tuple(slice(0, size) for size in shape), jax.ShapeDtypeStruct(shape, jnp.float32), files)
    files.close()
    made = resolution.interpolated(whole, theirs.grid, model.grid).astype(like.dtype)
    assert like.sharding is not None, "the train step gives every parameter a sharding"
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: made[index])


def _dtype(leaf: Leaf, like: jax.ShapeDtypeStruct, files: Files) -> jnp.dtype:
    """The dtype that holds every tensor of a parameter as it is; float32 of a double, as JAX has it."""
    return jnp.result_type(*{files.dtype(name) for name, _ in leaf.tensors(like.shape)})


def renamed(model: Published, files: Files) -> dict[str, Leaf]:
    """The leaves under the names of this folder: files of a model without its head lack the prefix."""
    leaves, prefix = names.leaves(model), names.PREFIX[model.kind]
    if any(name.startswith(prefix) for name in files):
        return leaves
    return {ours: dataclasses.replace(leaf, name=leaf.name.removeprefix(prefix)) for ours, leaf in leaves.items()}


def check_tensors(
    path: str,
    key: str,
    leaves: Mapping[str, Leaf],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    files: Files,
    unread: tuple[str, ...] = (),
) -> None:
    """Raises SpecError where the folder `path` does not hold just the tensors of what the block `key` asks for.

    Those whose names end in one of `unread` may be there.
    """
    unknown = [name for name in wanted if name not in leaves]
    if unknown:
        raise SpecError(f"{key}.init_from: Hugging Face has no counterpart of {', '.join(unknown)}")
    shapes = {name: shape for ours, like in wanted.items() for name, shape in leaves[ours].tensors(like.shape)}
    faults = [f"{name} is missing" for name in shapes if name not in files]
    for name, shape in shapes.items():
        if name in files and tuple(files[name].get_shape()) != shape:
            hint = "; for classes of your own set new_head: true" if name.startswith("classifier.") else ""
            faults.append(f"{name} is {files[name].get_shape()}, {key} makes it {list(shape)}{hint}")
    faults += [f"{name} is not used by {key}" for name in files if name not in shapes and not name.endswith(unread)]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise SpecError(f"{path} does not match {key}: {'; '.join(faults[:5])}{more}")


def read(leaf: Leaf, like: jax.ShapeDtypeStruct, files: Files) -> Array:
    """A parameter, each device's part read by itself; replicas are read once."""
    parts: dict[str, np.ndarray[Any, Any]] = {}

    def of_device(index: Slices | None) -> np.ndarray[Any, Any]:
        assert index is not None, "every local device holds a part"
        spans = tuple(slice(*each.indices(size)[:2]) for each, size in zip(index, like.shape, strict=True))
        if str(spans) not in parts:
            parts[str(spans)] = part(leaf, spans, like, files)
        return parts[str(spans)]

    assert like.sharding is not None, "the train step gives every parameter a sharding"
    array = jax.make_array_from_callback(like.shape, like.sharding, of_device)
    files.close()
    return array


def part(leaf: Leaf, spans: Slices, like: jax.ShapeDtypeStruct, files: Files) -> np.ndarray[Any, Any]:
    """`parameter[spans]`, assembled tensor by tensor in the dtype it will have."""
    sizes, span = dict(zip(leaf.ours, like.shape, strict=True)), dict(zip(leaf.ours, spans, strict=True))
    cuts = [_cut(group.strip("1"), sizes, span) for group in leaf.theirs.split()]
    shape = [size for cut in cuts for size in cut.shape]
    inside = tuple(each for cut in cuts for each in cut.inside)
    found: np.ndarray[Any, Any] = np.empty([each.stop - each.start for each in spans], like.dtype)
    for places in leaf.places(span):
        tensor = files[leaf.tensor(places)][tuple(cut.read for cut in cuts)]
        where = tuple(places[axis] - span[axis].start if axis in places else slice(None) for axis in leaf.ours)
        found[where] = tensor.reshape(shape)[inside].transpose(leaf.order)
    return found


class Cut(NamedTuple):
    """The slice to read along one axis of a tensor, and how the result is cut into axes of the parameter."""

    read: slice
    shape: list[int]
    inside: list[slice]


def _cut(letters: str, sizes: Mapping[str, int], span: Mapping[str, slice]) -> Cut:
    """The slice of a tensor's axis that covers `span` of these axes of the parameter; all of it if not contiguous."""
    whole = [sizes[axis] for axis in letters]
    if not letters:
        return Cut(slice(0, 1), [], [])
    if all(span[axis] == slice(0, sizes[axis]) for axis in letters[1:]):
        first, step = span[letters[0]], math.prod(whole[1:])
        shape = [first.stop - first.start, *whole[1:]]
        return Cut(slice(first.start * step, first.stop * step), shape, [slice(None)] * len(whole))
    return Cut(slice(0, math.prod(whole)), whole, [span[axis] for axis in letters])
