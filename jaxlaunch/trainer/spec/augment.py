"""The augment block: random changes of training images, and the cut of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxlaunch.trainer.spec.block import Block, Natural, PredicateError, Rate, Unset, Weight

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]

# Recipes by name. Sources: torchvision's ResNet, DeiT (Touvron et al. 2021), and He et al. 2016
# (section 4.2) for CIFAR. Blending of two images (mixup, cutmix) is part of the loss block.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "imagenet-resnet": {"crop": [0.08, 1.0], "flip": 0.5, "eval_crop": 0.875},
    "imagenet-vit": {
        "crop": [0.08, 1.0],
        "flip": 0.5,
        "erase": 0.25,
        "eval_crop": 0.875,
        "randaugment": {"count": 2, "magnitude": 9},
    },
    "cifar": {"shift": 4, "flip": 0.5},
    "mnist": {"shift": 2},
}


class Jitter(Block):
    """Brightness, contrast and saturation times 1 ± value, in random order; and hue.

    ```yaml
    train:
      task: classify
      data:
        source: images
        path: photos
        size: 224
        augment:
          jitter: {brightness: 0.4, contrast: 0.4, hue: 0.1}  # brightness times 0.6 to 1.4
    ```
    """

    brightness: Weight = Field(0.0, description="change of brightness, of all channels")
    contrast: Weight = Field(
        0.0, description="change of contrast, relative to the image's mean grey"
    )
    saturation: Weight = Field(
        0.0, description="change of saturation, relative to the image in grey"
    )
    hue: Annotated[float, Field(ge=0.0, le=0.5)] = Field(
        0.0, description="change of hue, in turns of the colour circle in either direction"
    )


class RandAugment(Block):
    """Operations drawn from fourteen, all with the same strength. Cubuk et al. 2020.

    ```yaml
    train:
      task: classify
      data:
        source: images
        path: photos
        size: 224
        augment:
          randaugment: {count: 2, magnitude: 9}  # as of imagenet-vit
    ```
    """

    count: Annotated[int, Field(ge=1, le=14)] = Field(
        2, description="number of operations, applied one after the other"
    )
    magnitude: Annotated[int, Field(ge=0, le=30)] = Field(
        9, description="strength of the operations, up to 30"
    )


class AugMix(Block):
    """Chains of operations, blended with each other and with the image. Hendrycks et al. 2020.

    ```yaml
    train:
      task: classify
      data:
        source: images
        path: photos
        size: 224
        augment:
          augmix: {severity: 3}  # of 10
    ```
    """

    severity: Annotated[int, Field(ge=1, le=10)] = Field(
        3, description="strength of the strongest operation, up to 10"
    )
    width: Annotated[int, Field(ge=1, le=10)] = Field(3, description="chains")
    depth: Annotated[int, Field(ge=1, le=10)] | None = Field(
        None, description="operations per chain", json_schema_extra=Unset("1 to 3", "null:")
    )
    alpha: Rate = Field(
        1.0,
        description="parameter of the Dirichlet and Beta distributions that the shares "
        "are drawn from",
    )


class Augment(Block):
    """Random changes of the training images, each a function of the seed and the position.

    The order is: crop or shift, flip, randaugment, augmix, jitter, erase. An evaluation uses the
    middle of each image.

    ```yaml
    train:
      task: classify
      data:
        source: images
        path: photos
        size: 224
        # or its name alone: augment: imagenet-resnet
        augment: {preset: imagenet-resnet, jitter: {brightness: 0.4}}
    ```
    """

    preset: Literal["imagenet-resnet", "imagenet-vit", "cifar", "mnist"] | None = Field(
        None,
        description="a recipe by name; keys given here override it",
        json_schema_extra=Unset("none"),
    )
    crop: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = Field(
        None,
        description="random-resized crop: smallest and largest share of the area",
        json_schema_extra=Unset("the middle of the image", "null:"),
    )
    ratio: Annotated[list[Rate], Field(min_length=2, max_length=2)] = Field(
        [3 / 4, 4 / 3], description="smallest and largest width / height of a crop"
    )
    shift: Natural = Field(
        0, description="largest shift of the image in pixels; the free area is black"
    )
    flip: Probability = Field(0.0, description="probability of mirroring left and right")
    flip_vertical: Probability = Field(0.0, description="probability of mirroring top and bottom")
    jitter: Jitter | None = Field(
        None, description="random changes of the colours", json_schema_extra=Unset("unchanged")
    )
    randaugment: RandAugment | None = Field(
        None, description="random operations of equal strength", json_schema_extra=Unset("none")
    )
    augmix: AugMix | None = Field(
        None, description="blended chains of operations", json_schema_extra=Unset("none")
    )
    erase: Probability = Field(
        0.0, description="probability that a rectangle is filled with the image's mean colour"
    )
    eval_crop: Share = Field(
        1.0,
        description="in an evaluation: the share of each side that is used, from the middle; "
        "0.875: 224 of 256",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, raw: Any) -> Any:
        keys = PRESETS.get(str(raw.get("preset"))) if isinstance(raw, Mapping) else None
        return raw if keys is None else {**keys, **raw}

    @model_validator(mode="after")
    def _check_order(self) -> Augment:
        for key, pair in (("crop", self.crop), ("ratio", self.ratio)):
            if pair is not None and pair[0] > pair[1]:
                problem = "the first number is larger than the second; write the smaller number"
                raise ValueError(f"{key} = {pair}: {problem} first")
        if self.crop is not None and self.shift:
            raise ValueError(f"crop and shift = {self.shift} are both set; keep one")
        return self


def expand_preset(augment: Any) -> Any:
    """Expand an augment block that is only a recipe's name. Raises ValueError."""
    if isinstance(augment, str) and augment not in PRESETS:
        raise PredicateError(f"is not one of {', '.join(PRESETS)}")
    return {"preset": augment} if isinstance(augment, str) else augment
