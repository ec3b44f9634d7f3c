"""Memory of a train step on one device, from the shapes of its arrays. Nothing is allocated or computed.

The residuals (what the backward pass keeps of the forward pass) are read from the traced program, so that any model
and any rematerialization count as they are. Those that grow with the batch are split as the batch is. How much of them
mp splits only the compiler knows, so the result is a range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

PyTree = Any


class Range(NamedTuple):
    """At least and at most so many bytes."""

    low: int
    high: int


def bytes_per_device(tree: PyTree) -> int:
    """Return the bytes of the arrays of `tree` on one device; ShapeDtypeStructs with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def total_bytes(tree: PyTree) -> int:
    """Return the bytes of the arrays of `tree`, each counted once; random keys count nothing."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    return sum(math.prod(array.shape) * int(array.dtype.itemsize) for array in arrays)


def residual_bytes(loss: Callable[..., Any], params: PyTree, *args: Any) -> int:
    """Return the bytes that the gradient of `loss(params, *args)` reads of its forward pass, without the arguments.

    `loss` returns (value, aux); the arguments are arrays or ShapeDtypeStructs. On all devices together.
    """

    def backward(params: PyTree, *args: Any) -> Any:
        return jax.vjp(lambda params: loss(params, *args), params, has_aux=True)[1]

    jaxpr = jax.make_jaxpr(backward)(params, *args).jaxpr
    inputs = {id(variable) for variable in jaxpr.invars}
    outputs = {id(variable): variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    return total_bytes([variable.aval for key, variable in outputs.items() if key not in inputs])


def residuals_per_device(of_batch: int, of_twice: int, shards: int, fsdp: int, mp: int) -> Range:
    """Return the residuals of one device, from those of all devices for a batch and for one of twice the rows.

    Those that grow with the rows are split over the `shards` of the batch. The others are copies of weights, split as
    the weights are.
    """
    rows = of_twice - of_batch
    others = max(0, of_batch - rows) / (fsdp * mp)
    return Range(int(rows / shards / mp + others), int(rows / shards + others))
