"""A stack of equal layers, run one after the other: as one scan, or written out.

A scan compiles one layer and keeps what its backward pass reads in arrays over all layers. Written out, the compiler
sees every layer: slower to compile, faster to run. The parameters are stacked either way: [layers, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

PyTree = Any


def run(
    apply: Callable[..., Array], layers: Any, x: Array, *shared: PyTree, each: tuple[PyTree, ...] = (), scanned: bool
) -> Array:
    """`x` after `x = apply(layer, x, *shared, *own)` for every layer, `own` being its slice of the arrays of `each`."""
    if scanned:
        axes = (0, nnx.Carry, *[None] * len(shared), *[0] * len(each))
        through: Array = nnx.scan(apply, in_axes=axes, out_axes=nnx.Carry)(layers, x, *shared, *each)
        return through
    graph, state = nnx.split(layers)
    drawn = []
    for own_state, own in _unstacked((state, each)):
        layer = nnx.merge(graph, own_state)
        x = apply(layer, x, *shared, *own)
        drawn.append(nnx.state(layer, nnx.RngState))
    nnx.update(layers, jax.tree.map(lambda *counts: jnp.stack(counts), *drawn))  # as a scan leaves them
    return x


def _unstacked(tree: PyTree) -> list[PyTree]:
    """One tree for every place along the first axis of the arrays of `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, own) for own in zip(*map(jnp.unstack, leaves), strict=True)]
