"""A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU; a stack of equal layers.

B batch, L length, D model, H query heads, G key and value heads, K head size, F hidden, V vocabulary.
Touvron et al. 2023 (LLaMA 2); Shazeer 2020 (SwiGLU); Ainslie et al. 2023 (grouped queries).
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from trainer import spec
from trainer.attention import implementations
from trainer.models import stack
from trainer.models.language_model import LanguageModel
from trainer.models.layers import RMSNorm, product, rope, split, weight, whole
from trainer.models.options import DEFAULTS, ModelOptions
from trainer.numerics import remat
from trainer.parallel.sharding import constrain

NAMES = ("query", "key", "value", "mixed", "gate", "up")  # what remat may keep by name


class SelfAttention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, config: spec.Decoder, attend: implementations.Attention, rngs: nnx.Rngs) -> None:
        width, heads = config.width, config.heads
        groups, size = config.groups, width // heads
        self.query = weight(rngs, (width, heads, size), ("embed", "heads", "head"), width**-0.5)
        self.key = weight(rngs, (width, groups, size), ("embed", "kv_heads", "head"), width**-0.5)
        self.value = weight(rngs, (width, groups, size), ("embed", "kv_heads", "head"), width**-0.5)
        self.out = weight(rngs, (heads, size, width), ("heads", "head", "embed"), (2 * config.layers * width) ** -0.5)
        self.rope = partial(rope, theta=config.rope_theta, scaling=config.rope_scaling)
        self.attend = attend

    def __call__(self, x_BLD: Array, keys: implementations.Keys) -> Array:
        query_BLHK = checkpoint_name(self.rope(product(x_BLD, self.query[...])), "query")
        key_BLGK = checkpoint_name(self.rope(product(x_BLD, self.key[...])), "key")
        value_BLGK = checkpoint_name(product(x_BLD, self.value[...]), "value")
        query_BLHK = constrain(query_BLHK, "batch", "length", "heads", "head")
        mixed_BLHK = self.attend(query_BLHK, key_BLGK, value_BLGK, keys)
        mixed_BLHK = checkpoint_name(constrain(mixed_BLHK, "batch", "length", "heads", "head"), "mixed")
        return product(mixed_BLHK, self.out[...], axes=2)


class SwiGLU(nnx.Module):
    """(silu(x · gate) * (x · up)) · down."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.units
        self.gate = weight(rngs, (width, hidden), ("embed", "hidden"), width**-0.5)
        self.up = weight(rngs, (width, hidden), ("embed", "hidden"), width**-0.5)
        self.down = weight(rngs, (hidden, width), ("hidden", "embed"), (2 * config.layers * hidden) ** -0.5)

    def __call__(self, x_BLD: Array) -> Array:
        gate_BLF = checkpoint_name(product(x_BLD, self.gate[...]), "gate")
        up_BLF = checkpoint_name(product(x_BLD, self.up[...]), "up")
        hidden_BLF = constrain(jax.nn.silu(gate_BLF) * up_BLF, "batch", "length", "hidden")
        return product(hidden_BLF, self.down[...])


class Block(nnx.Module):
    """One layer: attention, then SwiGLU, each on the normalized stream and added to it."""

    def __init__(self, rngs: nnx.Rngs, config: spec.Decoder, attend: implementations.Attention) -> None:
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = SelfAttention(config, attend, rngs)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x_BLD: Array, keys: implementations.Keys) -> Array:
        x_BLD = x_BLD + split(self.attention(whole(self.attention_norm(x_BLD)), keys))
        x_BLD = x_BLD + split(self.mlp(whole(self.mlp_norm(x_BLD))))
        return split(x_BLD)


class Decoder(LanguageModel):
    """tokens_BL -> logits_BLV. The blocks' parameters are stacked: [layers, ...]."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs, options: ModelOptions = DEFAULTS) -> None:
        super().__init__(options)
        block = partial(Block, config=config, attend=implementations.causal(options.attention))
        self.embedding = weight(rngs, (config.vocab, config.width), ("vocab", "embed"), config.width**-0.5)
        self.blocks = nnx.vmap(block)(rngs.split(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        head = partial(weight, rngs, (config.width, config.vocab), ("embed", "vocab"), config.width**-0.5)
        self.head = None if config.tied else head()
        self.apply = remat.layer(Block.__call__, options.remat, NAMES, scanned=config.scan)
        self.scanned = config.scan

    def features(self, tokens_BL: Array, keys: implementations.Keys = None) -> Array:
        """The normalized stream x_BLD after the last layer, in the dtype of the weights."""
        x_BLD = split(whole(self.embedded(tokens_BL)))
        x_BLD = stack.run(self.apply, self.blocks, x_BLD, keys, scanned=self.scanned)
        return whole(self.norm(x_BLD))
