"""Kernels of a layer that read the same input, as one: a token that is alone reads each weight once, and what a product
costs beside that is paid for each product.

B batch, L length, D model, O outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from trainer.models.layers import product

# Name of the whole -> the names of its parts, in a layer of a decoder. An MLP of experts has no such products.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "attention.query_key_value": ("attention.query", "attention.key", "attention.value"),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
}
Shapes = Mapping[str, tuple[int, ...]]  # of a layer's kernels by name: [D, outputs ...]


class Part:
    """A kernel that is the columns from `start` on of another one, kernel_DO; a product with it is one with all of it.

    The compiler makes one product of the equal ones that the parts ask for.
    """

    def __init__(self, kernel_DO: Array, start: int, outputs: tuple[int, ...]) -> None:
        self._kernel_DO, self._start, self._outputs = kernel_DO, start, outputs

    def __getitem__(self, where: Any) -> Part:
        """Itself, where a model takes the array of its parameter to hand it to `layers.product`."""
        return self

    def product(self, x_BLD: Array, axes: int) -> Array:
        """x times the part, [B, L, outputs ...]."""
        assert axes == 1, "these kernels have one axis of inputs"
        made_BLO = product(x_BLD, self._kernel_DO)
        end = self._start + math.prod(self._outputs)
        return made_BLO[:, :, self._start : end].reshape(*x_BLD.shape[:2], *self._outputs)


def together(layer: dict[str, Array]) -> Shapes:
    """Puts the kernels of a layer together, in place; the shapes of those that are now parts. On one device."""
    shapes: dict[str, tuple[int, ...]] = {}
    for whole, names in TOGETHER.items():
        if all(name in layer for name in names) and layer[names[-1]].ndim < 3 + whole.startswith("attention"):
            shapes |= {name: layer[name].shape for name in names}
            layer[whole] = _joined(tuple(layer.pop(name) for name in names))
    return shapes


def parts(layer: Mapping[str, Array], shapes: Shapes) -> dict[str, Part]:
    """The kernels that were put together, by their own names, as a model multiplies with them."""
    return {
        name: Part(layer[whole], start, shapes[name][1:])
        for whole, names in TOGETHER.items()
        if whole in layer
        for name, start in zip(names, _starts(names, shapes), strict=True)
    }


def apart(layer: Mapping[str, Array], shapes: Shapes) -> dict[str, Array]:
    """The layer's parameters by their own names: a copy of those that were put together."""
    found = {name: each for name, each in layer.items() if name not in TOGETHER}
    for whole, names in TOGETHER.items():
        if whole in layer:
            for name, start in zip(names, _starts(names, shapes), strict=True):
                shape = shapes[name]
                found[name] = layer[whole][:, start : start + math.prod(shape[1:])].reshape(shape)
    return found


def _starts(names: tuple[str, ...], shapes: Shapes) -> list[int]:
    sizes = [math.prod(shapes[name][1:]) for name in names]
    return [0, *itertools.accumulate(sizes)][:-1]


@jax.jit
def _joined(kernels: tuple[Array, ...]) -> Array:
    return jnp.concatenate([each.reshape(each.shape[0], -1) for each in kernels], axis=1)
