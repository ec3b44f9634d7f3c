"""Image classification: examples with an `image` (bytes of any range and shape) and a `label`.

B batch, V classes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from trainer import losses, precision
from trainer import spec as specs
from trainer.data import sources
from trainer.data.source import Source
from trainer.errors import DataError, SpecError
from trainer.models import custom
from trainer.models.mlp import MLP
from trainer.spec import TrainSpec
from trainer.task import Loss, Split


class Classify:
    """Cross-entropy of the labels; `accuracy` is the share of images whose label has the largest logit."""

    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        """An MLP for images of the first example's shape, or a model of the user's: images [B, ...] -> logits_BV."""
        match spec.model:
            case specs.MLP() as config:
                output = precision.policy(spec.precision).output
                return MLP(config, self._image_shape(spec), rngs, spec.remat, output)
            case specs.CustomModel() as config:
                return custom.build(spec, config, rngs)
        raise SpecError(f"train.model.kind = {spec.model.kind} does not classify images; use mlp, or module:Name")

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        logits_BV = model(standardized(batch["image"]))
        sums = losses.cross_entropy(logits_BV, batch["label"], batch["weight"])
        return Loss(sums.nats, sums.weight, {"accuracy": (sums.correct, sums.weight)})

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        return sources.open(spec, split)

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The image as it is stored: bytes travel to the device, floats are made there."""
        return {"image": np.asarray(raw["image"]), "label": np.asarray(raw["label"], np.int32)}

    def _image_shape(self, spec: TrainSpec) -> tuple[int, ...]:
        source = self.source(spec, "train")
        if source is None:
            raise DataError("train.data has no training examples to take the images' shape from")
        return tuple(self.example(source[0])["image"].shape)


def standardized(image: Array) -> Array:
    """Each image [B, ...] in float32 with mean 0 and variance 1: whether its bytes end at 16 or 255 does not matter."""
    pixels = image.astype(jnp.float32)
    axes = tuple(range(1, image.ndim))
    centred = pixels - pixels.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + 1e-6)
