"""The dynamic loss scale of float16, the largest one without overflow, found by trial.

Float16 has no numbers below 6e-8, where most gradients are. The mean loss is multiplied by the
scale before the backward pass, and the gradients are divided by it afterwards. If gradients
overflow, the scale is halved and the step is skipped. After many consecutive finite steps, the
scale is doubled. Micikevicius et al. 2018, "Mixed Precision Training", §3.2; the constants are
those of torch's GradScaler.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

INITIAL_SCALE = 2.0**16
# Above this scale the sums overflow float32.
MAX_SCALE = 2.0**24
# A model that overflows without a scale needs another remedy.
MIN_SCALE = 1.0
GROWTH_INTERVAL = 2000  # consecutive steps without overflow


class LossScale(NamedTuple):
    """The scale and its counter: scalars on the device."""

    value: Array  # float32
    sound: Array  # int32, consecutive steps with finite gradients


def init_loss_scale() -> LossScale:
    """Return the scale of the first step."""
    return LossScale(jnp.asarray(INITIAL_SCALE, jnp.float32), jnp.zeros((), jnp.int32))


def loss_factor(scale: LossScale, weight: Array) -> Array:
    """Return the factor for a sum of losses of this weight, scale / weight, as a float32 scalar."""
    return scale.value / jnp.where(weight > 0, weight, 1.0)


def update_loss_scale(scale: LossScale, finite: Array) -> LossScale:
    """Return the scale of the next step, given whether this step's gradients were finite."""
    is_long = scale.sound + 1 >= GROWTH_INTERVAL
    grown = jnp.where(is_long, jnp.minimum(scale.value * 2, MAX_SCALE), scale.value)
    return LossScale(
        value=jnp.where(finite, grown, jnp.maximum(scale.value / 2, MIN_SCALE)),
        sound=jnp.where(finite & ~is_long, scale.sound + 1, 0),
    )


def is_exhausted(scale: LossScale) -> Array:
    """Return whether the scale is at its minimum and cannot be halved."""
    return scale.value <= MIN_SCALE
