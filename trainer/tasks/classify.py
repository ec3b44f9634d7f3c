"""Image classification: examples with an `image` (bytes of any range and shape) and a `label`.

B batch, V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from trainer import losses
from trainer import spec as specs
from trainer.data import sources
from trainer.data.source import Source
from trainer.errors import DataError, SpecError
from trainer.models import custom
from trainer.models.mlp import MLP
from trainer.models.setting import Setting
from trainer.models.vit import ViT
from trainer.spec import TrainSpec
from trainer.task import Loss, Split


class Classify:
    """Cross-entropy of the labels; `accuracy` is the share of images whose label has the largest logit."""

    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        """An MLP for images like the first example's, a ViT, or a model of the user's: images [B, ...] -> logits_BV.

        A model's `pixels`, if it has any, are the mean and deviation of each channel that it expects taken out.
        """
        setting = Setting.of(spec)
        match spec.model:
            case specs.MLP() as config:
                return MLP(config, self._image_shape(spec), rngs, setting)
            case specs.ViT() as config:
                self._check_image(spec, config)
                return ViT(config, rngs, setting)
            case specs.CustomModel() as config:
                return custom.build(spec, config, rngs)
        raise SpecError(f"train.model.kind = {spec.model.kind} does not classify images; use mlp, vit or module:Name")

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        pixels = getattr(model, "pixels", None)
        images = standardized(batch["image"]) if pixels is None else scaled(batch["image"], *pixels)
        label_B, weight_B = batch["label"], batch["weight"]
        is_training = isinstance(model, MLP | ViT) and not model.deterministic
        extras = model.loss if is_training else specs.Loss()
        options = losses.Options(extras.z, extras.smoothing)
        if extras.mixup:
            return blended(model, images, label_B, weight_B, rng, extras.mixup, options)
        sums = losses.cross_entropy(model(images), label_B, weight_B, options)
        return Loss(sums.total, sums.weight, {"accuracy": (sums.correct, sums.weight)})

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        return sources.open(spec, split)

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The image as it is stored: bytes travel to the device, floats are made there."""
        return {"image": np.asarray(raw["image"]), "label": np.asarray(raw["label"], np.int32)}

    def _check_image(self, spec: TrainSpec, config: specs.ViT) -> None:
        shape, wanted = self._image_shape(spec), (*config.image, config.channels)
        if shape != wanted and (*shape, 1) != wanted:
            raise SpecError(
                f"train.model takes images of image = {config.image} and channels = {config.channels}, "
                f"but train.data holds images of shape {list(shape)} (height, width, channels)"
            )

    def _image_shape(self, spec: TrainSpec) -> tuple[int, ...]:
        source = self.source(spec, "train")
        if source is None:
            raise DataError("train.data has no training examples to take the images' shape from")
        return tuple(self.example(source[0])["image"].shape)


def blended(
    model: Any, images: Array, label_B: Array, weight_B: Array, rng: Array, alpha: float, options: losses.Options
) -> Loss:
    """mixup: each image and its label blended with those at the other end of the batch. Zhang et al. 2018."""
    share = jax.random.beta(rng, alpha, alpha)
    logits_BV = model(share * images + (1.0 - share) * images[::-1])
    one = losses.cross_entropy(logits_BV, label_B, weight_B * share, options)
    other = losses.cross_entropy(logits_BV, label_B[::-1], weight_B * (1.0 - share), options)
    weight = weight_B.sum()
    return Loss(one.total + other.total, weight, {"accuracy": (one.correct + other.correct, weight)})


def standardized(image: Array) -> Array:
    """Each image [B, ...] in float32 with mean 0 and variance 1: whether its bytes end at 16 or 255 does not matter."""
    pixels = image.astype(jnp.float32)
    axes = tuple(range(1, image.ndim))
    centred = pixels - pixels.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + 1e-6)


def scaled(image: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """(image - mean) / std in float32, each of the last axis, the channels, by its own."""
    pixels = image.astype(jnp.float32)
    shape = (1,) * (image.ndim - 1) + (-1,)
    mean_C, std_C = (jnp.asarray(values, jnp.float32).reshape(shape) for values in (mean, std))
    return (pixels - mean_C) / std_C
