"""A residual network: images -> logits. He et al. 2016, with the stride in the 3 × 3 of a bottleneck (v1.5).

B batch, Y and X places of an image, C channels, V classes.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.convolutional.layers import BatchNorm, Convolution
from jaxlaunch.trainer.models.layers import bias, weight
from jaxlaunch.trainer.models.options import DEFAULTS, ModelOptions
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import constrain


class Normalized(nnx.Module):
    """A convolution and its batch normalization."""

    def __init__(self, config: spec.ResNet, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> None:
        self.convolution = Convolution(inputs, outputs, size, stride, rngs)
        self.norm = BatchNorm(outputs, config.norm_eps, config.momentum, config.running_variance)

    def __call__(self, x_BYXC: Array) -> Array:
        return self.norm(self.convolution(x_BYXC))


class Block(nnx.Module):
    """Convolutions beside a shortcut, which has one of its own where the block changes the shape."""

    def __init__(self, config: spec.ResNet, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        made, inner = partial(Normalized, config, rngs=rngs), outputs // 4
        if config.block == "basic":
            branch = [made(inputs, outputs, 3, stride), made(outputs, outputs, 3, 1)]
        else:
            branch = [made(inputs, inner, 1, 1), made(inner, inner, 3, stride), made(inner, outputs, 1, 1)]
        self.branch = nnx.List(branch)
        self.shortcut = made(inputs, outputs, 1, stride) if inputs != outputs or stride != 1 else None

    def __call__(self, x_BYXC: Array) -> Array:
        beside_BYXC = x_BYXC if self.shortcut is None else self.shortcut(x_BYXC)
        for at, each in enumerate(self.branch):
            x_BYXC = each(jax.nn.relu(x_BYXC) if at else x_BYXC)
        return constrain(jax.nn.relu(x_BYXC + beside_BYXC), "batch", None, None, "embed")


class ResNet(nnx.Module):
    """images_BYXC, floats -> logits_BV."""

    def __init__(self, config: spec.ResNet, rngs: nnx.Rngs, options: ModelOptions = DEFAULTS) -> None:
        is_small = config.stem == "small"
        size, stride = (3, 1) if is_small else (7, 2)
        self.stem = Normalized(config, config.channels, config.stem_width, size, stride, rngs)
        widths = [config.stem_width, *config.widths]
        self.stages = nnx.List(
            nnx.List(
                Block(config, widths[stage] if at == 0 else width, width, 2 if stage and at == 0 else 1, rngs)
                for at in range(depth)
            )
            for stage, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True))
        )
        self.head = weight(rngs, (widths[-1], config.classes), ("embed", "classes"), std=widths[-1] ** -0.5)
        self.head_bias = bias((config.classes,), ("classes",))
        self.apply = remat.layer(Block.__call__, options.remat, (), scanned=False)
        self.pixels = None if config.pixel_mean is None else (tuple(config.pixel_mean), tuple(config.pixel_std or ()))
        self.is_pooled = not is_small
        self.output, self.loss = options.output, options.loss
        self.deterministic = False  # nnx's name for evaluation

    def __call__(self, images_BYXC: Array) -> Array:
        """Logits_BV in the output dtype; images of one channel may lack the axis C."""
        x_BYXC = jax.nn.relu(self.stem(images_BYXC if images_BYXC.ndim == 4 else images_BYXC[..., None]))
        if self.is_pooled:
            x_BYXC = _largest(x_BYXC)
        for stage in self.stages:
            for block in stage:
                x_BYXC = self.apply(block, x_BYXC)
        pooled_BC = constrain(x_BYXC.astype(jnp.float32).mean((1, 2)), "batch", "embed").astype(x_BYXC.dtype)
        logits_BV = jnp.matmul(pooled_BC, self.head[...], preferred_element_type=self.output)
        return logits_BV + self.head_bias[...].astype(self.output)[None, :]


def _largest(x_BYXC: Array) -> Array:
    """The largest of each 3 × 3 places, at every other place."""
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    found: Array = jax.lax.reduce_window(x_BYXC, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
    return found
