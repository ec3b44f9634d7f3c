"""GPT-2, and the block that it and ViT are stacks of: attention, then an MLP, each on the normalized stream.

B batch, L length, D model, H heads, K head size, F hidden, V vocabulary.
Vaswani et al. 2017; Radford et al. 2019; Xiong et al. 2020 (norm first).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.attention.implementations import ATTENTION_OUTPUT, Attention, Keys
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.models.layers import (
    DEFAULT_OPTIONS,
    Drop,
    LayerNorm,
    ModelOptions,
    apply_kernel,
    gather_sequence,
    gelu,
    init_bias,
    init_weight,
    recompute_in_backward,
    run_stack,
    split_sequence,
)
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import constrain

# Names of activations that remat may keep.
REMAT_NAMES = ("qkv", ATTENTION_OUTPUT, "up")
# Deviation of initial weights, scaled down by depth where they add to the stream. Radford et al.
# 2019, section 2.3.
INIT_STD = 0.02


class SelfAttention(nnx.Module):
    """Self-attention; queries, keys and values come out of one product."""

    def __init__(self, config: spec.ViT | spec.GPT2, attend: Attention, rngs: nnx.Rngs) -> None:
        width, heads, size = config.width, config.heads, config.width // config.heads
        self.qkv = init_weight(
            rngs, (width, 3, heads, size), ("embed", None, "heads", "head"), INIT_STD
        )
        self.qkv_bias = init_bias((3, heads, size), (None, "heads", "head"))
        self.out = init_weight(
            rngs,
            (heads, size, width),
            ("heads", "head", "embed"),
            INIT_STD * (2 * config.layers) ** -0.5,
        )
        self.out_bias = init_bias((width,), ("embed",))
        self.attend = attend

    def __call__(self, x_BLD: Array, keys: Keys) -> Array:
        qkv_BL3HK = apply_kernel(x_BLD, self.qkv[...]) + self.qkv_bias[...][None, None]
        qkv_BL3HK = checkpoint_name(
            constrain(qkv_BL3HK, "batch", "length", None, "heads", "head"), "qkv"
        )
        query_BLHK, key_BLHK, value_BLHK = (
            part[:, :, 0] for part in jnp.split(qkv_BL3HK, 3, axis=2)
        )
        mixed_BLHK = self.attend(query_BLHK, key_BLHK, value_BLHK, keys)
        mixed_BLHK = constrain(mixed_BLHK, "batch", "length", "heads", "head")
        return apply_kernel(mixed_BLHK, self.out[...], axes=2) + self.out_bias[...][None, None, :]


class MLP(nnx.Module):
    """gelu(x · up + bias) · down + bias. Hendrycks and Gimpel 2016, exact or in their approximation by tanh."""

    def __init__(self, config: spec.ViT | spec.GPT2, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.mlp_units
        self.up = init_weight(rngs, (width, hidden), ("embed", "hidden"), INIT_STD)
        self.up_bias = init_bias((hidden,), ("hidden",))
        self.down = init_weight(
            rngs, (hidden, width), ("hidden", "embed"), INIT_STD * (2 * config.layers) ** -0.5
        )
        self.down_bias = init_bias((width,), ("embed",))
        self.gelu = (
            partial(jax.nn.gelu, approximate=True) if isinstance(config, spec.GPT2) else gelu
        )

    def __call__(self, x_BLD: Array) -> Array:
        up_BLF = checkpoint_name(
            apply_kernel(x_BLD, self.up[...]) + self.up_bias[...][None, None, :], "up"
        )
        hidden_BLF = constrain(
            recompute_in_backward(self.gelu)(up_BLF), "batch", "length", "hidden"
        )
        return apply_kernel(hidden_BLF, self.down[...]) + self.down_bias[...][None, None, :]


class Block(nnx.Module):
    """One layer of the stack: x_BLD -> x_BLD."""

    def __init__(self, rngs: nnx.Rngs, config: spec.ViT | spec.GPT2, attend: Attention) -> None:
        self.attention_norm = LayerNorm(config.width, config.norm_eps)
        self.attention = SelfAttention(config, attend, rngs)
        self.mlp_norm = LayerNorm(config.width, config.norm_eps)
        self.mlp = MLP(config, rngs)
        self.drop = Drop(config.dropout, config.drop_path > 0.0, rngs)

    def __call__(self, x_BLD: Array, keys: Keys, path: Array | None) -> Array:
        """Apply the layer. The share `path` of the examples skips a branch of it."""
        mixed_BLD = self.attention(gather_sequence(self.attention_norm(x_BLD)), keys)
        x_BLD = x_BLD + self.drop(split_sequence(mixed_BLD), path)
        x_BLD = x_BLD + self.drop(
            split_sequence(self.mlp(gather_sequence(self.mlp_norm(x_BLD)))), path
        )
        return split_sequence(x_BLD)


def path_rates(config: spec.ViT | spec.GPT2) -> Array | None:
    """Return the share of examples that skip a branch, by layer: 0 to `drop_path`. Huang et al. 2016.

    Call it inside the trace: an array created earlier would be an argument that a compiled step
    does not have.
    """
    return (
        jnp.linspace(0.0, config.drop_path, config.layers, dtype=jnp.float32)
        if config.drop_path
        else None
    )


class GPT2(LanguageModel):
    """tokens_BL -> logits_BLV. The blocks' parameters are stacked: [layers, ...]."""

    def __init__(
        self, config: spec.GPT2, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options)
        block = partial(
            Block, config=config, attend=implementations.causal_attention(options.attention)
        )
        self.embedding = init_weight(
            rngs, (config.vocab, config.width), ("vocab", "embed"), INIT_STD
        )
        self.head = None
        self.positions = init_weight(
            rngs, (config.position_rows, config.width), (None, "embed"), INIT_STD / 2
        )
        self.blocks = nnx.vmap(block)(rngs.split(config.layers))
        self.norm = LayerNorm(config.width, config.norm_eps)
        self.drop = Drop(config.dropout, False, rngs)
        self.paths = partial(path_rates, config)
        self.apply = remat.remat_layer(
            Block.__call__, options.remat, REMAT_NAMES, scanned=config.scan
        )
        self.scanned = config.scan

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        # Each example of a packed row begins at 0.
        places_BL = implementations.as_visible(keys).places_BL
        x_BLD = self.embed_inputs(tokens_BL, places_BL)
        x_BLD = run_stack(
            self.apply, self.blocks, x_BLD, keys, per_layer=(self.paths(),), scanned=self.scanned
        )
        return gather_sequence(self.norm(x_BLD))

    def embed_inputs(self, tokens_BL: Array, places_BL: Array | None = None) -> Array:
        positions_ND = constrain(self.positions[...], None, "embed")
        all_1LD = positions_ND[None, : tokens_BL.shape[1]]
        at_BLD = all_1LD if places_BL is None else jnp.take(positions_ND, places_BL, axis=0)
        return self.drop(split_sequence(gather_sequence(self.embed_tokens(tokens_BL) + at_BLD)))
