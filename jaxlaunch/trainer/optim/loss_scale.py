"""The dynamic loss scale of float16.

Float16 has no numbers below 6e-8, where most gradients are. Therefore the mean loss is multiplied
by a scale before the backward pass, and the gradients are divided by it afterwards. The scale
should be as large as possible without an overflow. If gradients overflow, it is halved and the step
is skipped; after many consecutive finite steps it is doubled. Micikevicius et al. 2018, "Mixed
Precision Training", §3.2; the constants are those of torch's GradScaler.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

INITIAL_SCALE = 2.0**16
# Above this scale the sums overflow float32.
MAX_SCALE = 2.0**24
# If the gradients overflow at this scale, scaling is not the cause.
MIN_SCALE = 1.0
# Consecutive steps without overflow, after which the scale is doubled.
GROWTH_INTERVAL = 2000


class LossScale(NamedTuple):
    """The loss scale, as scalars on the device. The field names are those of checkpoints.

    Attributes:
        value: The scale, float32.
        sound: Consecutive steps with finite gradients, int32.
    """

    value: Array
    sound: Array


def init_loss_scale() -> LossScale:
    """Return the scale of the first step."""
    return LossScale(jnp.asarray(INITIAL_SCALE, jnp.float32), jnp.zeros((), jnp.int32))


def loss_factor(scale: LossScale, weight: Array) -> Array:
    """Return the factor for a sum of losses of this weight, scale / weight, as a float32 scalar."""
    return scale.value / jnp.where(weight > 0, weight, 1.0)


def update_loss_scale(scale: LossScale, finite: Array) -> LossScale:
    """Return the scale of the next step; `finite` is whether this step's gradients are finite."""
    should_grow = scale.sound + 1 >= GROWTH_INTERVAL
    grown_value = jnp.where(should_grow, jnp.minimum(scale.value * 2, MAX_SCALE), scale.value)
    return LossScale(
        value=jnp.where(finite, grown_value, jnp.maximum(scale.value / 2, MIN_SCALE)),
        sound=jnp.where(finite & ~should_grow, scale.sound + 1, 0),
    )


def is_exhausted(scale: LossScale) -> Array:
    """Return whether the scale is at its minimum and cannot be halved."""
    return scale.value <= MIN_SCALE
