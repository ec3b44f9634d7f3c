"""A vision transformer: images -> logits; a stack of equal layers.

B batch, Y and X places of an image, P side of a patch, C channels, L patches (and a class token), D model, V classes.
Dosovitskiy et al. 2021; mean pooling as in Beyer et al. 2022.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.models import stack
from jaxlaunch.trainer.models.layers import Drop, LayerNorm, bias, product, split, weight, whole
from jaxlaunch.trainer.models.options import DEFAULTS, ModelOptions
from jaxlaunch.trainer.models.prenorm import NAMES, STD, Block, paths
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import constrain


class ViT(nnx.Module):
    """images_BYXC, floats -> logits_BV. The blocks' parameters are stacked: [layers, ...]."""

    def __init__(self, config: spec.ViT, rngs: nnx.Rngs, options: ModelOptions = DEFAULTS) -> None:
        side, width, has_class = config.patch, config.width, config.pool == "cls"
        block = partial(Block, config=config, attend=implementations.full(options.attention))
        self.patches = weight(rngs, (side, side, config.channels, width), (None, None, None, "embed"), STD)
        self.patches_bias = bias((width,), ("embed",))
        self.cls = weight(rngs, (width,), ("embed",), STD) if has_class else None
        self.positions = weight(rngs, (config.patches + has_class, width), (None, "embed"), STD)
        self.blocks = nnx.vmap(block)(rngs.split(config.layers))
        self.norm = LayerNorm(width, config.norm_eps)
        self.head = weight(rngs, (width, config.classes), ("embed", "classes"), STD)
        self.head_bias = bias((config.classes,), ("classes",))
        self.drop = Drop(config.dropout, False, rngs)
        self.paths = partial(paths, config)
        self.apply = remat.layer(Block.__call__, options.remat, NAMES, scanned=config.scan)
        self.pixels = None if config.pixel_mean is None else (tuple(config.pixel_mean), tuple(config.pixel_std or ()))
        self.scanned = config.scan
        self.output, self.loss = options.output, options.loss
        self.deterministic = False  # nnx's name for evaluation

    def __call__(self, images_BYXC: Array) -> Array:
        """Logits_BV in the output dtype; images of one channel may lack the axis C."""
        x_BLD = self._embedded(images_BYXC if images_BYXC.ndim == 4 else images_BYXC[..., None])
        x_BLD = stack.run(self.apply, self.blocks, self.drop(x_BLD), None, each=(self.paths(),), scanned=self.scanned)
        x_BLD = whole(self.norm(x_BLD))
        # Held to its rows, or a head split along D has the gradients of the whole batch's logits gathered to it.
        pooled_BD = constrain(x_BLD.mean(1) if self.cls is None else x_BLD[:, 0], "batch", "embed")
        logits_BV = jnp.matmul(pooled_BD, self.head[...], preferred_element_type=self.output)
        return logits_BV + self.head_bias[...].astype(self.output)[None, :]

    def _embedded(self, images_BYXC: Array) -> Array:
        """The patches, each a product with one matrix, behind the class token; with their positions."""
        kernel_PPCD = self.patches[...]
        side, _, channels, width = kernel_PPCD.shape
        batch, height, breadth, _ = images_BYXC.shape
        tiles = images_BYXC.astype(kernel_PPCD.dtype).reshape(
            batch, height // side, side, breadth // side, side, channels
        )
        flat_BLF = tiles.swapaxes(2, 3).reshape(batch, -1, side * side * channels)
        x_BLD = product(flat_BLF, kernel_PPCD.reshape(-1, width)) + self.patches_bias[...][None, None, :]
        if self.cls is not None:
            cls_B1D = jnp.broadcast_to(self.cls[...][None, None, :], (batch, 1, width))
            x_BLD = jnp.concatenate([cls_B1D, x_BLD], axis=1)
        positions_LD = constrain(self.positions[...], None, "embed")
        # Whole first: split at once, the class token and the patches would be fetched from where their rows are.
        return split(whole(x_BLD + positions_LD[None]))
