"""A decoder, Llama's by default: RMSNorm, RoPE, grouped-query attention, a gated MLP.

B batch, L length, D model, H query heads, G key and value heads, K head size, F hidden, V
vocabulary. Touvron et al. 2023 (LLaMA 2); Shazeer 2020 (SwiGLU, GeGLU); Ainslie et al. 2023
(grouped queries); Beltagy et al. 2020 (windows); Gemma Team 2024 and 2025 (caps, norms on both
sides, two bases); OLMo Team 2024 (norms behind).
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
    """The attention mask and the rotary positions of a layer, which differ between layers."""

    attend: Attention
    rope: Callable[..., Array]

    @classmethod
    def from_config(cls, config: spec.Decoder, name: str, attention: str) -> LayerAttention:
        """Return those of the layers with a window, or of the `full` ones."""
        window = config.window if name == "window" else None
        scale = (config.query_scalar or config.head_channels) ** -0.5
        theta, scaling = config.rope_theta, config.rope_scaling
        if name == "window" and config.rope_local_theta is not None:
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

    def __call__(self, x_BLD: Array, keys: Keys, look: LayerAttention) -> Array:
        """Return the output of attention, x_BLD."""
        query_BLHK = apply_kernel(x_BLD, self.query[...], bias=self.query_bias)
        key_BLGK = apply_kernel(x_BLD, self.key[...], bias=self.key_bias)
        value_BLGK = apply_kernel(x_BLD, self.value[...], bias=self.value_bias)
        query_BLHK = look.rope(_apply_norm(self.query_norm, query_BLHK))
        key_BLGK = checkpoint_name(look.rope(_apply_norm(self.key_norm, key_BLGK)), "key")
        value_BLGK = checkpoint_name(value_BLGK, "value")
        query_BLHK = checkpoint_name(query_BLHK, "query")
        query_BLHK = constrain(query_BLHK, "batch", "length", "heads", "head")
        mixed_BLHK = look.attend(query_BLHK, key_BLGK, value_BLGK, keys)
        mixed_BLHK = constrain(mixed_BLHK, "batch", "length", "heads", "head")
        return apply_kernel(mixed_BLHK, self.out[...], axes=2, bias=self.out_bias)


def _head_norm(config: spec.Decoder, shape: tuple[int, ...], axes: Axes) -> RMSNorm | None:
    """Return the norm of queries or keys: one scale for each head, or all heads as a row."""
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
        """Return the output of the MLP, x_BLD."""
        gate_BLF = checkpoint_name(apply_kernel(x_BLD, self.gate[...], bias=self.gate_bias), "gate")
        up_BLF = checkpoint_name(apply_kernel(x_BLD, self.up[...], bias=self.up_bias), "up")
        hidden_BLF = gated_activation(self.activation, gate_BLF, up_BLF)
        hidden_BLF = constrain(hidden_BLF, "batch", "length", "hidden")
        return apply_kernel(hidden_BLF, self.down[...], bias=self.down_bias)


class Block(nnx.Module):
    """One layer: attention, then the MLP, each added to the stream, with norms around."""

    def __init__(self, rngs: nnx.Rngs, config: spec.Decoder, *, is_sparse: bool = False) -> None:
        def make_norm(position: str) -> RMSNorm | None:
            if config.norms not in (position, "both"):
                return None
            return RMSNorm(config.width, config.norm_eps, from_one=config.norm_from_one)

        self.attention_norm, self.attention_out_norm = make_norm("before"), make_norm("after")
        self.attention = SelfAttention(config, rngs)
        self.mlp_norm, self.mlp_out_norm = make_norm("before"), make_norm("after")
        self.mlp: Any = Experts(config, rngs) if is_sparse else GatedMLP(config, rngs)

    def __call__(self, carry: Any, keys: Keys, look: LayerAttention, *routing: Array) -> Any:
        """Apply the layer to the stream.

        In a decoder with experts the carry is the stream and its RoutingTotals, and `routing` says
        which tokens are real, and is 1 at the layer's place among those with experts.
        """
        totals: Any = None
        x_BLD, totals = carry if routing else (carry, None)
        input_BLD = gather_sequence(_apply_norm(self.attention_norm, x_BLD))
        mixed_BLD = split_sequence(self.attention(input_BLD, keys, look))
        x_BLD = x_BLD + _apply_norm(self.attention_out_norm, mixed_BLD)
        input_BLD = gather_sequence(_apply_norm(self.mlp_norm, x_BLD))
        if isinstance(self.mlp, Experts):
            real_BL, place_M = routing
            mlp_BLD, counts = self.mlp(input_BLD, real_BL)
            totals = totals.add_layer(counts, place_M)
        else:
            mlp_BLD = self.mlp(input_BLD)
        x_BLD = split_sequence(x_BLD + _apply_norm(self.mlp_out_norm, split_sequence(mlp_BLD)))
        return (x_BLD, totals) if routing else x_BLD


def _apply_norm(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class Decoder(LanguageModel):
    """tokens_BL -> logits_BLV. Blocks with and without experts are two stacks [layers, ...]."""

    def __init__(
        self, config: spec.Decoder, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options)
        width, vocab, std = config.width, config.vocab, config.width**-0.5
        self.embedding = init_weight(rngs, (vocab, width), ("vocab", "embed"), std)
        stacked = nnx.vmap(partial(Block, config=config, is_sparse=bool(config.experts)))
        layers = config.layer_stacks
        self.blocks = stacked(rngs.split(len(layers["blocks"])))
        if dense := layers.get("dense_blocks"):
            self.dense_blocks = nnx.vmap(partial(Block, config=config))(rngs.split(len(dense)))
        self.norm = RMSNorm(width, config.norm_eps, from_one=config.norm_from_one)
        head = None if config.tied else init_weight(rngs, (width, vocab), ("embed", "vocab"), std)
        self.head = head
        self.scanned, self.cap = config.scan, config.logit_cap
        self.factor = width**0.5 if config.embedding_scale else None
        self.mixture = None if config.experts is None else Mixture.from_config(config)
        self.spans = tuple(_layer_spans(config))
        self.apply = _functions_by_layer(config, options, looped=True)
        # The compiler removes a loop of one round.
        self.apply_alone = _functions_by_layer(config, options, looped=False)

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return the stream x_BLD."""
        return self.read(tokens_BL, keys).x_BLD

    def read(self, tokens_BL: Array, keys: Keys = None, real_BL: Array | None = None) -> Features:
        """Return the features, and the routing of the tokens in `real_BL`."""
        x_BLD = self.embed_inputs(tokens_BL)
        if self.mixture is None:
            apply = self._layer_functions(self.spans[0])
            x_BLD = run_stack(apply, self.blocks, x_BLD, keys, scanned=self.scanned)
            return Features(gather_sequence(self.norm(x_BLD)))
        if real_BL is None:
            real_BL = padding.real_tokens({"tokens": tokens_BL, **as_visible(keys).to_keys()})
        real_BL = real_BL.astype(jnp.float32)
        carry: Any = x_BLD, RoutingTotals.zeros(self.mixture)
        for span in self.spans:
            apply = self._layer_functions(span)
            layers = slice_stack(getattr(self, span.stack), span.start, span.stop)
            # A layer adds to the row of its place. Layers without experts ignore it.
            place_NM = jnp.eye(span.stop - span.start, self.mixture.layers, dtype=jnp.float32)
            places = (jnp.roll(place_NM, span.start, axis=1),)
            carry = run_stack(
                apply, layers, carry, keys, real_BL, per_layer=places, scanned=self.scanned
            )
        x_BLD, totals = carry
        routing = totals.sum_parts(real_BL.sum(), self.mixture)
        return Features(gather_sequence(self.norm(x_BLD)), routing)

    def embed_inputs(self, tokens_BL: Array, places_BL: Array | None = None) -> Array:
        """Return the stream before the first layer, which has no positions yet."""
        x_BLD = self.embed_tokens(tokens_BL)
        if self.factor is not None:
            x_BLD = x_BLD * jnp.asarray(self.factor, x_BLD.dtype)
        return split_sequence(gather_sequence(x_BLD))

    def _layer_functions(self, span: Span) -> tuple[Callable[..., Any], ...]:
        """Return the functions that apply the layers of a span, starting with its first layer."""
        apply = self.apply if span.stop - span.start > 1 else self.apply_alone
        first = span.layer % len(apply)
        return apply[first:] + apply[:first]


class Span(NamedTuple):
    """Consecutive equal layers: places of a stack, and the number of the first layer."""

    stack: str
    start: int
    stop: int
    layer: int


def _layer_spans(config: spec.Decoder) -> list[Span]:
    place_by_layer = {
        layer: (name, place)
        for name, layers in config.layer_stacks.items()
        for place, layer in enumerate(layers)
    }
    spans: list[Span] = []
    for layer in range(config.layers):
        name, place = place_by_layer[layer]
        if spans and spans[-1].stack == name:
            spans[-1] = spans[-1]._replace(stop=place + 1)
        else:
            spans.append(Span(name, place, place + 1, layer))
    return spans


def _functions_by_layer(
    config: spec.Decoder, options: ModelOptions, *, looped: bool
) -> tuple[Callable[..., Any], ...]:
    """Return the function that applies a layer for each place in the pattern of windows."""

    def make_function(name: str) -> Callable[..., Any]:
        look = LayerAttention.from_config(config, name, options.attention)

        def apply(block: Block, carry: Any, keys: Keys, *routing: Array) -> Any:
            return block(carry, keys, look, *routing)

        # With several looks the body of a loop holds several layers, whose recomputation the
        # compiler could merge.
        scanned = looped and config.scan and len(config.attention_spans) == 1
        return remat.remat_layer(apply, options.remat, REMAT_NAMES, scanned=scanned)

    by_look = {name: make_function(name) for name in set(config.attention_spans)}
    return tuple(by_look[name] for name in config.attention_spans)
