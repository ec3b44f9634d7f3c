"""A multi-layer perceptron: flattened examples -> logits.

B batch, F hidden units, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.layers import Linear
from jaxlaunch.trainer.models.options import DEFAULTS, ModelOptions
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import constrain

NAMES = ("hidden",)  # what remat may keep by name


class MLP(nnx.Module):
    """`layers` hidden layers of `width` ReLUs over examples of `shape`, then `classes` logits."""

    def __init__(
        self,
        config: spec.MLP,
        shape: Sequence[int],
        rngs: nnx.Rngs,
        options: ModelOptions = DEFAULTS,
    ) -> None:
        sizes = list(pairwise([math.prod(shape), *[config.width] * config.layers]))
        self.layers = nnx.List([Linear(*size, (_side(i), _side(i + 1)), rngs) for i, size in enumerate(sizes)])
        self.head = Linear(config.width, config.classes, (_side(config.layers), "classes"), rngs)
        self.apply = remat.layer(_hidden, options.remat, NAMES, scanned=False)
        self.output, self.loss = options.output, options.loss
        self.deterministic = False  # nnx's name for evaluation

    def __call__(self, x: Array) -> Array:
        """Logits_BV of examples [B, ...], in the output dtype."""
        x_BF: Array = x.reshape(x.shape[0], -1)
        for i, layer in enumerate(self.layers):
            x_BF = constrain(self.apply(layer, x_BF), "batch", _side(i + 1))
        return self.head(x_BF).astype(self.output)


def _side(i: int) -> str:
    """Split by columns, then by rows, in turn: under mp only every second product needs communication."""
    return "hidden" if i % 2 else "embed"


def _hidden(layer: Linear, x_BF: Array) -> Array:
    hidden_BF: Array = checkpoint_name(jax.nn.relu(layer(x_BF)), "hidden")
    return hidden_BF
