"""The built-in models of images: their keys and checks. Never imports jax."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jaxlaunch.trainer.spec.block import Fraction, Ids, Many, Rate, Wide
from jaxlaunch.trainer.spec.presets import Layered, Published


class OfImages(Published):
    """Keys that the published models of images have in common."""

    channels: Many = Field(3, description="channels of an image, its last axis; with 1 the axis may be absent")
    classes: Ids = Field(10, description="labels are 0 to classes - 1")
    new_head: bool = Field(
        False,
        description="with init_from: initialize the last layer at random, for your own classes, and read the other "
        "layers",
    )
    pixel_mean: list[float] | None = Field(
        None, description="mean of each channel, subtracted from the pixels; null: each image is standardized by itself"
    )
    pixel_std: list[Rate] | None = Field(
        None, description="standard deviation of each channel, to divide by; goes with pixel_mean; default none"
    )

    @model_validator(mode="after")
    def _has_pixels(self) -> OfImages:
        if self.new_head and self.init_from is None:
            raise ValueError("new_head applies to init_from; without it, every layer is initialized at random")
        if self.is_partial:
            return self
        if (self.pixel_mean is None) != (self.pixel_std is None):
            raise ValueError("pixel_mean and pixel_std go together")
        for key, values in (("pixel_mean", self.pixel_mean), ("pixel_std", self.pixel_std)):
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{key} = {values} does not have one number for each of channels = {self.channels}")
        return self


class ViT(OfImages, Layered):
    """A vision transformer: patches, learned positions, LayerNorm first, exact GELU.

    ```yaml
    train:
      task: classify
      model: {kind: vit, image: [32, 32], patch: 4, classes: 10}  # 64 patches; or preset: vit-b16
    ```
    """

    kind: Literal["vit"] = Field("vit", description="this model")
    preset: Literal["vit-s16", "vit-b16", "vit-l16"] | None = Field(
        None, description="a preset of sizes by name; keys given here override it; default none"
    )
    layers: Many = Field(6, description="transformer blocks")
    width: Wide = Field(192, description="size of the residual stream")
    heads: Many = Field(3, description="attention heads; must divide width")
    hidden: Wide | None = Field(None, description="units of the MLP; default 4 × width")
    image: list[Many] = Field(
        [32, 32],
        description="height and width of an image, both multiples of patch; if they differ from those of init_from, "
        "its positions are interpolated",
    )
    patch: Many = Field(4, description="height and width of a patch")
    pool: Literal["cls", "mean"] = Field(
        "cls", description="classify from a class token (cls) or from the mean of the patches"
    )
    norm_eps: Rate = Field(1e-12, description="added to the variance in LayerNorm")
    dropout: Fraction = Field(0.0, description="dropout probability on residual branches")
    drop_path: Fraction = Field(
        0.0, description="stochastic depth: probability of skipping the last layer; lower for earlier layers"
    )

    @model_validator(mode="after")
    def _fits(self) -> ViT:
        if self.is_partial:
            return self
        check_heads(self.width, self.heads)
        if len(self.image) != 2 or any(side % self.patch for side in self.image):
            raise ValueError(
                f"image = {self.image} is not a height and a width that are multiples of patch = {self.patch}"
            )
        return self

    @property
    def units(self) -> int:
        """Hidden units of the MLP."""
        return self.hidden or 4 * self.width

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch, self.image[1] // self.patch


Stages = Annotated[list[Many], Field(min_length=1)]


class Staged(OfImages):
    """A convolutional network: stages, each of which halves the image."""

    SIZES: ClassVar[frozenset[str]] = frozenset({"depths", "widths"})

    depths: Stages = Field([2, 2, 2, 2], description="blocks of each stage")
    widths: Stages = Field([64, 128, 256, 512], description="channels of each stage")

    @model_validator(mode="after")
    def _has_stages(self) -> Staged:
        if not self.is_partial and len(self.depths) != len(self.widths):
            raise ValueError(f"depths = {self.depths} and widths = {self.widths} have different numbers of stages")
        return self


class ResNet(Staged):
    """A residual network with batch normalization, for images of any size: ResNet 18 to 152, PyTorch's variant (v1.5).

    ```yaml
    train:
      task: classify
      model: {kind: resnet, stem: small, depths: [2, 2], widths: [32, 64], classes: 10}  # or preset: resnet-50
      batch_norm: global  # statistics of the whole batch; device: of each device's part
    ```
    """

    kind: Literal["resnet"] = Field("resnet", description="this model")
    preset: Literal["resnet-18", "resnet-34", "resnet-50", "resnet-101", "resnet-152"] | None = Field(
        None, description="a preset of sizes by name; keys given here override it; default none"
    )
    block: Literal["basic", "bottleneck"] = Field(
        "basic", description="two convolutions of 3 × 3, or one between two of 1 × 1 with a quarter of the channels"
    )
    stem: Literal["imagenet", "small"] = Field(
        "imagenet",
        description="layers before the stages: 7 × 7 with stride 2 and pooling; small: 3 × 3 with stride 1, for images "
        "of 32 pixels, which cannot be exported to Hugging Face",
    )
    stem_width: Many = Field(64, description="channels before the stages")
    norm_eps: Rate = Field(1e-5, description="added to the variance in batch normalization")
    momentum: Fraction = Field(0.1, description="share of the running statistics that a batch replaces")
    running_variance: Literal["unbiased", "biased"] = Field(
        "unbiased",
        description="running variance. unbiased: the variance of a batch × n / (n - 1), as in PyTorch; biased: as in "
        "Flax",
    )

    @model_validator(mode="after")
    def _fits(self) -> ResNet:
        if not self.is_partial and self.block == "bottleneck" and any(width % 4 for width in self.widths):
            raise ValueError(f"widths = {self.widths} are not multiples of 4, which block = bottleneck divides them by")
        return self


class ConvNeXt(Staged):
    """A convolutional network in the manner of a transformer, for images of any size.

    ```yaml
    train:
      task: classify
      model: {preset: convnext-tiny, classes: 10, drop_path: 0.1}  # stochastic depth, as published
    ```
    """

    kind: Literal["convnext"] = Field("convnext", description="this model")
    preset: Literal["convnext-tiny", "convnext-small", "convnext-base", "convnext-large"] | None = Field(
        None, description="a preset of sizes by name; keys given here override it; default none"
    )
    depths: Stages = Field([3, 3, 9, 3], description="blocks of each stage")
    widths: Stages = Field([96, 192, 384, 768], description="channels of each stage")
    patch: Many = Field(4, description="height and width of a patch, which the first convolution turns into one pixel")
    layer_scale: Annotated[float, Field(gt=0.0)] = Field(
        1e-6, description="initial factors of each block's output, one per channel"
    )
    norm_eps: Rate = Field(1e-12, description="added to the variance in the last LayerNorm; it is 1e-6 in the others")
    drop_path: Fraction = Field(
        0.0, description="stochastic depth: probability of skipping the last block; lower for earlier blocks"
    )


def check_heads(width: int, heads: int) -> None:
    """Raises ValueError where the heads do not divide a width."""
    if width % heads:
        raise ValueError(f"width = {width} does not split into heads = {heads} heads")
