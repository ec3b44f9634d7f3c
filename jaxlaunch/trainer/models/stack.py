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
    apply: Callable[..., Array] | tuple[Callable[..., Array], ...],
    layers: Any,
    x: Array,
    *shared: PyTree,
    each: tuple[PyTree, ...] = (),
    scanned: bool,
) -> Array:
    """`x` after `x = apply(layer, x, *shared, *own)` for every layer, `own` being its slice of the arrays of `each`.

    Several functions take turns over the layers. A scan then has as many layers in its body, and those that are left
    over come after it.
    """
    turns = apply if isinstance(apply, tuple) else (apply,)
    if scanned and len(turns) == 1:
        axes = (0, nnx.Carry, *[None] * len(shared), *[0] * len(each))
        through: Array = nnx.scan(turns[0], in_axes=axes, out_axes=nnx.Carry)(layers, x, *shared, *each)
        return through
    graph, state = nnx.split(layers)

    def applied(x: Array, at: int, own: tuple[PyTree, tuple[PyTree, ...]]) -> tuple[Array, PyTree]:
        layer = nnx.merge(graph, own[0])
        x = turns[at % len(turns)](layer, x, *shared, *own[1])
        return x, nnx.state(layer, nnx.RngState)

    def written_out(x: Array, stacked: PyTree) -> tuple[Array, PyTree]:
        drawn = []
        for at, own in enumerate(_unstacked(stacked)):
            x, counts = applied(x, at, own)
            drawn.append(counts)
        return x, jax.tree.map(lambda *counts: jnp.stack(counts), *drawn)

    rounds = _depth(state) // len(turns) if scanned else 0
    if not rounds:
        x, drawn = written_out(x, (state, each))
    else:
        x, drawn = _in_rounds(written_out, x, (state, each), rounds, len(turns))
    nnx.update(layers, drawn)  # as a scan leaves them
    return x


def _in_rounds(
    written_out: Callable[[Array, PyTree], tuple[Array, PyTree]], x: Array, stacked: PyTree, rounds: int, turns: int
) -> tuple[Array, PyTree]:
    """A scan over rounds of `turns` layers, then those that are left over; what they drew, stacked as they are."""
    whole = rounds * turns
    of_round = jax.tree.map(lambda leaf: leaf[:whole].reshape(rounds, turns, *leaf.shape[1:]), stacked)
    x, drawn = jax.lax.scan(written_out, x, of_round)
    drawn = jax.tree.map(lambda counts: counts.reshape(whole, *counts.shape[2:]), drawn)
    rest = jax.tree.map(lambda leaf: leaf[whole:], stacked)
    if _depth(rest):
        x, last = written_out(x, rest)
        drawn = jax.tree.map(lambda *parts: jnp.concatenate(parts), drawn, last)
    return x, drawn


def part(layers: Any, start: int, stop: int) -> Any:
    """The layers from `start` to `stop` of a stack."""
    graph, state = nnx.split(layers)
    if stop - start == _depth(state):
        return layers
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[start:stop], state))


def _depth(stacked: PyTree) -> int:
    return int(jax.tree.leaves(stacked)[0].shape[0])


def _unstacked(tree: PyTree) -> list[PyTree]:
    """One tree for every place along the first axis of the arrays of `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    return [jax.tree.unflatten(structure, own) for own in zip(*map(jnp.unstack, leaves), strict=True)]
