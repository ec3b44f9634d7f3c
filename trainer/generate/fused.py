"""Kernels of a layer as generation stores them: those that read the same input as one, and on a CPU cut into strips.

A token that is alone reads each weight once, and what a product costs beside that is paid for each product.

B batch, L length, D inputs, O outputs; a stored kernel is [D, O], or in strips.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.generate import kernel_strips
from jaxlaunch.trainer.models.layers import product

# Name of the whole -> the names of its parts, in a layer of a decoder. An MLP of experts has no such products.
TOGETHER: Mapping[str, tuple[str, ...]] = {
    "attention.query_key_value": ("attention.query", "attention.key", "attention.value"),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
}
# Kernels that stay alone -> their axes of inputs, in a decoder and in GPT-2.
ALONE: Mapping[str, int] = {"attention.qkv": 1, "attention.out": 2, "mlp.up": 1, "mlp.down": 1}
Shapes = Mapping[str, tuple[int, ...]]  # of a layer's kernels by name: [D, outputs ...]


class Part:
    """A kernel that is the columns from `start` on of a stored one; a product with it is one with all of it.

    The compiler makes one product of the equal ones that the parts ask for.
    """

    def __init__(self, stored: Array, start: int, outputs: tuple[int, ...]) -> None:
        self._stored, self._start, self._outputs = stored, start, outputs

    def __getitem__(self, where: Any) -> Part:
        """Itself, where a model takes the array of its parameter to hand it to `layers.product`."""
        return self

    def product(self, x: Array, axes: int) -> Array:
        """x [B, L, inputs ...] times the part, [B, L, outputs ...]."""
        x_BLD = x.reshape(*x.shape[:2], -1)
        if self._stored.ndim == 2:
            made_BLO = product(x_BLD, self._stored)
        else:
            made_BLO = kernel_strips.product(x_BLD.reshape(-1, x_BLD.shape[2]), self._stored).reshape(*x.shape[:2], -1)
        end = self._start + math.prod(self._outputs)
        return made_BLO[:, :, self._start : end].reshape(*x.shape[:2], *self._outputs)


def together(layer: dict[str, Array], *, in_strips: bool) -> Shapes:
    """Stores the kernels of a layer, in place; the shapes of those that are now parts. On one device."""
    shapes: dict[str, tuple[int, ...]] = {}
    for whole, names in TOGETHER.items():
        if all(_is_kernel(name, layer) for name in names):
            shapes |= {name: layer[name].shape for name in names}
            layer[whole] = _stored(tuple(layer.pop(name) for name in names), 1, in_strips)
    for name, axes in ALONE.items():
        if in_strips and _is_kernel(name, layer) and kernel_strips.fits(layer[name].shape[axes:]):
            shapes[name] = layer[name].shape
            layer[name] = _stored((layer[name],), axes, in_strips)
    return shapes


def parts(layer: Mapping[str, Array], shapes: Shapes) -> dict[str, Part]:
    """The kernels whose shapes these are, by their own names, as a model multiplies with them."""
    found = {
        name: Part(layer[whole], start, shapes[name][1:])
        for whole, names in TOGETHER.items()
        if whole in layer
        for name, start in zip(names, _starts(names, shapes), strict=True)
    }
    alone = {name: Part(layer[name], 0, shapes[name][ALONE[name] :]) for name in shapes if name in layer}
    return found | alone


def apart(layer: Mapping[str, Array], shapes: Shapes) -> dict[str, Array]:
    """The layer's parameters by their own names: a copy of those that `together` stored."""
    found = {name: each for name, each in layer.items() if name not in TOGETHER and name not in shapes}
    for name in shapes:
        if name in layer:
            found[name] = kernel_strips.whole(layer[name]).reshape(shapes[name])
    for whole, names in TOGETHER.items():
        if whole in layer:
            kernel_DO = kernel_strips.whole(layer[whole])
            for name, start in zip(names, _starts(names, shapes), strict=True):
                shape = shapes[name]
                found[name] = kernel_DO[:, start : start + math.prod(shape[1:])].reshape(shape)
    return found


def _is_kernel(name: str, layer: Mapping[str, Array]) -> bool:
    """Whether the layer has it, as one kernel and not as one for each expert."""
    return name in layer and (name.startswith("attention.") or layer[name].ndim == 2)


def _starts(names: tuple[str, ...], shapes: Shapes) -> list[int]:
    sizes = [math.prod(shapes[name][1:]) for name in names]
    return [0, *itertools.accumulate(sizes)][:-1]


@partial(jax.jit, static_argnums=(1, 2))
def _stored(kernels: tuple[Array, ...], axes: int, in_strips: bool) -> Array:
    """The kernels, whose first axes are inputs, side by side."""
    flat = [each.reshape(math.prod(each.shape[:axes]), -1) for each in kernels]
    kernel_DO = jnp.concatenate(flat, axis=1)
    return kernel_strips.cut(kernel_DO) if in_strips and kernel_strips.fits(kernel_DO.shape[1:]) else kernel_DO
