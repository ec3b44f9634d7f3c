"""GPT-2: tokens -> logits; its layers are one scan.

B batch, L length, D model, V vocabulary. Radford et al. 2019.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from trainer import attention, remat, spec
from trainer.models.layers import LayerNorm, weight
from trainer.models.prenorm import NAMES, STD, Block
from trainer.sharding import constrain


class GPT2(nnx.Module):
    """tokens_BL -> logits_BLV. The blocks' parameters are stacked: [layers, ...]."""

    def __init__(
        self,
        config: spec.GPT2,
        rngs: nnx.Rngs,
        attention_name: str = "auto",
        keep: spec.Remat = "none",
        output: DTypeLike = jnp.float32,
    ) -> None:
        block = partial(Block, config=config, attend=attention.causal(attention_name))
        self.embedding = weight(rngs, (config.vocab, config.width), ("vocab", "embed"), STD)
        self.positions = weight(rngs, (config.rows, config.width), (None, "embed"), STD / 2)
        self.blocks = nnx.vmap(block)(rngs.split(config.layers))
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.apply = remat.layer(Block.__call__, keep, NAMES, scanned=True)
        self.output = output

    def __call__(self, tokens_BL: Array, mask_BL: Array | None = None) -> Array:
        """Logits_BLV in the output dtype; those of position l have seen the tokens 0..l whose mask is not 0."""
        # Looked up in whole rows: a table split along D would give a stream split along D and copied along B.
        table_VD = constrain(self.embedding[...], "vocab", "embed")
        positions_LD = constrain(self.positions[...], None, "embed")[: tokens_BL.shape[1]]
        x_BLD = jnp.take(table_VD, tokens_BL, axis=0) + positions_LD[None]
        x_BLD = constrain(x_BLD, "batch", "length", "embed")
        x_BLD = nnx.scan(self.apply, in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)(self.blocks, x_BLD, mask_BL)
        logits_BLV = jnp.matmul(self.norm(x_BLD), self.embedding[...].T, preferred_element_type=self.output)
        return constrain(logits_BLV, "batch", "length", "vocab")
