"""Classification and regression of images and rows of tables.

Examples have an `image` or `features`, and a `label`. In training, mixup and CutMix may blend the
images of a batch on the device: each image is blended with the one at its position in the reversed
batch, with the same share for the whole batch.

B batch, Y rows and X columns of an image, C channels, V classes.
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
from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.data.examples import Batch, Examples, register_batch_function
from jaxlaunch.trainer.data.source import Source, Split, as_data_source
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.models import custom
from jaxlaunch.trainer.models.classifiers import MLP, Classifier, ConvNeXt, ResNet, ViT
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.sources.images.source import ImageSource
from jaxlaunch.trainer.sources.labeled_texts import LabeledTexts
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.source import ENCODING_KEYS, Rows, Scale, TableMixture
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.spec.data import ImageData
from jaxlaunch.trainer.task import Loss, Task, checked_logits
from jaxlaunch.trainer.tasks import losses, ranges
from jaxlaunch.trainer.tasks.classification import Classification, ExampleScores, score_examples
from jaxlaunch.trainer.text.documents import DEFAULT_FIELD
from jaxlaunch.trainer.torch_models import build
from jaxlaunch.trainer.torch_models.network import TorchClassifier


@runtime_checkable
class HasPixels(Protocol):
    """A model, built-in or the user's, that defines how its images are normalized.

    Attributes:
        pixels: Mean and standard deviation of each channel.
    """

    pixels: tuple[Sequence[float], Sequence[float]] | None


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

    # The number of classes of the logits, set when the loss is traced.
    _classes: int | None = None
    # The kind of the labels, and the mean and deviation of a table's numbers, set when the source
    # is opened.
    _target: str = "class"
    _scale: Scale | None = None
    # The description of a trained model's inputs, which replaces its data.
    _input_description: Mapping[str, Any] | None = None

    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        """Return a model that maps images [B, ...] of the first example's shape to logits_BV.

        If it has an attribute `pixels`, these are the mean and the deviation of each channel, with
        which images are normalized.
        """
        config, options = spec.model, ModelOptions.from_spec(spec)
        if isinstance(config, specs.MLP):
            return MLP(config, self._image_shape(spec), rngs, options)
        if isinstance(config, specs.CustomModel):

            def sample_inputs() -> tuple[Array]:
                """Return a batch of one image, as `loss` passes it to a model."""
                return (jnp.zeros((1, *self._image_shape(spec)), jnp.float32),)

            return custom.build_model(spec, config, rngs, sample_inputs)
        if isinstance(config, specs.TransformersModel):
            return build.build_model(config, rngs, options)
        if not isinstance(config, specs.ImageModel):
            kinds = "mlp, vit, resnet, convnext or module:Name"
            raise SpecError(
                f"train.model.kind = {config.kind} does not classify images; use {kinds}, and "
                "transformers for texts"
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
        """Return the weighted loss for `image` [B, ...], `label` and `weight` [B].

        `loss.target` selects the cross-entropy of label [B], the binary cross-entropy of label
        [B, V], or the squared error of label [B] or [B, K]. Training of a built-in model adds the
        terms of its loss block.
        """
        label_B, weight_B = batch["label"], batch["weight"]
        if self._scale is not None:
            label_B = self._scale.normalize(label_B)
        is_built_in = isinstance(model, Classifier | TorchClassifier)
        block = model.loss if is_built_in else specs.Loss()
        is_training = is_built_in and not model.deterministic
        terms = block if is_training else specs.Loss(target=block.target)
        if terms.mixup or terms.cutmix:
            images = self._model_inputs(model, batch)
            images, share, partner_label_B = blend_images(images, label_B, rng, terms)
            logits_BV = model(images)
            label_loss = losses.target_loss(logits_BV, label_B, weight_B * share, terms)
            partner_weight_B = weight_B * (1.0 - share)
            partner_loss = losses.target_loss(logits_BV, partner_label_B, partner_weight_B, terms)
            loss = Loss(*jax.tree.map(jnp.add, tuple(label_loss), tuple(partner_loss)))
        else:
            logits_BV = self._compute_logits(model, batch)
            if not is_built_in:
                logits_BV = checked_logits(model, logits_BV, label_B)
            loss = losses.target_loss(logits_BV, label_B, weight_B, terms)
        self._classes = logits_BV.shape[-1]
        if self._scale is not None and (unit := self._scale.shared_deviation) is not None:
            total, weight = loss.metrics["mae"]
            loss = loss._replace(metrics={**loss.metrics, "mae": (total * unit, weight)})
        return loss

    def predict(self, model: Any, batch: dict[str, Array]) -> Array:
        """Return logits_BV for images or features, or numbers in the unit of a table's label."""
        logits_BV = self._compute_logits(model, batch)
        result: Array = logits_BV if self._scale is None else self._scale.denormalize(logits_BV)
        return result

    def reports_classes(self, spec: TrainSpec) -> bool:
        """Return whether an evaluation reports on classes, which needs labels that are classes."""
        return type(self).loss is Classify.loss and spec.loss.target == "class"

    def score_batch(self, model: Any, batch: dict[str, Array]) -> ExampleScores:
        """Return the scores of each example of a batch, for the report of an evaluation."""
        return score_examples(self._compute_logits(model, batch), batch["label"])

    def start_classification(self) -> Classification:
        """Return a new accumulator for the scores of an evaluation."""
        assert self._classes is not None, "the loss is traced first"
        return Classification(self._classes)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, empty if they have none."""
        return list((self._input_description or {}).get("classes", ()))

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        """Return the source that `train.data` describes. Raises DataError, SpecError."""
        self._target = spec.loss.target
        source = open_source(spec, split)
        self._scale = None if source is None else _read_scale(source, self._target)
        return source

    def _examples(self, raw: Batch) -> Batch:
        key, label_B = self._input_key(raw), ranges.get_value(raw, "label")
        lengths = {"length": raw["length"]} if "length" in raw else {}
        inputs = {key: ranges.get_value(raw, key), **lengths}
        return {**inputs, "label": ranges.read_labels(label_B, self._target)}

    @register_batch_function(_examples)
    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return `image` or `features`, or `tokens` and their `length`; and `label`.

        The image stays as it is stored; the device converts bytes.

        For a class `label` is one whole number, of shape [], [1] or [1, 1]. For the other targets
        it is float32: 0 or 1 for each class, or any numbers. Raises UnusableExampleError for other
        labels, and if a key is missing.
        """
        label, key = ranges.get_value(raw, "label"), self._input_key(raw)
        readers = {"class": ranges.read_class, "multi_label": ranges.read_flags}
        read = readers.get(self._target, ranges.read_numbers)
        inputs = {key: np.asarray(ranges.get_value(raw, key))}
        if key == "tokens":
            inputs = {
                name: ranges.read_integers(name, ranges.get_value(raw, name))
                for name in ("tokens", "length")
            }
        return {**inputs, "label": read(label)}

    def check_batch(self, spec: TrainSpec, batch: Batch) -> tuple[int, str] | None:
        """Return the first row whose label is not a class of the model, and a sentence about it.

        The tokens of texts are checked, too.
        """
        is_built_in = type(self).model is Classify.model
        if is_built_in and (fault := _find_token_fault(spec.model, batch)) is not None:
            return fault
        if not self.reports_classes(spec):
            return None
        classes, text_model = self._classes, specs.TransformersModel
        if is_built_in and isinstance(spec.model, specs.MLP | specs.ImageModel | text_model):
            classes = spec.model.classes
        if classes is None:
            return None
        return ranges.find_outside("label", batch["label"], classes, "the model's classes")

    def describe_inputs(self, spec: TrainSpec) -> dict[str, Any] | None:
        """Return how files become inputs of the model, as JSON that is saved with checkpoints.

        Returns None if the user defines the source or the examples, and for other kinds of data.
        """
        if (type(self).source, type(self).example) != (Classify.source, Classify.example):
            return None
        source = self.source(spec, "train")
        if source is None:
            return None
        array_specs = Examples(source, self.example).array_specs
        input_spec = array_specs[self._input_key(array_specs)]
        description = {"target": self._target, "shape": list(input_spec.shape)}
        metadata: Mapping[str, Any] = as_data_source(source).metadata
        if isinstance(source, LabeledTexts):
            field = getattr(spec.data, "field", None) or DEFAULT_FIELD
            return {"kind": "text", **description, "field": field, "classes": [*source.classes]}
        if isinstance(source, Rows | TableMixture):
            return {"kind": "table", **description, **source.encoding}
        if metadata.get("kind") == "table":
            encoding = {key: metadata[key] for key in ENCODING_KEYS}
            return {"kind": "table", **description, **encoding}
        is_image = input_spec.dtype == np.uint8 and len(input_spec.shape) in (2, 3)
        if not isinstance(spec.data, ImageData) or not is_image:
            return None
        classes = metadata.get("classes", [])
        if isinstance(source, ImageSource):
            classes = list(source.index.classes)
        crop_share = 1.0 if spec.data.augment is None else spec.data.augment.eval_crop
        return {"kind": "images", **description, "eval_crop": crop_share, "classes": classes}

    def use_inputs(self, description: Mapping[str, Any]) -> None:
        """Use shapes and scale of a result of `describe_inputs`, so that no data are opened."""
        self._input_description, self._target = description, description["target"]
        self._scale = Scale.from_json(description["scale"]) if description.get("scale") else None

    def _compute_logits(self, model: Any, batch: dict[str, Array]) -> Array:
        """Return logits_BV. Texts have `tokens` [B, L] and their `length` [B]."""
        logits_BV: Array
        if "tokens" in batch:
            logits_BV = model(batch["tokens"], Visible(lengths_B=batch["length"]))
        else:
            logits_BV = model(self._model_inputs(model, batch))
        return logits_BV

    def _model_inputs(self, model: Any, batch: dict[str, Array]) -> Array:
        """Return the inputs of the model: normalized images, or the features of a table."""
        if self._input_key(batch) == "features":
            return batch["features"]
        image = batch["image"]
        pixels = model.pixels if isinstance(model, HasPixels) else None
        return standardize_images(image) if pixels is None else scale_images(image, *pixels)

    @staticmethod
    def _input_key(example: Mapping[str, Any]) -> str:
        return next((key for key in ("features", "image", "tokens") if key in example), "image")

    def _check_image(self, spec: TrainSpec, config: specs.ImageModel) -> None:
        shape, channels = self._image_shape(spec), config.channels
        if len(shape) < 2:
            raise SpecError(
                f"train.model.kind = {config.kind} takes images, and train.data holds rows of "
                f"{shape[0]} features; use mlp"
            )
        size = tuple(config.image) if isinstance(config, specs.ViT) else shape[:2]
        if shape != (*size, channels) and (*shape, 1) != (*size, channels):
            image_text = f"image = {config.image} and " if isinstance(config, specs.ViT) else ""
            raise SpecError(
                f"train.model takes images of {image_text}channels = {channels}, "
                f"but train.data holds images of shape {list(shape)} (height, width, channels)"
            )

    def _image_shape(self, spec: TrainSpec) -> tuple[int, ...]:
        if self._input_description is not None:
            return tuple(self._input_description["shape"])
        source = self.source(spec, "train")
        if source is None:
            raise DataError("train.data has no training examples to take the images' shape from")
        # Examples passes a generator to a task whose `example` takes one.
        array_specs = Examples(source, self.example).array_specs
        return array_specs[self._input_key(array_specs)].shape


def _find_token_fault(config: Any, batch: Batch) -> tuple[int, str] | None:
    """Return the first text that the model cannot read, and a sentence about it."""
    is_text = isinstance(config, specs.TransformersModel) and batch.keys() >= {"tokens", "length"}
    if not is_text:
        return None
    tokens_BL, length_B = batch["tokens"], batch["length"]
    if tokens_BL.ndim != 2 or length_B.ndim != 1:
        shapes = f"tokens of shape {[*tokens_BL.shape[1:]]} and a length of {[*length_B.shape[1:]]}"
        return 0, f"{shapes}; a text has tokens [L] and a length []"
    size = tokens_BL.shape[1]
    if size > config.length:
        return 0, f"{size} tokens, and train.model.length = {config.length}; cut the examples"
    wrong_B = (length_B < 1) | (length_B > size)
    if fault := ranges.find_wrong("length", length_B, wrong_B, f"outside 1 to {size}, its tokens"):
        return fault
    if config.vocab is None:
        return None
    read_BL = np.where(np.arange(size) < length_B[:, None], tokens_BL, 0)
    return ranges.find_outside("token", read_BL, config.vocab, "the vocabulary")


def _read_scale(source: Source, target: str) -> Scale | None:
    """Return the scale of the numbers of a table or of packed rows, None for other sources.

    Raises SpecError if the rows were packed for another target.
    """
    if isinstance(source, Rows | TableMixture):
        return source.scale
    metadata: Mapping[str, Any] = as_data_source(source).metadata
    if (packed_target := metadata.get("target", target)) != target:
        raise SpecError(
            f"train.loss.target = {target}, and the records of train.data.path were packed with "
            f"{packed_target}; pack them again, or set it to {packed_target}"
        )
    return Scale.from_json(metadata["scale"]) if metadata.get("scale") else None


def standardize_images(image: Array) -> Array:
    """Return images [B, ...] in float32, each scaled to mean 0 and variance 1."""
    pixels = image.astype(jnp.float32)
    axes = tuple(range(1, image.ndim))
    centered = pixels - pixels.mean(axes, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + 1e-6)


def scale_images(image: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """Return (image - mean) / std in float32, with a mean and std for each channel [..., C]."""
    pixels = image.astype(jnp.float32)
    shape = (1,) * (image.ndim - 1) + (-1,)
    mean_C, std_C = (jnp.asarray(values, jnp.float32).reshape(shape) for values in (mean, std))
    return (pixels - mean_C) / std_C


def blend_images(
    images: Array, label: Array, rng: Array, block: specs.Loss
) -> tuple[Array, Array, Array]:
    """Blend each image with its partner, the image at its position in the reversed batch.

    If both mixup and CutMix are on, each step draws one of them.

    Returns:
        The blended images, the share of an image's own label, and the labels [B, ...] of the
        partners.

    Raises:
        SpecError: CutMix is on, and the examples have no height and width.
    """
    partner_label = label[::-1]
    if not block.cutmix:
        return *mix_up(images, jax.random.beta(rng, block.mixup, block.mixup)), partner_label
    if images.ndim < 3:
        shape = images.shape[1:]
        raise SpecError(
            f"train.loss.cutmix needs images, and the examples have shape {shape}; leave it out"
        )
    share_rng, center_rng, kind_rng = jax.random.split(rng, 3)
    center = jax.random.uniform(center_rng, (2,))
    cut = cut_mix(images, jax.random.beta(share_rng, block.cutmix, block.cutmix), center)
    if not block.mixup:
        return *cut, partner_label
    mixed = mix_up(images, jax.random.beta(share_rng, block.mixup, block.mixup))
    is_cut = jax.random.bernoulli(kind_rng)
    return jnp.where(is_cut, cut[0], mixed[0]), jnp.where(is_cut, cut[1], mixed[1]), partner_label


def mix_up(images: Array, share: Array) -> tuple[Array, Array]:
    """Return share × image + (1 - share) × its partner, and the share. Zhang et al. 2018."""
    return share * images + (1.0 - share) * images[::-1], share


def cut_mix(images_BYX: Array, share: Array, center: Array) -> tuple[Array, Array]:
    """Return images with a rectangle of their partner pasted in, and the share that is left.

    The rectangle has 1 - share of the area. Its center is `center`, relative to the size of the
    image, and the part outside of the image is cut off. Yun et al. 2019, "CutMix".
    """
    side = jnp.sqrt(1.0 - share)
    masks = []
    for axis, relative_center in ((1, center[0]), (2, center[1])):
        size = images_BYX.shape[axis]
        middle, half = jnp.floor(relative_center * size), jnp.floor(0.5 * side * size)
        start, stop = jnp.maximum(middle - half, 0.0), jnp.minimum(middle + half, size)
        positions = jnp.arange(size, dtype=jnp.float32)
        masks.append((positions >= start) & (positions < stop))
    is_pasted_YX = masks[0][:, None] & masks[1][None, :]
    shape = (1, *is_pasted_YX.shape, *[1] * (images_BYX.ndim - 3))
    pasted = jnp.where(is_pasted_YX.reshape(shape), images_BYX[::-1], images_BYX)
    return pasted, 1.0 - is_pasted_YX.mean()
