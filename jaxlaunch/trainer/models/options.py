"""Options of the built-in models beside their sizes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxlaunch.trainer.numerics import precision
from jaxlaunch.trainer.spec import Loss, Remat, TrainSpec


class ModelOptions(NamedTuple):
    """How a model computes, and what its loss adds; the sizes are in its own block."""

    attention: str = "auto"
    remat: Remat = "none"
    output: jnp.dtype = jnp.dtype("float32")  # of the logits
    loss: Loss = Loss()

    @classmethod
    def of(cls, spec: TrainSpec) -> ModelOptions:
        """The options that a train block asks for."""
        return cls(spec.attention, spec.remat, precision.policy(spec.precision).output, spec.loss)


DEFAULTS = ModelOptions()
