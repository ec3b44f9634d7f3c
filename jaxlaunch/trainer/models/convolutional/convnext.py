"""ConvNeXt: images -> logits. Liu et al. 2022.

B batch, Y and X places of an image, C channels, F hidden, V classes.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.convolutional.layers import AXES, convolved
from jaxlaunch.trainer.models.layers import Drop, LayerNorm, bias, gelu, weight
from jaxlaunch.trainer.models.options import DEFAULTS, ModelOptions
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import constrain

STD = 0.02  # of initial weights
EPS = 1e-6  # of every norm but the last
NAMES = ("up",)  # what remat may keep by name


class Patches(nnx.Module):
    """Squares of `size` pixels, each made one pixel by one matrix."""

    def __init__(self, inputs: int, outputs: int, size: int, rngs: nnx.Rngs) -> None:
        self.kernel = weight(rngs, (size, size, inputs, outputs), AXES, STD)
        self.bias = bias((outputs,), ("embed",))
        self.size = size

    def __call__(self, x_BYXC: Array) -> Array:
        kernel = self.kernel[...]
        return convolved(x_BYXC.astype(kernel.dtype), kernel, self.size, 0) + self.bias[...][None, None, None, :]


class Block(nnx.Module):
    """A convolution of each channel by itself, then an MLP at each place, added to what comes in."""

    def __init__(self, config: spec.ConvNeXt, width: int, rngs: nnx.Rngs) -> None:
        self.kernel = weight(rngs, (7, 7, 1, width), AXES, STD)
        self.bias = bias((width,), ("embed",))
        self.norm = LayerNorm(width, EPS)
        self.up = weight(rngs, (width, 4 * width), ("embed", "hidden"), STD)
        self.up_bias = bias((4 * width,), ("hidden",))
        self.down = weight(rngs, (4 * width, width), ("hidden", "embed"), STD)
        self.down_bias = bias((width,), ("embed",))
        self.layer_scale = nnx.Param(jnp.full(width, config.layer_scale, jnp.float32), axes=("embed",))
        self.drop = Drop(0.0, config.drop_path > 0.0, rngs)

    def __call__(self, x_BYXC: Array, path: Array | None) -> Array:
        """`path`: the share of examples that skip this block."""
        alone_BYXC = convolved(x_BYXC, self.kernel[...], 1, 3, groups=x_BYXC.shape[-1])
        alone_BYXC = self.norm(alone_BYXC + self.bias[...][None, None, None, :])
        up_BYXF = checkpoint_name(alone_BYXC @ self.up[...] + self.up_bias[...][None, None, None, :], "up")
        hidden_BYXF = constrain(gelu(up_BYXF), "batch", None, None, "hidden")
        down_BYXC = hidden_BYXF @ self.down[...] + self.down_bias[...][None, None, None, :]
        scaled_BYXC = down_BYXC * self.layer_scale[...][None, None, None, :]
        return constrain(x_BYXC + self.drop(scaled_BYXC, path), "batch", None, None, "embed")


class Stage(nnx.Module):
    """Blocks of one width, behind what halves the image."""

    def __init__(self, config: spec.ConvNeXt, inputs: int | None, width: int, depth: int, rngs: nnx.Rngs) -> None:
        """`inputs`: channels of the stage before; None: this is the first."""
        self.norm = None if inputs is None else LayerNorm(inputs, EPS)
        self.half = None if inputs is None else Patches(inputs, width, 2, rngs)
        self.blocks = nnx.List(Block(config, width, rngs) for _ in range(depth))


class ConvNeXt(nnx.Module):
    """images_BYXC, floats -> logits_BV."""

    def __init__(self, config: spec.ConvNeXt, rngs: nnx.Rngs, options: ModelOptions = DEFAULTS) -> None:
        widths = config.widths
        self.patches = Patches(config.channels, widths[0], config.patch, rngs)
        self.patches_norm = LayerNorm(widths[0], EPS)
        made = partial(Stage, config, rngs=rngs)
        self.stages = nnx.List(
            made(widths[at - 1] if at else None, width, depth)
            for at, (depth, width) in enumerate(zip(config.depths, widths, strict=True))
        )
        self.norm = LayerNorm(widths[-1], config.norm_eps)
        self.head = weight(rngs, (widths[-1], config.classes), ("embed", "classes"), STD)
        self.head_bias = bias((config.classes,), ("classes",))
        self.apply = remat.layer(Block.__call__, options.remat, NAMES, scanned=False)
        self.paths = np.linspace(0.0, config.drop_path, sum(config.depths)).tolist()
        self.pixels = None if config.pixel_mean is None else (tuple(config.pixel_mean), tuple(config.pixel_std or ()))
        self.output, self.loss = options.output, options.loss
        self.deterministic = False  # nnx's name for evaluation

    def __call__(self, images_BYXC: Array) -> Array:
        """Logits_BV in the output dtype; images of one channel may lack the axis C."""
        x_BYXC = self.patches_norm(self.patches(images_BYXC if images_BYXC.ndim == 4 else images_BYXC[..., None]))
        paths = iter(self.paths)
        for stage in self.stages:
            if stage.norm is not None and stage.half is not None:
                x_BYXC = stage.half(stage.norm(x_BYXC))
            for block in stage.blocks:
                path = next(paths)
                x_BYXC = self.apply(block, x_BYXC, jnp.asarray(path, jnp.float32) if path else None)
        pooled_BC = self.norm(constrain(x_BYXC.mean((1, 2)), "batch", "embed"))
        logits_BV = jnp.matmul(pooled_BC, self.head[...], preferred_element_type=self.output)
        return logits_BV + self.head_bias[...].astype(self.output)[None, :]
