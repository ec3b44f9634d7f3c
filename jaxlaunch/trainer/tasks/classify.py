"""Images and rows of tables: examples with an `image` (bytes of any range and shape) or `features`, and a `label`.

B batch, V classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data.examples import Batch, Examples, many_by
from jaxlaunch.trainer.data.source import Source, as_data_source
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.models import custom
from jaxlaunch.trainer.models.convolutional.convnext import ConvNeXt
from jaxlaunch.trainer.models.convolutional.resnet import ResNet
from jaxlaunch.trainer.models.mlp import MLP
from jaxlaunch.trainer.models.options import ModelOptions
from jaxlaunch.trainer.models.vit import ViT
from jaxlaunch.trainer.sources.images.source import Pictures
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.mixed import Tables
from jaxlaunch.trainer.sources.tables.source import DESCRIBED, Rows, Scale
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.spec.data import OfImages
from jaxlaunch.trainer.task import Loss, Split, Task, checked_logits
from jaxlaunch.trainer.tasks import blends, losses, ranges
from jaxlaunch.trainer.tasks.classification import Classification, Seen, seen

BUILT_IN = MLP | ViT | ResNet | ConvNeXt


class Classify(Task):
    """The task `classify`: cross-entropy of the labels of images; `accuracy` is the share of images whose label has the
    largest logit. Examples have `image` `[H, W, C]`, or any other shape, and `label` `[]`.

    **Example:**

    ```python
    import jax
    import jaxlaunch


    class TwoHeads(jaxlaunch.Classify):  # train.task: module:TwoHeads; the data and the examples stay
        def loss(self, model, batch: jaxlaunch.Batch, rng: jax.Array) -> jaxlaunch.Loss:
            found = super().loss(model, batch, rng)
            return found._replace(metrics=found.metrics | {"rows": (found.weight, found.weight)})
    ```
    """

    _classes: int | None = None  # of the logits, known from when the loss was traced
    _target: str = "class"  # what a label is, known from when the source was opened,
    _scale: Scale | None = None  # and what numbers of a table are measured in
    _described: Mapping[str, Any] | None = None  # the inputs of a model that was trained, in place of its data

    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        """An MLP for images like the first example's, a ViT, a ResNet, a ConvNeXt, or a model of the user's:
        images [B, ...] -> logits_BV.

        A model's attribute `pixels`, if any, is the mean and deviation of each channel to normalize images by.
        """
        options = ModelOptions.of(spec)
        match spec.model:
            case specs.MLP() as config:
                return MLP(config, self._image_shape(spec), rngs, options)
            case specs.ViT() as config:
                self._check_image(spec, config)
                return ViT(config, rngs, options)
            case specs.ResNet() as config:
                self._check_image(spec, config)
                return ResNet(config, rngs, options)
            case specs.ConvNeXt() as config:
                self._check_image(spec, config)
                return ConvNeXt(config, rngs, options)
            case specs.CustomModel() as config:
                return custom.build(spec, config, rngs, lambda: (self._image(spec),))
        kinds = "mlp, vit, resnet, convnext or module:Name"
        raise SpecError(f"train.model.kind = {spec.model.kind} does not classify images; use {kinds}")

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        """Cross-entropy of `label` [B] on the normalized `image` [B, ...], times `weight` [B]; and `accuracy`.

        With `loss.target` the binary cross-entropy of label [B, V], or the squared error of label [B] or [B, K].
        Training adds to it what the loss block of a built-in model says.
        """
        images = self._inputs(model, batch)
        label_B, weight_B = batch["label"], batch["weight"]
        if self._scale is not None:
            label_B = self._scale.within(label_B)
        is_ours = isinstance(model, BUILT_IN)
        block = model.loss if is_ours else specs.Loss()
        is_training = is_ours and not model.deterministic
        extras = block if is_training else specs.Loss(target=block.target)
        if extras.mixup or extras.cutmix:
            images, share, other_B = blends.blended(images, label_B, rng, extras)
            logits_BV = model(images)
            one = losses.of_target(logits_BV, label_B, weight_B * share, extras)
            other = losses.of_target(logits_BV, other_B, weight_B * (1.0 - share), extras)
            loss = Loss(*jax.tree.map(jnp.add, tuple(one), tuple(other)))
        else:
            logits_BV = model(images)
            if not is_ours:
                logits_BV = checked_logits(model, logits_BV, label_B)
            loss = losses.of_target(logits_BV, label_B, weight_B, extras)
        self._classes = logits_BV.shape[-1]
        if self._scale is not None and (unit := self._scale.unit) is not None:
            total, weight = loss.metrics["mae"]
            loss = loss._replace(metrics={**loss.metrics, "mae": (total * unit, weight)})
        return loss

    def predict(self, model: Any, batch: dict[str, Array]) -> Array:
        """Logits_BV of `image` [B, ...], normalized as in training, or of `features` [B, F].

        Where a table's label is a number, the numbers, in the label's unit.
        """
        logits_BV: Array = model(self._inputs(model, batch))
        return logits_BV if self._scale is None else self._scale.outside(logits_BV)

    def tells_classes(self, spec: TrainSpec) -> bool:
        """Whether an evaluation tells of classes: labels are classes, and the loss is of the logits."""
        return type(self).loss is Classify.loss and spec.loss.target == "class"

    def seen(self, model: Any, batch: dict[str, Array]) -> Seen:
        """What an evaluation tells of each example of a batch."""
        return seen(model(self._inputs(model, batch)), batch["label"])

    def classification(self) -> Classification:
        """What adds up `seen` of the batches of an evaluation."""
        return Classification(self.classes)

    @property
    def classes(self) -> int:
        """Those of the model, known from when the loss was traced."""
        assert self._classes is not None, "the loss is traced first"
        return self._classes

    @property
    def names(self) -> list[str]:
        """The names of the classes, as far as they have names."""
        return list((self._described or {}).get("classes", ()))

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        """The source that `train.data` describes. Raises DataError, SpecError."""
        self._target = spec.loss.target
        found = open_source(spec, split)
        self._scale = None if found is None else _scale_of(found, self._target)
        return found

    def _examples(self, raw: Batch) -> Batch:
        key = self._key(raw)
        return {key: ranges.of(raw, key), "label": ranges.many(ranges.of(raw, "label"), self._target)}

    @many_by(_examples)
    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """`image` as it is stored, and `label` int32: bytes are copied to the device and become floats there.

        Raises Unusable where one is missing, and for a label that is not one whole number; its shape may be [], [1]
        or [1, 1]. Of other targets than a class `label` is a float32: 0 or 1 for each class, or any numbers.
        """
        label = ranges.of(raw, "label")
        read = (
            ranges.label
            if self._target == "class"
            else ranges.flags
            if self._target == "multi_label"
            else ranges.numbers
        )
        key = self._key(raw)
        return {key: np.asarray(ranges.of(raw, key)), "label": read(label)}

    def check_batch(self, spec: TrainSpec, batch: Batch) -> tuple[int, str] | None:
        """The first row whose label is no class of the model, and a sentence on it; None where there is none.

        Nothing is judged for a task that computes another loss: its labels may mean something else.
        """
        if type(self).loss is not Classify.loss or spec.loss.target != "class":
            return None
        classes = self._classes
        if isinstance(spec.model, specs.MLP | specs.OfImages) and type(self).model is Classify.model:
            classes = spec.model.classes
        return None if classes is None else ranges.outside("label", batch["label"], classes, "the model's classes")

    def describe_inputs(self, spec: TrainSpec) -> dict[str, Any] | None:
        """How a file becomes an example, as JSON that checkpoints carry; None where the examples are a user's own."""
        if (type(self).source, type(self).example) != (Classify.source, Classify.example):
            return None
        found = self.source(spec, "train")
        if found is None:
            return None
        forms = Examples(found, self.example).forms
        form = forms[self._key(forms)]
        about = {"target": self._target, "shape": list(form.shape)}
        packed: Mapping[str, Any] = as_data_source(found).about
        if isinstance(found, Rows | Tables):
            return {"kind": "table", **about, **found.described}
        if packed.get("kind") == "table":
            return {"kind": "table", **about, **{key: packed[key] for key in DESCRIBED}}
        if not isinstance(spec.data, OfImages) or form.dtype != np.uint8 or len(form.shape) not in (2, 3):
            return None
        classes = list(found.index.classes) if isinstance(found, Pictures) else packed.get("classes", [])
        share = 1.0 if spec.data.augment is None else spec.data.augment.eval_crop
        return {"kind": "images", **about, "eval_crop": share, "classes": classes}

    def use_inputs(self, described: Mapping[str, Any]) -> None:
        """Takes shape and scale from what `describe_inputs` said: no data are opened for the model."""
        self._described, self._target = described, described["target"]
        self._scale = Scale.of(described["scale"]) if described.get("scale") else None

    def _inputs(self, model: Any, batch: dict[str, Array]) -> Array:
        """What the model reads: features as they are, their scale is the table's; images normalized."""
        if self._key(batch) == "features":
            return batch["features"]
        image = batch["image"]
        pixels = getattr(model, "pixels", None)
        return standardized(image) if pixels is None else scaled(image, *pixels)

    @staticmethod
    def _key(example: Mapping[str, Any]) -> str:
        return "features" if "features" in example else "image"

    def _check_image(self, spec: TrainSpec, config: specs.OfImages) -> None:
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

    def _image(self, spec: TrainSpec) -> Array:
        """An image as `loss` gives it to a model, alone in its batch."""
        return jnp.zeros((1, *self._image_shape(spec)), jnp.float32)

    def _image_shape(self, spec: TrainSpec) -> tuple[int, ...]:
        if self._described is not None:
            return tuple(self._described["shape"])
        source = self.source(spec, "train")
        if source is None:
            raise DataError("train.data has no training examples to take the images' shape from")
        forms = Examples(source, self.example).forms  # which gives who takes a generator one
        return forms[self._key(forms)].shape


def _scale_of(found: Source, target: str) -> Scale | None:
    """What the numbers of a table are measured in; of a packed one as it was when it was packed. Raises SpecError."""
    if isinstance(found, Rows | Tables):
        return found.scale
    packed: Mapping[str, Any] = as_data_source(found).about
    if (was := packed.get("target", target)) != target:
        raise SpecError(
            f"train.loss.target = {target}, and the records of train.data.path were packed with {was}; pack them "
            f"again, or set it to {was}"
        )
    return Scale.of(packed["scale"]) if packed.get("scale") else None


def standardized(image: Array) -> Array:
    """Each image [B, ...] in float32 with mean 0 and variance 1: the range of its bytes does not matter."""
    pixels = image.astype(jnp.float32)
    axes = tuple(range(1, image.ndim))
    centred = pixels - pixels.mean(axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + 1e-6)


def scaled(image: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    """(image - mean) / std in float32, by channel, the last axis."""
    pixels = image.astype(jnp.float32)
    shape = (1,) * (image.ndim - 1) + (-1,)
    mean_C, std_C = (jnp.asarray(values, jnp.float32).reshape(shape) for values in (mean, std))
    return (pixels - mean_C) / std_C
