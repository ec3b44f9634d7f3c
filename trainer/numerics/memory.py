"""What a train step holds on one device, by the shapes of its arrays. Nothing is allocated or computed.

What the backward pass keeps of the forward pass is read from the program itself, so that any model and any
rematerialization count as they are. It is split over devices by what is known: rows of the batch over dp × fsdp. How
much of it mp splits only the compiler knows; both ends are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

PyTree = Any


class Range(NamedTuple):
    """Bytes, at least and at most."""

    low: int
    high: int


def per_device(tree: PyTree) -> int:
    """Bytes of the arrays of `tree` on one device; ShapeDtypeStructs with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def in_all(tree: PyTree) -> int:
    """Bytes of the arrays of `tree`, each counted once."""
    return _bytes(jax.tree.leaves(tree))


def kept(loss: Callable[..., Any], params: PyTree, *args: Any) -> int:
    """Bytes that the gradient of `loss(params, *args)` reads of its forward pass, beside the arguments themselves.

    `loss` gives (value, aux); the arguments are arrays or ShapeDtypeStructs. On all devices together.
    """

    def backward(params: PyTree, *args: Any) -> Any:
        return jax.vjp(lambda params: loss(params, *args), params, has_aux=True)[1]

    jaxpr = jax.make_jaxpr(backward)(params, *args).jaxpr
    given = {id(variable) for variable in jaxpr.invars}
    outputs = {id(variable): variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    return _bytes(variable.aval for key, variable in outputs.items() if key not in given)


def on_a_device(of_batch: int, of_twice: int, shards: int, fsdp: int, mp: int) -> Range:
    """What one device keeps, of what all keep for a batch and for one of twice the rows.

    What grows with the rows is split over the `shards` of the batch. The rest is copies of weights, which are split as
    the weights are.
    """
    rows = of_twice - of_batch
    others = max(0, of_batch - rows) / (fsdp * mp)
    return Range(int(rows / shards / mp + others), int(rows / shards + others))


def _bytes(arrays: Iterable[Any]) -> int:
    return sum(math.prod(each.shape) * getattr(each.dtype, "itemsize", 0) for each in arrays)
