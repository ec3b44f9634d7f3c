"""The dynamic loss scale of float16: as large as the gradients bear, found by trying.

Float16 holds nothing below 6e-8, where most gradients lie. The mean loss is multiplied by the scale before the backward
pass and the gradients divided by it after. One that overflows halves the scale and costs its step; a long row of sound
ones doubles it. Micikevicius et al. 2018, "Mixed Precision Training", §3.2; the constants are torch's GradScaler's.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

START = 2.0**16
LARGEST = 2.0**24  # beyond it float32's own range is what the sums run out of
SMALLEST = 1.0  # a model that overflows unscaled is not the scale's to mend
GROW_AFTER = 2000  # sound steps in a row


class LossScale(NamedTuple):
    """Scalars on the device."""

    value: Array  # float32
    sound: Array  # int32: steps in a row whose gradients were finite


def init() -> LossScale:
    return LossScale(jnp.asarray(START, jnp.float32), jnp.zeros((), jnp.int32))


def factor(scale: LossScale, weight: Array) -> Array:
    """What a sum of losses of this weight is multiplied by: the scale is that of their mean."""
    return scale.value / jnp.where(weight > 0, weight, 1.0)


def after(scale: LossScale, finite: Array) -> LossScale:
    """The scale of the next step, `finite` telling of this one's gradients."""
    is_long = scale.sound + 1 >= GROW_AFTER
    grown = jnp.where(is_long, jnp.minimum(scale.value * 2, LARGEST), scale.value)
    return LossScale(
        value=jnp.where(finite, grown, jnp.maximum(scale.value / 2, SMALLEST)),
        sound=jnp.where(finite & ~is_long, scale.sound + 1, 0),
    )


def is_exhausted(scale: LossScale) -> Array:
    """Whether there is nothing left to halve."""
    return scale.value <= SMALLEST
