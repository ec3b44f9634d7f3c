"""Adapters merged into the weights that they are trained on, on the devices: for samples of a training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.adapters import reference_model, targets
from jaxlaunch.trainer.adapters.kernel import unquantized
from jaxlaunch.trainer.spec import Lora


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
