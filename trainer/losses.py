"""Losses as sums and weights, in float32 whatever the logits are.

B batch, L length, V vocabulary or classes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Sums(NamedTuple):
    """Weighted sums over all positions: float32 scalars."""

    nats: Array
    correct: Array
    weight: Array


def cross_entropy(logits: Array, labels: Array, weight: Array) -> Sums:
    """Cross-entropy and hits of `logits` [..., V] against `labels` [...] (integers), each position times `weight`.

    Positions of weight 0 add exactly 0, to the gradient too, whatever they hold. Any other position's label outside the
    vocabulary makes the sum NaN, so that it is found at the first step rather than learned around.
    """
    counts, labels = weight != 0.0, labels.astype(jnp.int32)
    logits = jnp.where(counts[..., None], logits.astype(jnp.float32), 0.0)
    logits -= jax.lax.stop_gradient(logits.max(-1, keepdims=True))  # first of all: a loss near 0 keeps its digits
    # A sum over a mask, not a gather: a gather along a vocabulary split over mp would fetch all the logits.
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    chosen = jnp.where(is_label, logits, 0.0).sum(-1)
    legal = (labels >= 0) & (labels < logits.shape[-1])
    nats = jnp.where(legal, jnp.log(jnp.exp(logits).sum(-1)) - chosen, jnp.nan)
    return Sums(
        nats=jnp.where(counts, nats * weight, 0.0).sum(),
        correct=jnp.where(logits.argmax(-1) == labels, weight, 0.0).sum(),
        weight=weight.sum(),
    )
