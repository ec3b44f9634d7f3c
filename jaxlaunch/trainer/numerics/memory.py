"""Estimates the memory of a train step on one device from the shapes of arrays, without compiling.

The residuals, which the forward pass keeps for the backward pass, are those of the traced program,
for any model and any rematerialization. Residuals that grow with the batch are split like the
batch. Only the compiler knows how far it also splits them over mp, so the result is a range.
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
    """Lower and upper bound in bytes."""

    low: int
    high: int


def bytes_per_device(tree: PyTree) -> int:
    """Return the bytes on one device of arrays or sharded ShapeDtypeStructs."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def total_bytes(tree: PyTree) -> int:
    """Return the bytes of the arrays in `tree`, each counted once, without random keys."""
    return sum(
        math.prod(leaf.shape) * int(leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def residual_bytes(loss: Callable[..., Any], params: PyTree, *args: Any) -> int:
    """Return the bytes that are kept for the backward pass of `loss`, except its arguments.

    `loss` returns (value, aux). The arguments are arrays or ShapeDtypeStructs.
    """

    def make_backward(params: PyTree, *args: Any) -> Any:
        return jax.vjp(lambda params: loss(params, *args), params, has_aux=True)[1]

    jaxpr = jax.make_jaxpr(make_backward)(params, *args).jaxpr
    outputs = {variable for variable in jaxpr.outvars if not isinstance(variable, Literal)}
    return total_bytes([variable.aval for variable in outputs - {*jaxpr.invars}])


def residuals_per_device(
    batch_bytes: int, double_batch_bytes: int, shards: int, fsdp: int, mp: int
) -> Range:
    """Return the bytes of residuals on one device.

    Residuals that grow with the rows are split over the shards of the batch. All others are copies
    of weights, which are split like the weights.

    Args:
        batch_bytes: Bytes of all residuals of a batch.
        double_batch_bytes: Bytes of all residuals of a batch with twice the rows.
        shards: Number of parts of a batch.
        fsdp: Size of the mesh axis.
        mp: Size of the mesh axis.
    """
    row_bytes = double_batch_bytes - batch_bytes
    weight_bytes = max(0, batch_bytes - row_bytes) / (fsdp * mp)
    low, high = row_bytes / shards / mp + weight_bytes, row_bytes / shards + weight_bytes
    return Range(int(low), int(high))
