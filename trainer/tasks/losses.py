"""Losses as sums and weights, in float32 whatever the logits are.

B batch, L length, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from trainer.errors import SpecError

LOGITS_BYTES = 2**28  # of a device's float32 logits at a time, where the job sets no number of chunks


class Options(NamedTuple):
    """Terms that training adds to the cross-entropy."""

    z: float = 0.0  # times the squared log of the softmax's denominator: keeps logits near 0. Chowdhery et al. 2022
    smoothing: float = 0.0  # of the label's weight, spread over all classes. Szegedy et al. 2016


PLAIN = Options()


class Sums(NamedTuple):
    """Weighted sums over all positions: float32 scalars."""

    total: Array  # what is minimized: the nats and what the options add
    nats: Array
    correct: Array
    weight: Array


def cross_entropy(logits: Array, labels: Array, weight: Array, options: Options = PLAIN) -> Sums:
    """Cross-entropy and hits of `logits` [..., V] against `labels` [...] (integers), each position times `weight`.

    Positions of weight 0 add exactly 0, to the gradient too, whatever they hold. Any other position's label outside the
    vocabulary makes the sum NaN, so that it is found at the first step. Raises SpecError for shapes that do not fit:
    labels [B, 1] would broadcast to all pairs of examples.
    """
    for name, array in (("labels", labels), ("weights", weight)):
        if array.shape != logits.shape[:-1]:
            raise SpecError(
                f"logits of shape {list(logits.shape)} go with {name} of shape {list(logits.shape[:-1])}, not "
                f"{list(array.shape)}: the loss compares the last axis of each of the model's logits with one label"
            )
    counts, labels = weight != 0.0, labels.astype(jnp.int32)
    logits = jnp.where(counts[..., None], logits.astype(jnp.float32), 0.0)
    largest = jax.lax.stop_gradient(logits.max(-1))
    logits -= largest[..., None]  # first of all: a loss near 0 keeps its digits
    # A sum over a mask, not a gather: a gather along a vocabulary split over mp would fetch all the logits.
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    chosen = jnp.where(is_label, logits, 0.0).sum(-1)
    legal = (labels >= 0) & (labels < logits.shape[-1])
    log_sum = jnp.log(jnp.exp(logits).sum(-1))
    nats = total = jnp.where(legal, log_sum - chosen, jnp.nan)
    if options.smoothing:
        total = total + options.smoothing * (chosen - logits.mean(-1))
    if options.z:
        total = total + options.z * jnp.square(log_sum + largest)
    return Sums(
        total=jnp.where(counts, total * weight, 0.0).sum(),
        nats=jnp.where(counts, nats * weight, 0.0).sum(),
        correct=jnp.where(logits.argmax(-1) == labels, weight, 0.0).sum(),
        weight=weight.sum(),
    )


def in_chunks(
    project: Callable[[Array, Array], Array],
    head_DV: Array,
    x_BLD: Array,
    labels_BL: Array,
    weight_BL: Array,
    count: int,
    options: Options = PLAIN,
) -> Sums:
    """`cross_entropy` of the logits `project(x, head)`, computed in `count` parts along L: one is in memory at a time.

    The backward pass computes each part's logits again. The head's gradient is summed over the parts in float32.
    """
    wide_DV = head_DV.astype(jnp.float32)

    def add(sums: Sums, part: tuple[Array, Array, Array]) -> tuple[Sums, None]:
        x, labels, weight = part
        each = cross_entropy(project(x, wide_DV.astype(head_DV.dtype)), labels, weight, options)
        return jax.tree.map(jnp.add, sums, each), None

    parts = tuple(_split(array, count) for array in (x_BLD, labels_BL, weight_BL))
    zeros = Sums(*[jnp.zeros((), jnp.float32)] * len(Sums._fields))
    sums, _ = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), zeros, parts)
    return sums


def chunks(length: int, logits_bytes: float) -> int:
    """The fewest equal parts of `length` that keep a device's float32 logits within LOGITS_BYTES."""
    return next(count for count in range(1, length + 1) if length % count == 0 and _fits(logits_bytes, count, length))


def _fits(size: float, count: int, length: int) -> bool:
    return size / count <= LOGITS_BYTES or count == length


def _split(array: Array, count: int) -> Array:
    """[B, L, ...] -> [count, B, L / count, ...]: no row leaves its device."""
    batch, length, *rest = array.shape
    return array.reshape(batch, count, length // count, *rest).swapaxes(0, 1)
