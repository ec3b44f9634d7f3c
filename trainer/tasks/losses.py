"""Losses as sums and weights, in float32 whatever the logits are.

B batch, L length, V vocabulary or classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.errors import SpecError

Summed = TypeVar("Summed")  # arrays that add up over positions
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
    each = _each(logits, labels, weight)
    total = each.nats
    if options.smoothing:
        total = total + options.smoothing * (each.chosen - each.logits.mean(-1))
    if options.z:
        total = total + options.z * jnp.square(each.log_sum + each.largest)
    counts = weight != 0.0
    return Sums(
        total=jnp.where(counts, total * weight, 0.0).sum(),
        nats=jnp.where(counts, each.nats * weight, 0.0).sum(),
        correct=jnp.where(each.is_first, weight, 0.0).sum(),
        weight=weight.sum(),
    )


def log_probabilities(logits: Array, labels: Array, weight: Array) -> Array:
    """Log-probability of each row's `labels`, the sum over its positions, each times `weight`: [B] of [B, L, V].

    As `cross_entropy` where a position has weight 0, a label is outside the vocabulary or a shape does not fit.
    """
    return -jnp.where(weight != 0.0, _each(logits, labels, weight).nats * weight, 0.0).sum(-1)


class _Each(NamedTuple):
    """The softmax at each position, [...], of logits whose largest is taken off."""

    logits: Array  # [..., V]
    largest: Array
    chosen: Array  # the label's logit
    log_sum: Array
    nats: Array  # of the label
    is_first: Array  # the label is what argmax gives, the first of the largest


def _each(logits: Array, labels: Array, weight: Array) -> _Each:
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
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.where(places == labels[..., None], logits, 0.0).sum(-1)
    # Not by argmax, which reads the logits once more and carries an index along.
    is_beaten = ((logits == 0.0) & (places < labels[..., None])).any(-1)
    legal = (labels >= 0) & (labels < logits.shape[-1])
    log_sum = jnp.log(jnp.exp(logits).sum(-1))
    return _Each(
        logits,
        largest,
        chosen,
        log_sum,
        jnp.where(legal, log_sum - chosen, jnp.nan),
        (chosen == 0.0) & ~is_beaten & legal,
    )


def in_chunks(
    project: Callable[[Array, Array], Array],
    head_DV: Array,
    x_BLD: Array,
    labels_BL: Array,
    weight_BL: Array,
    count: int,
    score: Callable[[Array, Array, Array], Summed],
) -> Summed:
    """`score` of the logits `project(x, head)`, labels and weights, a sum over positions such as `cross_entropy`, in
    `count` parts along L: the logits of one are in memory at a time.

    The backward pass computes each part's logits again. The head's gradient is summed over the parts in float32.
    """
    wide_DV = head_DV.astype(jnp.float32)

    def of(part: tuple[Array, Array, Array]) -> Summed:
        """The sums of one chunk."""
        x, labels, weight = part
        return score(project(x, wide_DV.astype(head_DV.dtype)), labels, weight)

    def add(sums: Summed, part: tuple[Array, Array, Array]) -> tuple[Summed, None]:
        return jax.tree.map(jnp.add, sums, of(part)), None

    parts = tuple(_split(array, count) for array in (x_BLD, labels_BL, weight_BL))
    like = jax.eval_shape(of, tuple(jax.ShapeDtypeStruct(part.shape[1:], part.dtype) for part in parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    sums: Summed = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), zeros, parts)[0]
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
