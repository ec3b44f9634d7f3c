"""GPT-2, and the pre-norm transformer block that it shares with ViT: attention, then an MLP.

Vaswani et al. 2017; Radford et al. 2019; Xiong et al. 2020 (norms before the branches).

B batch, L length, D model, H heads, K head size, F hidden units, N positions, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.attention.implementations import ATTENTION_OUTPUT, Attention, Keys
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.models.layers import (
    ACTIVATIONS,
    DEFAULT_OPTIONS,
    Drop,
    LayerNorm,
    ModelOptions,
    apply_kernel,
    gather_sequence,
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
# Standard deviation of initial weights. Where a branch is added to the residual stream it is scaled
# down by depth. Radford et al. 2019, section 2.3.
INIT_STD = 0.02


class SelfAttention(nnx.Module):
    """Self-attention that computes queries, keys and values in one product."""

    def __init__(self, config: spec.ViT | spec.GPT2, attend: Attention, rngs: nnx.Rngs) -> None:
        width, heads, size = config.width, config.heads, config.width // config.heads
        axes = ("heads", "head")
        self.qkv = init_weight(rngs, (width, 3, heads, size), ("embed", None, *axes), INIT_STD)
        self.qkv_bias = init_bias((3, heads, size), (None, *axes))
        out_std = INIT_STD * (2 * config.layers) ** -0.5
        self.out = init_weight(rngs, (heads, size, width), (*axes, "embed"), out_std)
        self.out_bias = init_bias((width,), ("embed",))
        self.attend = attend

    def __call__(self, x_BLD: Array, keys: Keys) -> Array:
        """Return the output of attention, [B, L, D]."""
        qkv_BL3HK = apply_kernel(x_BLD, self.qkv[...], bias=self.qkv_bias)
        qkv_BL3HK = constrain(qkv_BL3HK, "batch", "length", None, "heads", "head")
        parts = jnp.split(checkpoint_name(qkv_BL3HK, "qkv"), 3, axis=2)
        query_BLHK, key_BLHK, value_BLHK = (part[:, :, 0] for part in parts)
        mixed_BLHK = self.attend(query_BLHK, key_BLHK, value_BLHK, keys)
        mixed_BLHK = constrain(mixed_BLHK, "batch", "length", "heads", "head")
        return apply_kernel(mixed_BLHK, self.out[...], axes=2, bias=self.out_bias)


class MLP(nnx.Module):
    """gelu(x · up + bias) · down + bias. GPT-2 approximates the GELU with a tanh."""

    def __init__(self, config: spec.ViT | spec.GPT2, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.mlp_units
        self.up = init_weight(rngs, (width, hidden), ("embed", "hidden"), INIT_STD)
        self.up_bias = init_bias((hidden,), ("hidden",))
        down_std = INIT_STD * (2 * config.layers) ** -0.5
        self.down = init_weight(rngs, (hidden, width), ("hidden", "embed"), down_std)
        self.down_bias = init_bias((width,), ("embed",))
        self.gelu = ACTIVATIONS["gelu_tanh" if isinstance(config, spec.GPT2) else "gelu"]

    def __call__(self, x_BLD: Array) -> Array:
        """Return the output of the MLP, [B, L, D]."""
        up_BLF = checkpoint_name(apply_kernel(x_BLD, self.up[...], bias=self.up_bias), "up")
        hidden_BLF = recompute_in_backward(self.gelu)(up_BLF)
        hidden_BLF = constrain(hidden_BLF, "batch", "length", "hidden")
        return apply_kernel(hidden_BLF, self.down[...], bias=self.down_bias)


class Block(nnx.Module):
    """One layer: attention, then the MLP, each added to the residual stream x_BLD."""

    def __init__(self, rngs: nnx.Rngs, config: spec.ViT | spec.GPT2, attend: Attention) -> None:
        self.attention_norm = LayerNorm(config.width, config.norm_eps)
        self.attention = SelfAttention(config, attend, rngs)
        self.mlp_norm = LayerNorm(config.width, config.norm_eps)
        self.mlp = MLP(config, rngs)
        self.drop = Drop(config.dropout, config.drop_path > 0.0, rngs)

    def __call__(self, x_BLD: Array, keys: Keys, drop_rate: Array | None) -> Array:
        """Apply the layer. Each branch is skipped for the share `drop_rate` of the examples."""
        mixed_BLD = self.attention(gather_sequence(self.attention_norm(x_BLD)), keys)
        x_BLD = x_BLD + self.drop(split_sequence(mixed_BLD), drop_rate)
        mlp_BLD = self.mlp(gather_sequence(self.mlp_norm(x_BLD)))
        return split_sequence(x_BLD + self.drop(split_sequence(mlp_BLD), drop_rate))


class BlockStack:
    """Mixin of a model with blocks, whose parameters are stacked: [layers, ...]."""

    def add_blocks(
        self, config: spec.ViT | spec.GPT2, attend: Attention, rngs: nnx.Rngs, options: ModelOptions
    ) -> None:
        """Create the blocks."""
        block = partial(Block, config=config, attend=attend)
        self.blocks: nnx.Module = nnx.vmap(block)(rngs.split(config.layers))
        self.depth, self.drop_path, self.scanned = config.layers, config.drop_path, config.scan
        self.apply = remat.remat_layer(
            Block.__call__, options.remat, REMAT_NAMES, scanned=config.scan
        )

    def run_blocks(self, x_BLD: Array, keys: Keys = None) -> Array:
        """Apply the blocks. The drop rate grows linearly with depth, as in Huang et al. 2016."""
        # The rates must be created inside the trace: an array from outside would be another
        # argument of the compiled step.
        drop_rates = jnp.linspace(0.0, self.drop_path, self.depth, dtype=jnp.float32)
        per_layer = (drop_rates if self.drop_path else None,)
        return run_stack(
            self.apply, self.blocks, x_BLD, keys, per_layer=per_layer, scanned=self.scanned
        )


class GPT2(BlockStack, LanguageModel):
    """GPT-2, with learned positions and the embedding as its head."""

    def __init__(
        self, config: spec.GPT2, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options)
        width, attend = config.width, implementations.causal_attention(options.attention)
        self.embedding = init_weight(rngs, (config.vocab, width), ("vocab", "embed"), INIT_STD)
        self.head = None
        positions_shape = (config.position_rows, width)
        self.positions = init_weight(rngs, positions_shape, (None, "embed"), INIT_STD / 2)
        self.add_blocks(config, attend, rngs, options)
        self.norm = LayerNorm(width, config.norm_eps)
        self.drop = Drop(config.dropout, False, rngs)

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return the normalized residual stream x_BLD after the last layer."""
        # Each example of a packed row begins at position 0.
        positions_BL = implementations.as_visible(keys).positions_BL
        x_BLD = self.run_blocks(self.embed_inputs(tokens_BL, positions_BL), keys)
        return gather_sequence(self.norm(x_BLD))

    def embed_inputs(self, tokens_BL: Array, positions_BL: Array | None = None) -> Array:
        """Return the input x_BLD of the first layer: embedded tokens plus their positions."""
        positions_ND = constrain(self.positions[...], None, "embed")
        if positions_BL is None:
            position_BLD = positions_ND[None, : tokens_BL.shape[1]]
        else:
            position_BLD = jnp.take(positions_ND, positions_BL, axis=0)
        x_BLD = self.embed_tokens(tokens_BL) + position_BLD
        return self.drop(split_sequence(gather_sequence(x_BLD)))
