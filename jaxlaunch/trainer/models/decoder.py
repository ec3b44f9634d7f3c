"""A decoder-only transformer: RMSNorm, RoPE, grouped-query attention and a gated MLP.

The defaults are Llama's. Options cover the Mistral, Qwen, Gemma, OLMo and Mixtral families. Layers
of one kind are stacked, so that a scan compiles only one of them. A model whose layers alternate
between windows and full attention scans over one period of the pattern.

Touvron et al. 2023 (LLaMA 2); Shazeer 2020 (SwiGLU, GeGLU); Ainslie et al. 2023 (grouped queries);
Beltagy et al. 2020 (windows); Gemma Team 2024 and 2025 (caps, norms before and after each branch,
two RoPE bases); OLMo Team 2024 (norms after each branch).

B batch, L length, D model, H query heads, G key and value heads, K head size, F hidden units, V
vocabulary, M layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import padding
from jaxlaunch.trainer.attention.implementations import (
    ATTENTION_OUTPUT,
    Attention,
    Keys,
    as_visible,
    causal_attention,
)
from jaxlaunch.trainer.models.experts import Experts, Mixture, RoutingTotals
from jaxlaunch.trainer.models.language_model import Features, LanguageModel
from jaxlaunch.trainer.models.layers import (
    ACTIVATIONS,
    DEFAULT_OPTIONS,
    ModelOptions,
    RMSNorm,
    apply_kernel,
    apply_rope,
    gated_activation,
    gather_sequence,
    init_bias,
    init_weight,
    run_stack,
    slice_stack,
    split_sequence,
)
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import Axes, constrain

# Names of activations that remat may keep.
REMAT_NAMES = ("query", "key", "value", ATTENTION_OUTPUT, "gate", "up")


class LayerAttention(NamedTuple):
    """The parts of attention that differ between layers: the span and the rotary positions."""

    attend: Attention
    rope: Callable[..., Array]

    @classmethod
    def from_config(cls, config: spec.Decoder, span: str, attention: str) -> LayerAttention:
        """Return the attention of the layers with `span`, which is `window` or `full`."""
        window = config.window if span == "window" else None
        scale = (config.query_scalar or config.head_channels) ** -0.5
        theta, scaling = config.rope_theta, config.rope_scaling
        if span == "window" and config.rope_local_theta is not None:
            theta, scaling = config.rope_local_theta, None
        attend = causal_attention(attention, window=window, cap=config.score_cap, scale=scale)
        return cls(attend, partial(apply_rope, theta=theta, scaling=scaling))


class SelfAttention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs) -> None:
        width, size = config.width, config.head_channels
        queries, keys = (config.heads, size), (config.kv_head_count, size)
        query_axes, key_axes, std = ("heads", "head"), ("kv_heads", "head"), width**-0.5
        out_std = (2 * config.layers * config.heads * size) ** -0.5
        self.query = init_weight(rngs, (width, *queries), ("embed", *query_axes), std)
        self.key = init_weight(rngs, (width, *keys), ("embed", *key_axes), std)
        self.value = init_weight(rngs, (width, *keys), ("embed", *key_axes), std)
        self.out = init_weight(rngs, (*queries, width), (*query_axes, "embed"), out_std)
        has_bias = "qkv" in config.biases
        self.query_bias = init_bias(queries, query_axes) if has_bias else None
        self.key_bias = init_bias(keys, key_axes) if has_bias else None
        self.value_bias = init_bias(keys, key_axes) if has_bias else None
        self.out_bias = init_bias((width,), ("embed",)) if "out" in config.biases else None
        self.query_norm = _head_norm(config, queries, query_axes)
        self.key_norm = _head_norm(config, keys, key_axes)

    def __call__(self, x_BLD: Array, keys: Keys, variant: LayerAttention) -> Array:
        """Return the output of attention, [B, L, D]."""
        query_BLHK = apply_kernel(x_BLD, self.query[...], bias=self.query_bias)
        key_BLGK = apply_kernel(x_BLD, self.key[...], bias=self.key_bias)
        value_BLGK = apply_kernel(x_BLD, self.value[...], bias=self.value_bias)
        query_BLHK = variant.rope(_apply_norm(self.query_norm, query_BLHK))
        key_BLGK = checkpoint_name(variant.rope(_apply_norm(self.key_norm, key_BLGK)), "key")
        value_BLGK = checkpoint_name(value_BLGK, "value")
        query_BLHK = checkpoint_name(query_BLHK, "query")
        query_BLHK = constrain(query_BLHK, "batch", "length", "heads", "head")
        mixed_BLHK = variant.attend(query_BLHK, key_BLGK, value_BLGK, keys)
        mixed_BLHK = constrain(mixed_BLHK, "batch", "length", "heads", "head")
        return apply_kernel(mixed_BLHK, self.out[...], axes=2, bias=self.out_bias)


def _head_norm(config: spec.Decoder, shape: tuple[int, ...], axes: Axes) -> RMSNorm | None:
    """Return the norm of queries or keys: over each head by itself, or over all heads at once."""
    if config.qk_norm is None:
        return None
    if config.qk_norm == "head":
        shape, axes = shape[1:], axes[1:]
    return RMSNorm(shape, config.norm_eps, axes, from_one=config.norm_from_one)


class GatedMLP(nnx.Module):
    """(activation(x · gate) * (x · up)) · down."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.mlp_units
        down_std = (2 * config.layers * hidden) ** -0.5
        self.gate = init_weight(rngs, (width, hidden), ("embed", "hidden"), width**-0.5)
        self.up = init_weight(rngs, (width, hidden), ("embed", "hidden"), width**-0.5)
        self.down = init_weight(rngs, (hidden, width), ("hidden", "embed"), down_std)
        has_bias = "mlp" in config.biases
        self.gate_bias = init_bias((hidden,), ("hidden",)) if has_bias else None
        self.up_bias = init_bias((hidden,), ("hidden",)) if has_bias else None
        self.down_bias = init_bias((width,), ("embed",)) if has_bias else None
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x_BLD: Array) -> Array:
        """Return the output of the MLP, [B, L, D]."""
        gate_BLF = checkpoint_name(apply_kernel(x_BLD, self.gate[...], bias=self.gate_bias), "gate")
        up_BLF = checkpoint_name(apply_kernel(x_BLD, self.up[...], bias=self.up_bias), "up")
        hidden_BLF = gated_activation(self.activation, gate_BLF, up_BLF)
        hidden_BLF = constrain(hidden_BLF, "batch", "length", "hidden")
        return apply_kernel(hidden_BLF, self.down[...], bias=self.down_bias)


class Block(nnx.Module):
    """One layer: attention, then the MLP, each added to the residual stream.

    A branch has a norm before it, after it, or both.
    """

    def __init__(self, rngs: nnx.Rngs, config: spec.Decoder, *, is_sparse: bool = False) -> None:
        def make_norm(position: str) -> RMSNorm | None:
            if config.norms not in (position, "both"):
                return None
            return RMSNorm(config.width, config.norm_eps, from_one=config.norm_from_one)

        self.attention_norm, self.attention_out_norm = make_norm("before"), make_norm("after")
        self.attention = SelfAttention(config, rngs)
        self.mlp_norm, self.mlp_out_norm = make_norm("before"), make_norm("after")
        self.mlp: Any = Experts(config, rngs) if is_sparse else GatedMLP(config, rngs)

    def __call__(self, carry: Any, keys: Keys, variant: LayerAttention, *routing: Array) -> Any:
        """Apply the layer to the residual stream.

        In a decoder without experts the carry is the stream x_BLD, and `routing` is empty. With
        experts the carry is a pair of the stream and the RoutingTotals so far. `routing` is then
        `real_BL`, 0 for padding, and `layer_M`, one-hot at this layer's index among those with
        experts.
        """
        totals: Any
        x_BLD, totals = carry if routing else (carry, None)
        input_BLD = gather_sequence(_apply_norm(self.attention_norm, x_BLD))
        mixed_BLD = split_sequence(self.attention(input_BLD, keys, variant))
        x_BLD = x_BLD + _apply_norm(self.attention_out_norm, mixed_BLD)
        input_BLD = gather_sequence(_apply_norm(self.mlp_norm, x_BLD))
        if isinstance(self.mlp, Experts):
            real_BL, layer_M = routing
            mlp_BLD, counts = self.mlp(input_BLD, real_BL)
            totals = totals.add_layer(counts, layer_M)
        else:
            mlp_BLD = self.mlp(input_BLD)
        x_BLD = split_sequence(x_BLD + _apply_norm(self.mlp_out_norm, split_sequence(mlp_BLD)))
        return (x_BLD, totals) if routing else x_BLD


def _apply_norm(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class Decoder(LanguageModel):
    """The decoder. Blocks with and without experts are two stacks [layers, ...]."""

    def __init__(
        self, config: spec.Decoder, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options)
        width, vocab, std = config.width, config.vocab, config.width**-0.5
        self.embedding = init_weight(rngs, (vocab, width), ("vocab", "embed"), std)
        make_blocks = nnx.vmap(partial(Block, config=config, is_sparse=bool(config.experts)))
        stacks = config.layer_stacks
        self.blocks = make_blocks(rngs.split(len(stacks["blocks"])))
        if dense_layers := stacks.get("dense_blocks"):
            make_dense_blocks = nnx.vmap(partial(Block, config=config))
            self.dense_blocks = make_dense_blocks(rngs.split(len(dense_layers)))
        self.norm = RMSNorm(width, config.norm_eps, from_one=config.norm_from_one)
        head_shape, head_axes = (width, vocab), ("embed", "vocab")
        self.head = None if config.tied else init_weight(rngs, head_shape, head_axes, std)
        self.scanned, self.logit_cap = config.scan, config.logit_cap
        self.embedding_factor = width**0.5 if config.embedding_scale else None
        self.mixture = None if config.experts is None else Mixture.from_config(config)
        self.layer_ranges = tuple(_layer_ranges(config))
        self.apply = _layer_functions(config, options, in_scan=config.scan)
        # XLA removes a scan of one iteration, so a single layer needs remat as outside of a scan.
        self.apply_single = _layer_functions(config, options, in_scan=False)

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return the normalized residual stream x_BLD after the last layer."""
        return self.read(tokens_BL, keys).x_BLD

    def read(self, tokens_BL: Array, keys: Keys = None, real_BL: Array | None = None) -> Features:
        """Return the features and the routing, which counts the tokens where `real_BL` is true."""
        x_BLD = self.embed_inputs(tokens_BL)
        if self.mixture is None:
            apply = self._range_functions(self.layer_ranges[0])
            x_BLD = run_stack(apply, self.blocks, x_BLD, keys, scanned=self.scanned)
            return Features(gather_sequence(self.norm(x_BLD)))
        if real_BL is None:
            real_BL = padding.real_tokens({"tokens": tokens_BL, **as_visible(keys).to_keys()})
        real_BL = real_BL.astype(jnp.float32)
        carry: Any = x_BLD, RoutingTotals.zeros(self.mixture)
        for layers in self.layer_ranges:
            apply = self._range_functions(layers)
            blocks = slice_stack(getattr(self, layers.stack), layers.start, layers.stop)
            # Row n is one-hot at the index of the nth layer of the range. Layers without experts
            # ignore it.
            count = layers.stop - layers.start
            one_hot_NM = jnp.eye(count, self.mixture.layers, dtype=jnp.float32)
            layer_NM = jnp.roll(one_hot_NM, layers.start, axis=1)
            carry = run_stack(
                apply, blocks, carry, keys, real_BL, per_layer=(layer_NM,), scanned=self.scanned
            )
        x_BLD, totals = carry
        routing = totals.sum_parts(real_BL.sum(), self.mixture)
        return Features(gather_sequence(self.norm(x_BLD)), routing)

    def embed_inputs(self, tokens_BL: Array, positions_BL: Array | None = None) -> Array:
        """Return the input x_BLD of the first layer. Positions are only added in attention."""
        x_BLD = self.embed_tokens(tokens_BL)
        if self.embedding_factor is not None:
            x_BLD = x_BLD * jnp.asarray(self.embedding_factor, x_BLD.dtype)
        return split_sequence(gather_sequence(x_BLD))

    def _range_functions(self, layers: LayerRange) -> tuple[Callable[..., Any], ...]:
        """Return the functions of the attention pattern, rotated to the first layer of a range."""
        apply = self.apply if layers.stop - layers.start > 1 else self.apply_single
        first = layers.first_layer % len(apply)
        return apply[first:] + apply[:first]


class LayerRange(NamedTuple):
    """Consecutive layers that are in one stack.

    Attributes:
        stack: Attribute of the model that holds the stack.
        start: Index of the first layer in the stack.
        stop: Index after the last layer in the stack.
        first_layer: Index of the first layer in the model.
    """

    stack: str
    start: int
    stop: int
    first_layer: int


def _layer_ranges(config: spec.Decoder) -> list[LayerRange]:
    stack_by_layer = {
        layer: (stack, index)
        for stack, layers in config.layer_stacks.items()
        for index, layer in enumerate(layers)
    }
    ranges: list[LayerRange] = []
    for layer in range(config.layers):
        stack, index = stack_by_layer[layer]
        if ranges and ranges[-1].stack == stack:
            ranges[-1] = ranges[-1]._replace(stop=index + 1)
        else:
            ranges.append(LayerRange(stack, index, index + 1, layer))
    return ranges


def _layer_functions(
    config: spec.Decoder, options: ModelOptions, *, in_scan: bool
) -> tuple[Callable[..., Any], ...]:
    """Return one function that applies a layer for each entry of the attention pattern."""

    def make_function(span: str) -> Callable[..., Any]:
        variant = LayerAttention.from_config(config, span, options.attention)

        def apply(block: Block, carry: Any, keys: Keys, *routing: Array) -> Any:
            return block(carry, keys, variant, *routing)

        # If the pattern has several spans, the body of the scan holds several layers, and XLA could
        # merge a layer's recomputation with its forward pass as it could outside of a scan.
        scanned = in_scan and len(config.attention_spans) == 1
        return remat.remat_layer(apply, options.remat, REMAT_NAMES, scanned=scanned)

    by_span = {span: make_function(span) for span in set(config.attention_spans)}
    return tuple(by_span[span] for span in config.attention_spans)
