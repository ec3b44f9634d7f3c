"""Images and rows of tables: examples with an `image` or `features`, and a `label`.

In training the images of a batch may be blended on the device: mixup and CutMix. Each is blended
with the image at its place in the reversed batch, with one share for the whole batch.

B batch, Y and X places of an image, V classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data.examples import Batch, Examples, register_batch_function
from jaxlaunch.trainer.data.source import Source, Split, as_data_source
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.models import custom
from jaxlaunch.trainer.models.classifiers import MLP, Classifier, ConvNeXt, ResNet, ViT
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.sources.images.source import ImageSource
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.source import ENCODING_KEYS, Rows, Scale, TableMixture
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.spec.data import ImageData
from jaxlaunch.trainer.task import Loss, Task, checked_logits
from jaxlaunch.trainer.tasks import losses, ranges
from jaxlaunch.trainer.tasks.classification import Classification, ExampleScores, score_examples


@runtime_checkable
class HasPixels(Protocol):
    """A model, built-in or the user's, that says how the channels of its images are normalized."""

    pixels: tuple[Sequence[float], Sequence[float]] | None  # mean and deviation of each channel


class Classify(Task):
    """The task `classify`: cross-entropy of the labels of images.

    `accuracy` is the share of images whose label has the largest logit. Examples have `image`
    `[H, W, C]`, or any other shape, and `label` `[]`.

    **Example:**

    ```python
    import jax
    import jaxlaunch


    # train.task: module:TwoHeads; the data and the examples stay
    class TwoHeads(jaxlaunch.Classify):
        def loss(self, model, batch: jaxlaunch.Batch, rng: jax.Array) -> jaxlaunch.Loss:
            loss = super().loss(model, batch, rng)
            return loss._replace(metrics=loss.metrics | {"rows": (loss.weight, loss.weight)})
    ```
    """

    # The classes of the logits, set when the loss is traced.
    _classes: int | None = None
    # The kind of the labels and the unit of a table's numbers, set when the source is opened.
    _target: str = "class"
    _scale: Scale | None = None
    # The inputs of a trained model, in place of its data.
    _described: Mapping[str, Any] | None = None

    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        """Return the model that maps images [B, ...] like the first example's to logits_BV.

        A model's attribute `pixels`, if any, is the mean and deviation of each channel to normalize
        images by.
        """
        config, options = spec.model, ModelOptions.from_spec(spec)
        if isinstance(config, specs.MLP):
            return MLP(config, self._image_shape(spec), rngs, options)
        if isinstance(config, specs.CustomModel):
            # An image as `loss` gives it to a model, alone in its batch.
            def sample_inputs() -> tuple[Array]:
                return (jnp.zeros((1, *self._image_shape(spec)), jnp.float32),)

            return custom.build_model(spec, config, rngs, sample_inputs)
        if not isinstance(config, specs.ImageModel):
            kinds = "mlp, vit, resnet, convnext or module:Name"
            raise SpecError(
                f"train.model.kind = {config.kind} does not classify images; use {kinds}"
            )
        self._check_image(spec, config)
        kinds_by_config: Mapping[type, Any] = {
            specs.ViT: ViT,
            specs.ResNet: ResNet,
            specs.ConvNeXt: ConvNeXt,
        }
        model: nnx.Module = kinds_by_config[type(config)](config, rngs, options)
        return model

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        """Return the cross-entropy of `label` [B] by `image` [B, ...], times `weight` [B].

        With `loss.target` the binary cross-entropy of label [B, V], or the squared error of label
        [B] or [B, K]. Training adds to it what the loss block of a built-in model says.
        """
        images = self._model_inputs(model, batch)
        label_B, weight_B = batch["label"], batch["weight"]
        if self._scale is not None:
            label_B = self._scale.normalize(label_B)
        is_ours = isinstance(model, Classifier)
        block = model.loss if is_ours else specs.Loss()
        is_training = is_ours and not model.deterministic
        extras = block if is_training else specs.Loss(target=block.target)
        if extras.mixup or extras.cutmix:
            images, share, partner_B = blend_images(images, label_B, rng, extras)
            logits_BV = model(images)
            own_loss = losses.target_loss(logits_BV, label_B, weight_B * share, extras)
            partner_weight_B = weight_B * (1.0 - share)
            partner_loss = losses.target_loss(logits_BV, partner_B, partner_weight_B, extras)
            loss = Loss(*jax.tree.map(jnp.add, tuple(own_loss), tuple(partner_loss)))
        else:
            logits_BV = model(images)
            if not is_ours:
                logits_BV = checked_logits(model, logits_BV, label_B)
            loss = losses.target_loss(logits_BV, label_B, weight_B, extras)
        self._classes = logits_BV.shape[-1]
        if self._scale is not None and (unit := self._scale.shared_deviation) is not None:
            total, weight = loss.metrics["mae"]
            loss = loss._replace(metrics={**loss.metrics, "mae": (total * unit, weight)})
        return loss

    def predict(self, model: Any, batch: dict[str, Array]) -> Array:
        """Return logits_BV, or numbers in the unit of a table's label, for images or features."""
        logits_BV = model(self._model_inputs(model, batch))
        result: Array = logits_BV if self._scale is None else self._scale.denormalize(logits_BV)
        return result

    def reports_classes(self, spec: TrainSpec) -> bool:
        """Return whether an evaluation reports on classes: labels and the loss are of classes."""
        return type(self).loss is Classify.loss and spec.loss.target == "class"

    def score_batch(self, model: Any, batch: dict[str, Array]) -> ExampleScores:
        """Return the results for each example of a batch, for the report of an evaluation."""
        return score_examples(model(self._model_inputs(model, batch)), batch["label"])

    def start_classification(self) -> Classification:
        """Return a new accumulator for the results of an evaluation."""
        assert self._classes is not None, "the loss is traced first"
        return Classification(self._classes)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, as far as they have names."""
        return list((self._described or {}).get("classes", ()))

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        """Return the source that `train.data` describes. Raises DataError, SpecError."""
        self._target = spec.loss.target
        source = open_source(spec, split)
        self._scale = None if source is None else _read_scale(source, self._target)
        return source

    def _examples(self, raw: Batch) -> Batch:
        key, label_B = self._input_key(raw), ranges.get_value(raw, "label")
        return {key: ranges.get_value(raw, key), "label": ranges.read_labels(label_B, self._target)}

    @register_batch_function(_examples)
    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return `image` as it is stored, whose bytes become floats on the device, and `label`.

        Raises Unusable where one is missing, and for a label that is not one whole number; its
        shape may be [], [1] or [1, 1]. For other targets than a class `label` is a float32: 0 or 1
        for each class, or any numbers.
        """
        label, key = ranges.get_value(raw, "label"), self._input_key(raw)
        readers = {"class": ranges.read_class, "multi_label": ranges.read_flags}
        read = readers.get(self._target, ranges.read_numbers)
        return {key: np.asarray(ranges.get_value(raw, key)), "label": read(label)}

    def check_batch(self, spec: TrainSpec, batch: Batch) -> tuple[int, str] | None:
        """Return the first row whose label is not a class of the model, and a sentence."""
        if not self.reports_classes(spec):
            return None
        classes, is_ours = self._classes, type(self).model is Classify.model
        if is_ours and isinstance(spec.model, specs.MLP | specs.ImageModel):
            classes = spec.model.classes
        if classes is None:
            return None
        return ranges.find_outside("label", batch["label"], classes, "the model's classes")

    def describe_inputs(self, spec: TrainSpec) -> dict[str, Any] | None:
        """Return how a file becomes an example, as JSON for checkpoints; None for a user's own."""
        if (type(self).source, type(self).example) != (Classify.source, Classify.example):
            return None
        source = self.source(spec, "train")
        if source is None:
            return None
        forms = Examples(source, self.example).array_specs
        form = forms[self._input_key(forms)]
        about = {"target": self._target, "shape": list(form.shape)}
        packed: Mapping[str, Any] = as_data_source(source).metadata
        if isinstance(source, Rows | TableMixture):
            return {"kind": "table", **about, **source.encoding}
        if packed.get("kind") == "table":
            return {"kind": "table", **about, **{key: packed[key] for key in ENCODING_KEYS}}
        is_image = form.dtype == np.uint8 and len(form.shape) in (2, 3)
        if not isinstance(spec.data, ImageData) or not is_image:
            return None
        classes = packed.get("classes", [])
        if isinstance(source, ImageSource):
            classes = list(source.index.classes)
        share = 1.0 if spec.data.augment is None else spec.data.augment.eval_crop
        return {"kind": "images", **about, "eval_crop": share, "classes": classes}

    def use_inputs(self, described: Mapping[str, Any]) -> None:
        """Take shape and scale from what `describe_inputs` returned; no data are opened."""
        self._described, self._target = described, described["target"]
        self._scale = Scale.from_json(described["scale"]) if described.get("scale") else None

    def _model_inputs(self, model: Any, batch: dict[str, Array]) -> Array:
        """Return the input of the model: normalized images, or features of a table."""
        if self._input_key(batch) == "features":
            return batch["features"]
        image = batch["image"]
        pixels = model.pixels if isinstance(model, HasPixels) else None
        return standardize_images(image) if pixels is None else scale_images(image, *pixels)

    @staticmethod
    def _input_key(example: Mapping[str, Any]) -> str:
        return "features" if "features" in example else "image"

    def _check_image(self, spec: TrainSpec, config: specs.ImageModel) -> None:
        shape, channels = self._image_shape(spec), config.channels
        if len(shape) < 2:
            raise SpecError(
                f"train.model.kind = {config.kind} takes images, and train.data holds rows of "
                f"{shape[0]} features; use mlp"
            )
        size = tuple(config.image) if isinstance(config, specs.ViT) else shape[:2]
        if shape != (*size, channels) and (*shape, 1) != (*size, channels):
            of_size = f"image = {config.image} and " if isinstance(config, specs.ViT) else ""
            raise SpecError(
                f"train.model takes images of {of_size}channels = {channels}, "
                f"but train.data holds images of shape {list(shape)} (height, width, channels)"
            )

    def _image_shape(self, spec: TrainSpec) -> tuple[int, ...]:
        if self._described is not None:
            return tuple(self._described["shape"])
        source = self.source(spec, "train")
        if source is None:
            raise DataError("train.data has no training examples to take the images' shape from")
        # A task whose `example` takes a generator gets one here.
        forms = Examples(source, self.example).array_specs
        return forms[self._input_key(forms)].shape


def _read_scale(source: Source, target: str) -> Scale | None:
    """Return the scale of a table's numbers, packed or not. Raises SpecError."""
    if isinstance(source, Rows | TableMixture):
        return source.scale
    packed: Mapping[str, Any] = as_data_source(source).metadata
    if (packed_target := packed.get("target", target)) != target:
        raise SpecError(
            f"train.loss.target = {target}, and the records of train.data.path were packed with "
            f"{packed_target}; pack them again, or set it to {packed_target}"
        )
    return Scale.from_json(packed["scale"]) if packed.get("scale") else None


def standardize_images(image: Array) -> Array:
    """Return each image [B, ...] in float32 with mean 0 and variance 1, whatever its range."""
    pixels = image.astype(jnp.float32)
    axes = tuple(range(1, image.ndim))
    centred = pixels - pixels.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + 1e-6)


def scale_images(image: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """Return (image - mean) / std in float32, by channel, the last axis."""
    pixels = image.astype(jnp.float32)
    shape = (1,) * (image.ndim - 1) + (-1,)
    mean_C, std_C = (jnp.asarray(values, jnp.float32).reshape(shape) for values in (mean, std))
    return (pixels - mean_C) / std_C


def blend_images(
    images: Array, label: Array, rng: Array, block: specs.Loss
) -> tuple[Array, Array, Array]:
    """Return the blended images, the share of their own label, and the labels [B, ...] blended in.

    With both kinds a step draws one of them. Raises SpecError for CutMix of what has no height and
    width.
    """
    partner_label = label[::-1]
    if not block.cutmix:
        return *mix_up(images, jax.random.beta(rng, block.mixup, block.mixup)), partner_label
    if images.ndim < 3:
        shape = images.shape[1:]
        raise SpecError(
            f"train.loss.cutmix pastes a part of an image, and the examples have shape {shape}"
        )
    share_rng, place_rng, kind_rng = jax.random.split(rng, 3)
    place = jax.random.uniform(place_rng, (2,))
    cut = cut_mix(images, jax.random.beta(share_rng, block.cutmix, block.cutmix), place)
    if not block.mixup:
        return *cut, partner_label
    mixed = mix_up(images, jax.random.beta(share_rng, block.mixup, block.mixup))
    is_cut = jax.random.bernoulli(kind_rng)
    return jnp.where(is_cut, cut[0], mixed[0]), jnp.where(is_cut, cut[1], mixed[1]), partner_label


def mix_up(images: Array, share: Array) -> tuple[Array, Array]:
    """Return share × image + (1 - share) × its partner, and the share. Zhang et al. 2018."""
    return share * images + (1.0 - share) * images[::-1], share


def cut_mix(images_BYX: Array, share: Array, place: Array) -> tuple[Array, Array]:
    """Return images with a rectangle of their partner, and the share left of their own.

    The rectangle has 1 - share of the area, and `place` is its middle, as shares of each side;
    what is outside is cut off. Yun et al. 2019, "CutMix".
    """
    side = jnp.sqrt(1.0 - share)
    masks = []
    for axis, at in ((1, place[0]), (2, place[1])):
        size = images_BYX.shape[axis]
        middle, half = jnp.floor(at * size), jnp.floor(0.5 * side * size)
        first, last = jnp.maximum(middle - half, 0.0), jnp.minimum(middle + half, size)
        places = jnp.arange(size, dtype=jnp.float32)
        masks.append((places >= first) & (places < last))
    is_pasted_YX = masks[0][:, None] & masks[1][None, :]
    shape = (1, *is_pasted_YX.shape, *[1] * (images_BYX.ndim - 3))
    pasted = jnp.where(is_pasted_YX.reshape(shape), images_BYX[::-1], images_BYX)
    return pasted, 1.0 - is_pasted_YX.mean()
