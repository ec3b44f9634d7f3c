"""Adapters merged into the weights that they were trained on: kernel + scaling × A · B, a tensor at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.adapters import base, reference_model, targets
from jaxlaunch.trainer.adapters.kernel import unquantized
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.huggingface.tensors import Files
from jaxlaunch.trainer.spec import Lora, Published

HostArray = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Merged:
    """A parameter of the base in its folder's dtype, with what an adapter adds. Slicing it reads it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    leaf: Leaf
    files: Files
    scaling: float
    a: Parameter | None  # [layers, inputs ..., rank]
    b: Parameter | None  # [layers, rank, outputs ...]

    def __getitem__(self, where: Any) -> HostArray:
        """A layer of a stacked parameter, by (int, slice, ...) of whole axes, or all of another one."""
        given = where if isinstance(where, tuple) else (where,)
        spans = tuple(
            slice(at, at + 1) if isinstance(at, int) else slice(*at.indices(size)[:2])
            for at, size in zip(given, self.shape, strict=True)
        )
        like = jax.ShapeDtypeStruct(self.shape, self.dtype)
        part = load.part(self.leaf, spans, like, self.files)
        self.files.close()  # else what was read stays this process's memory, up to the whole base
        part = part[tuple(0 if isinstance(at, int) else slice(None) for at in given)]
        if self.a is None or self.b is None:
            return part
        layer = given[0]
        a, b = (np.asarray(each[layer], np.float32) for each in (self.a, self.b))
        added = self.scaling * np.tensordot(a, b, axes=1)  # over the rank
        return (part.astype(np.float32) + added).astype(self.dtype)


def parameters(
    model: Published, lora: Lora, recorded: Mapping[str, Any] | None, adapters: Mapping[str, Parameter], whose: str
) -> dict[str, Parameter]:
    """Every parameter of the merged model, by name. `recorded` is what the checkpoint says of its base.

    Raises SpecError where there is no folder to merge into, CheckpointError where it is not the one of the training.
    """
    if recorded is None or model.init_from is None:
        raise SpecError("the base of these adapters was drawn from train.seed: there is no folder to merge them into")
    if not remote.is_remote(model.init_from) and not Path(model.init_from).is_dir():
        raise SpecError(
            f"{whose} holds adapters of the weights of {recorded['init_from']}, and {model.init_from} is not a folder "
            "here: name the one that they are in now as --base of launcher export"
        )
    base.check(recorded, base.found(model, recorded), whose, "--base of launcher export")
    files = Files(model.init_from)
    leaves, chosen = load.renamed(model, files), {kernel.name for kernel in targets.chosen(model, lora)}
    found: dict[str, Parameter] = {}
    for name, shape in recorded["shapes"].items():
        a, b = (adapters[name + end] if name in chosen else None for end in (targets.A, targets.B))
        first = next(leaves[name].tensors(tuple(shape)))[0]
        found[name] = Merged(tuple(shape), files.dtype(first), leaves[name], files, lora.scaling, a, b)
    return found


class Merging(dict[str, Array]):
    """The parameters of a training as those of a model without adapters, by name; each is merged when it is popped, so
    that one at a time is there twice."""

    def __init__(self, params: Mapping[str, Array], model: spec.Published, lora: Lora | None) -> None:
        """`params` are all of the training's: the adapters, what they are of, and a frozen copy if there is one."""
        own = (targets.A, targets.B, targets.SCALE)
        super().__init__({name: each for name, each in params.items() if not _is_beside(name, own)})
        self._params, self._scaling = params, 0.0 if lora is None else lora.scaling
        self._inputs = {} if lora is None else {each.name: len(each.inputs) for each in targets.kernels(model)}

    def pop(self, name: str, *default: Array) -> Array:  # type: ignore[override]
        """The parameter; a kernel with what its adapter adds, in float32."""
        kernel = super().pop(name, *default)
        if name not in self._inputs:
            return kernel
        scale, a, b = (self._params.get(name + end) for end in (targets.SCALE, targets.A, targets.B))
        if scale is None and a is None:
            return kernel
        merged: Array = _merged(kernel, scale, a, b, self._inputs[name], self._scaling)
        return merged


def _is_beside(name: str, ends: tuple[str, ...]) -> bool:
    return name.startswith(reference_model.PREFIX) or name.endswith(ends)


@partial(jax.jit, static_argnums=(4, 5))
def _merged(kernel: Array, scale: Array | None, a: Array | None, b: Array | None, inputs: int, scaling: float) -> Array:
    """kernel + scaling × A · B of every layer, [layers, I, O]; A [layers, I, R], B [layers, R, O]."""
    whole = kernel.astype(jnp.float32) if scale is None else unquantized(kernel, scale, inputs)
    if a is None or b is None:
        return whole
    added = jax.vmap(partial(jnp.tensordot, axes=1))(a.astype(jnp.float32), b.astype(jnp.float32))
    return whole + scaling * added
