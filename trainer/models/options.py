"""What the built-in models are told beside their sizes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from trainer import precision
from trainer.spec import Loss, Remat, TrainSpec


class Setting(NamedTuple):
    """How a model computes and what its loss adds; the sizes are the model's own business."""

    attention: str = "auto"
    remat: Remat = "none"
    output: jnp.dtype = jnp.dtype("float32")  # of the logits
    loss: Loss = Loss()

    @classmethod
    def of(cls, spec: TrainSpec) -> Setting:
        return cls(spec.attention, spec.remat, precision.policy(spec.precision).output, spec.loss)


PLAIN = Setting()
