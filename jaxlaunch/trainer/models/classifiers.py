"""The models that classify: an MLP; ResNet, ConvNeXt and a vision transformer for images.

B batch, Y rows and X columns of an image, I input channels, O output channels, C channels, F hidden
units, P side of a patch, L patches (and a class token), D model, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.models.gpt2 import INIT_STD, BlockStack
from jaxlaunch.trainer.models.layers import (
    DEFAULT_OPTIONS,
    Drop,
    LayerNorm,
    Linear,
    ModelOptions,
    apply_kernel,
    gather_sequence,
    gelu,
    init_bias,
    init_weight,
    split_sequence,
)
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import constrain

# The axes of a kernel [Y, X, I, O]. Under fsdp it is split along its output channels.
KERNEL_AXES = (None, None, None, "embed")
# The epsilon of every norm of ConvNeXt except the last.
CONVNEXT_EPS = 1e-6


class Classifier(nnx.Module):
    """A model that maps examples [B, ...] to logits_BV.

    Attributes:
        pixels: Mean and standard deviation of each channel, to normalize images with. None
            normalizes each image with its own mean and deviation.
    """

    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def __init__(self, options: ModelOptions, config: spec.ImageModel | None = None) -> None:
        self.output, self.loss = options.output, options.loss
        # nnx's train() and eval() set the attribute of this name.
        self.deterministic = False
        if config is not None and config.pixel_mean is not None:
            self.pixels = tuple(config.pixel_mean), tuple(config.pixel_std or ())


class MLP(Classifier):
    """`layers` hidden layers of `width` ReLUs over examples of `shape`, then `classes` logits."""

    def __init__(
        self,
        config: spec.MLP,
        shape: Sequence[int],
        rngs: nnx.Rngs,
        options: ModelOptions = DEFAULT_OPTIONS,
    ) -> None:
        super().__init__(options)
        widths = [math.prod(shape), *[config.width] * config.layers]
        self.layers = nnx.List(
            Linear(inputs, outputs, (_layer_axis(i), _layer_axis(i + 1)), rngs)
            for i, (inputs, outputs) in enumerate(pairwise(widths))
        )
        head_axes = _layer_axis(config.layers), "classes"
        self.head = Linear(config.width, config.classes, head_axes, rngs)

        def apply_hidden(layer: Linear, x_BF: Array) -> Array:
            result: Array = checkpoint_name(jax.nn.relu(layer(x_BF)), "hidden")
            return result

        self.apply = remat.remat_layer(apply_hidden, options.remat, ("hidden",), scanned=False)

    def __call__(self, x: Array) -> Array:
        """Return logits_BV of examples [B, ...], in the output dtype."""
        x_BF: Array = x.reshape(x.shape[0], -1)
        for i, layer in enumerate(self.layers):
            x_BF = constrain(self.apply(layer, x_BF), "batch", _layer_axis(i + 1))
        return self.head(x_BF).astype(self.output)


def _layer_axis(i: int) -> str:
    """Return the axis of the units after layer i.

    The names alternate, so that under mp only every second product communicates.
    """
    return "hidden" if i % 2 else "embed"


class ImageClassifier(Classifier):
    """A model of float images [B, Y, X, C], or [B, Y, X] if they have a single channel."""

    def add_head(self, config: spec.ImageModel, width: int, std: float, rngs: nnx.Rngs) -> None:
        """Create the head, after all other layers."""
        self.head = init_weight(rngs, (width, config.classes), ("embed", "classes"), std)
        self.head_bias = init_bias((config.classes,), ("classes",))

    def __call__(self, images: Array) -> Array:
        """Return logits_BV in the output dtype."""
        pooled_BC = self.pool(images if images.ndim == 4 else images[..., None])
        logits_BV = jnp.matmul(pooled_BC, self.head[...], preferred_element_type=self.output)
        return logits_BV + self.head_bias[...].astype(self.output)[None, :]

    def pool(self, images_BYXC: Array) -> Array:
        """Return the features [B, C], from which the head computes logits."""
        raise NotImplementedError


# --- convolutional networks -----------------------------------------------------------------------


def convolve(
    x_BYXI: Array, kernel_YXIO: Array, stride: int, padding: int, groups: int = 1
) -> Array:
    """Convolve x with the kernel in `groups` of channels, with `padding` zeros on every side."""
    layout, strides, pads = ("NHWC", "HWIO", "NHWC"), (stride, stride), [(padding, padding)] * 2
    return jax.lax.conv_general_dilated(
        x_BYXI, kernel_YXIO, strides, pads, dimension_numbers=layout, feature_group_count=groups
    )


def broadcast_channels(vector: nnx.Variable[Array] | Array) -> Array:
    """Reshape a vector [C] for arithmetic with images [B, Y, X, C]."""
    return vector[...][None, None, None, :]


class BatchNorm(nnx.Module):
    """Batch normalization by channel, computed in float32, with scale and bias.

    Evaluation, and training with `use_running_average`, normalize with the running statistics.
    Other training normalizes with those of the batch and updates the running ones:
    running = (1 - momentum) × running + momentum × batch. Ioffe and Szegedy 2015.
    """

    def __init__(self, config: spec.ResNet, channels: int) -> None:
        self.scale = nnx.Param(jnp.ones(channels, jnp.float32), axes=("embed",))
        self.bias = init_bias((channels,), ("embed",))
        self.mean = nnx.BatchStat(jnp.zeros(channels, jnp.float32), axes=("embed",))
        self.variance = nnx.BatchStat(jnp.ones(channels, jnp.float32), axes=("embed",))
        self.eps, self.momentum = config.norm_eps, config.momentum
        self.is_unbiased = config.running_variance == "unbiased"
        # nnx's train() and eval() set the attribute of this name.
        self.use_running_average = False

    def __call__(self, x_BYXC: Array) -> Array:
        """Normalize x by channel; in training, also update the running statistics."""
        float_BYXC = x_BYXC.astype(jnp.float32)
        if self.use_running_average:
            mean_C, variance_C = self.mean[...], self.variance[...]
        else:
            mean_C = float_BYXC.mean((0, 1, 2))
            variance_C = jnp.square(float_BYXC - broadcast_channels(mean_C)).mean((0, 1, 2))
            self._update_statistics(mean_C, variance_C, x_BYXC.size // x_BYXC.shape[-1])
        scale_C = self.scale[...].astype(jnp.float32) * jax.lax.rsqrt(variance_C + self.eps)
        scaled_BYXC = (float_BYXC - broadcast_channels(mean_C)) * broadcast_channels(scale_C)
        shifted_BYXC = scaled_BYXC + broadcast_channels(self.bias).astype(jnp.float32)
        return shifted_BYXC.astype(x_BYXC.dtype)

    def _update_statistics(self, mean_C: Array, variance_C: Array, count: int) -> None:
        """Update the running statistics after a batch with `count` values per channel."""
        if self.is_unbiased and count > 1:
            variance_C = variance_C * (count / (count - 1))
        for running, batch_C in ((self.mean, mean_C), (self.variance, variance_C)):
            update_C = self.momentum * jax.lax.stop_gradient(batch_C)
            running[...] = (1.0 - self.momentum) * running[...] + update_C


class Convolution(nnx.Module):
    """A convolution without a bias, padded by half a kernel; initialized as He et al. 2015."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> None:
        shape, std = (size, size, inputs, outputs), (2 / (outputs * size**2)) ** 0.5
        self.kernel = init_weight(rngs, shape, KERNEL_AXES, std)
        self.size, self.stride = size, stride

    def __call__(self, x_BYXI: Array) -> Array:
        """Return the convolved x, in the dtype of the kernel."""
        kernel_YXIO = self.kernel[...]
        return convolve(x_BYXI.astype(kernel_YXIO.dtype), kernel_YXIO, self.stride, self.size // 2)


class ConvNorm(nnx.Module):
    """A convolution followed by batch normalization."""

    def __init__(
        self, config: spec.ResNet, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs
    ) -> None:
        self.convolution = Convolution(inputs, outputs, size, stride, rngs)
        self.norm = BatchNorm(config, outputs)

    def __call__(self, x_BYXC: Array) -> Array:
        """Convolve x and normalize the result."""
        return self.norm(self.convolution(x_BYXC))


class ResidualBlock(nnx.Module):
    """Two or three convolutions and a shortcut around them.

    The shortcut is the identity, or a 1 × 1 convolution if the block changes the shape.
    """

    def __init__(
        self, config: spec.ResNet, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs
    ) -> None:
        make_layer, inner = partial(ConvNorm, config, rngs=rngs), outputs // 4
        if config.block == "basic":
            branch = [make_layer(inputs, outputs, 3, stride), make_layer(outputs, outputs, 3, 1)]
        else:
            branch = [make_layer(inputs, inner, 1, 1), make_layer(inner, inner, 3, stride)]
            branch.append(make_layer(inner, outputs, 1, 1))
        self.branch = nnx.List(branch)
        changes_shape = inputs != outputs or stride != 1
        self.shortcut = make_layer(inputs, outputs, 1, stride) if changes_shape else None

    def __call__(self, x_BYXC: Array) -> Array:
        """Apply the block."""
        shortcut_BYXC = x_BYXC if self.shortcut is None else self.shortcut(x_BYXC)
        for i, layer in enumerate(self.branch):
            x_BYXC = layer(jax.nn.relu(x_BYXC) if i else x_BYXC)
        return constrain(jax.nn.relu(x_BYXC + shortcut_BYXC), "batch", None, None, "embed")


class ResNet(ImageClassifier):
    """A residual network (He et al. 2016).

    In a bottleneck the 3 × 3 convolution has the stride, as in "v1.5" of other implementations.
    """

    def __init__(
        self, config: spec.ResNet, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options, config)
        self.has_stem_pool = config.stem != "small"
        size, stride = (7, 2) if self.has_stem_pool else (3, 1)
        self.stem = ConvNorm(config, config.channels, config.stem_width, size, stride, rngs)
        stages, inputs = [], config.stem_width
        for stage, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
            blocks = [ResidualBlock(config, inputs, width, 2 if stage else 1, rngs)]
            blocks += [ResidualBlock(config, width, width, 1, rngs) for _ in range(depth - 1)]
            stages.append(nnx.List(blocks))
            inputs = width
        self.stages = nnx.List(stages)
        self.add_head(config, inputs, inputs**-0.5, rngs)
        self.apply = remat.remat_layer(ResidualBlock.__call__, options.remat, (), scanned=False)

    def pool(self, images_BYXC: Array) -> Array:
        """Return the mean over all pixels of the last stage's output."""
        x_BYXC = jax.nn.relu(self.stem(images_BYXC))
        if self.has_stem_pool:
            # Max pooling over windows of 3 × 3 with stride 2.
            padding = ((0, 0), (1, 1), (1, 1), (0, 0))
            x_BYXC = jax.lax.reduce_window(
                x_BYXC, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding
            )
        for stage in self.stages:
            for block in stage:
                x_BYXC = self.apply(block, x_BYXC)
        mean_BC = x_BYXC.astype(jnp.float32).mean((1, 2))
        return constrain(mean_BC, "batch", "embed").astype(x_BYXC.dtype)


class Patches(nnx.Module):
    """A patch embedding: a convolution whose stride is the `size` of its kernel."""

    def __init__(self, inputs: int, outputs: int, size: int, rngs: nnx.Rngs) -> None:
        self.kernel = init_weight(rngs, (size, size, inputs, outputs), KERNEL_AXES, INIT_STD)
        self.bias = init_bias((outputs,), ("embed",))
        self.size = size

    def __call__(self, x_BYXC: Array) -> Array:
        """Return the embedded patches [B, Y / size, X / size, C]."""
        kernel = self.kernel[...]
        patches_BYXC = convolve(x_BYXC.astype(kernel.dtype), kernel, self.size, 0)
        return patches_BYXC + broadcast_channels(self.bias)


class ConvNeXtBlock(nnx.Module):
    """A depthwise convolution, then an MLP at each pixel; the result is added to the input."""

    def __init__(self, config: spec.ConvNeXt, width: int, rngs: nnx.Rngs) -> None:
        self.kernel = init_weight(rngs, (7, 7, 1, width), KERNEL_AXES, INIT_STD)
        self.bias = init_bias((width,), ("embed",))
        self.norm = LayerNorm(width, CONVNEXT_EPS)
        self.up = init_weight(rngs, (width, 4 * width), ("embed", "hidden"), INIT_STD)
        self.up_bias = init_bias((4 * width,), ("hidden",))
        self.down = init_weight(rngs, (4 * width, width), ("hidden", "embed"), INIT_STD)
        self.down_bias = init_bias((width,), ("embed",))
        layer_scale = jnp.full(width, config.layer_scale, jnp.float32)
        self.layer_scale = nnx.Param(layer_scale, axes=("embed",))
        self.drop = Drop(0.0, config.drop_path > 0.0, rngs)

    def __call__(self, x_BYXC: Array, drop_rate: Array | None) -> Array:
        """Apply the block. The share `drop_rate` of the examples skips it."""
        spatial_BYXC = convolve(x_BYXC, self.kernel[...], 1, 3, groups=x_BYXC.shape[-1])
        spatial_BYXC = self.norm(spatial_BYXC + broadcast_channels(self.bias))
        up_BYXF = spatial_BYXC @ self.up[...] + broadcast_channels(self.up_bias)
        up_BYXF = checkpoint_name(up_BYXF, "up")
        hidden_BYXF = constrain(gelu(up_BYXF), "batch", None, None, "hidden")
        down_BYXC = hidden_BYXF @ self.down[...] + broadcast_channels(self.down_bias)
        scaled_BYXC = down_BYXC * broadcast_channels(self.layer_scale)
        return constrain(x_BYXC + self.drop(scaled_BYXC, drop_rate), "batch", None, None, "embed")


class Stage(nnx.Module):
    """Blocks of one width; unless `inputs` is None, a layer before them halves the image."""

    def __init__(
        self, config: spec.ConvNeXt, inputs: int | None, width: int, depth: int, rngs: nnx.Rngs
    ) -> None:
        self.norm = None if inputs is None else LayerNorm(inputs, CONVNEXT_EPS)
        self.half = None if inputs is None else Patches(inputs, width, 2, rngs)
        self.blocks = nnx.List(ConvNeXtBlock(config, width, rngs) for _ in range(depth))


class ConvNeXt(ImageClassifier):
    """ConvNeXt. Liu et al. 2022."""

    def __init__(
        self, config: spec.ConvNeXt, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options, config)
        widths = config.widths
        self.patches = Patches(config.channels, widths[0], config.patch, rngs)
        self.patches_norm = LayerNorm(widths[0], CONVNEXT_EPS)
        self.stages = nnx.List(
            Stage(config, widths[i - 1] if i else None, width, depth, rngs)
            for i, (depth, width) in enumerate(zip(config.depths, widths, strict=True))
        )
        self.norm = LayerNorm(widths[-1], config.norm_eps)
        self.add_head(config, widths[-1], INIT_STD, rngs)
        self.apply = remat.remat_layer(
            ConvNeXtBlock.__call__, options.remat, ("up",), scanned=False
        )
        self.drop_rates = np.linspace(0.0, config.drop_path, sum(config.depths)).tolist()

    def pool(self, images_BYXC: Array) -> Array:
        """Return the normalized mean over all pixels of the last stage's output."""
        x_BYXC = self.patches_norm(self.patches(images_BYXC))
        rates = iter(self.drop_rates)
        for stage in self.stages:
            if stage.norm is not None and stage.half is not None:
                x_BYXC = stage.half(stage.norm(x_BYXC))
            for block in stage.blocks:
                rate = next(rates)
                drop_rate = jnp.asarray(rate, jnp.float32) if rate else None
                x_BYXC = self.apply(block, x_BYXC, drop_rate)
        return self.norm(constrain(x_BYXC.mean((1, 2)), "batch", "embed"))


# --- the vision transformer -----------------------------------------------------------------------


class ViT(BlockStack, ImageClassifier):
    """A vision transformer. Dosovitskiy et al. 2021; mean pooling as in Beyer et al. 2022."""

    def __init__(
        self, config: spec.ViT, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options, config)
        side, width, has_cls = config.patch, config.width, config.pool == "cls"
        kernel_shape = (side, side, config.channels, width)
        positions_shape = (config.patch_count + has_cls, width)
        self.patches = init_weight(rngs, kernel_shape, KERNEL_AXES, INIT_STD)
        self.patches_bias = init_bias((width,), ("embed",))
        self.cls = init_weight(rngs, (width,), ("embed",), INIT_STD) if has_cls else None
        self.positions = init_weight(rngs, positions_shape, (None, "embed"), INIT_STD)
        self.add_blocks(config, implementations.full_attention(options.attention), rngs, options)
        self.norm = LayerNorm(width, config.norm_eps)
        self.add_head(config, width, INIT_STD, rngs)
        self.drop = Drop(config.dropout, False, rngs)

    def pool(self, images_BYXC: Array) -> Array:
        """Return the output at the class token, or the mean over the patches."""
        x_BLD = self.run_blocks(self.drop(self._embed_patches(images_BYXC)))
        x_BLD = gather_sequence(self.norm(x_BLD))
        # Without this constraint a head split along D would gather the gradients of the whole
        # batch's logits.
        return constrain(x_BLD.mean(1) if self.cls is None else x_BLD[:, 0], "batch", "embed")

    def _embed_patches(self, images_BYXC: Array) -> Array:
        """Return the class token, if any, and the embedded patches, with positions added."""
        kernel_PPCD = self.patches[...]
        side, _, channels, width = kernel_PPCD.shape
        batch, height, breadth, _ = images_BYXC.shape
        tiled_shape = batch, height // side, side, breadth // side, side, channels
        tiles = images_BYXC.astype(kernel_PPCD.dtype).reshape(tiled_shape)
        # I counts the numbers of a patch.
        patches_BLI = tiles.swapaxes(2, 3).reshape(batch, -1, side * side * channels)
        x_BLD = apply_kernel(patches_BLI, kernel_PPCD.reshape(-1, width), bias=self.patches_bias)
        if self.cls is not None:
            cls_B1D = jnp.broadcast_to(self.cls[...][None, None, :], (batch, 1, width))
            x_BLD = jnp.concatenate([cls_B1D, x_BLD], axis=1)
        positions_LD = constrain(self.positions[...], None, "embed")
        # The sequence is gathered before it is split: a direct split would fetch the class token
        # and patches from other devices.
        return split_sequence(gather_sequence(x_BLD + positions_LD[None]))
