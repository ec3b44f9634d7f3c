"""GPT-2: tokens -> logits; a stack of equal layers.

B batch, L length, D model, V vocabulary. Radford et al. 2019.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.models import stack
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.models.layers import Drop, LayerNorm, split, weight, whole
from jaxlaunch.trainer.models.options import DEFAULTS, ModelOptions
from jaxlaunch.trainer.models.prenorm import NAMES, STD, Block, paths
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import constrain


class GPT2(LanguageModel):
    """tokens_BL -> logits_BLV. The blocks' parameters are stacked: [layers, ...]."""

    def __init__(self, config: spec.GPT2, rngs: nnx.Rngs, options: ModelOptions = DEFAULTS) -> None:
        super().__init__(options)
        block = partial(Block, config=config, attend=implementations.causal(options.attention))
        self.embedding = weight(rngs, (config.vocab, config.width), ("vocab", "embed"), STD)
        self.head = None
        self.positions = weight(rngs, (config.rows, config.width), (None, "embed"), STD / 2)
        self.blocks = nnx.vmap(block)(rngs.split(config.layers))
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.drop = Drop(config.dropout, False, rngs)
        self.paths = partial(paths, config)
        self.apply = remat.layer(Block.__call__, options.remat, NAMES, scanned=config.scan)
        self.scanned = config.scan

    def features(self, tokens_BL: Array, keys: implementations.Keys = None) -> Array:
        """The normalized stream x_BLD after the last layer, in the dtype of the weights."""
        places_BL = implementations.visible(keys).places_BL  # each example of a packed row begins at 0
        x_BLD = self.stream(tokens_BL, places_BL)
        x_BLD = stack.run(self.apply, self.blocks, x_BLD, keys, each=(self.paths(),), scanned=self.scanned)
        return whole(self.norm(x_BLD))

    def stream(self, tokens_BL: Array, places_BL: Array | None = None) -> Array:
        """The stream x_BLD before the first layer, of tokens at these places, by default 0 to L - 1."""
        positions_ND = constrain(self.positions[...], None, "embed")
        all_1LD = positions_ND[None, : tokens_BL.shape[1]]
        at_BLD = all_1LD if places_BL is None else jnp.take(positions_ND, places_BL, axis=0)
        return self.drop(split(whole(self.embedded(tokens_BL) + at_BLD)))
