"""A decoder: Llama's unless its options say otherwise. RMSNorm, RoPE, grouped-query attention, a gated MLP.

B batch, L length, D model, H query heads, G key and value heads, K head size, F hidden, V
vocabulary. Touvron et al. 2023 (LLaMA 2); Shazeer 2020 (SwiGLU, GeGLU); Ainslie et al. 2023
(grouped queries); Beltagy et al. 2020 (windows); Gemma Team 2024 and 2025 (caps, norms on both
sides, two bases); OLMo Team 2024 (norms behind).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations, padding
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.experts import Experts, Mixture, RoutingTotals
from jaxlaunch.trainer.models.language_model import Features, LanguageModel
from jaxlaunch.trainer.models.layers import (
    DEFAULT_OPTIONS,
    ModelOptions,
    RMSNorm,
    apply_kernel,
    apply_rope,
    gated_activation,
    gather_sequence,
    gelu,
    init_bias,
    init_weight,
    run_stack,
    slice_stack,
    split_sequence,
)
from jaxlaunch.trainer.numerics import remat
from jaxlaunch.trainer.parallel.sharding import Axes, constrain

REMAT_NAMES = (
    "query",
    "key",
    "value",
    implementations.ATTENTION_OUTPUT,
    "gate",
    "up",
)  # what remat may keep by name
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class LayerAttention(NamedTuple):
    """The attention mask and the rotary positions of a layer, which differ between layers."""

    attend: implementations.Attention
    rope: Callable[..., Array]

    @classmethod
    def from_config(cls, config: spec.Decoder, name: str, attention: str) -> LayerAttention:
        """Return those of the layers with a window, or of the `full` ones."""
        is_window = name == "window"
        window = config.window if is_window else None
        scale = (config.query_scalar or config.head_channels) ** -0.5
        theta, scaling = config.rope_theta, config.rope_scaling
        if is_window and config.rope_local_theta is not None:
            theta, scaling = config.rope_local_theta, None
        attend = implementations.causal_attention(
            attention, window=window, cap=config.score_cap, scale=scale
        )
        return cls(attend, partial(apply_rope, theta=theta, scaling=scaling))


class SelfAttention(nnx.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs) -> None:
        width = config.width
        heads = config.heads
        groups = config.kv_head_count
        size = config.head_channels
        self.query = init_weight(
            rngs, (width, heads, size), ("embed", "heads", "head"), width**-0.5
        )
        self.key = init_weight(
            rngs, (width, groups, size), ("embed", "kv_heads", "head"), width**-0.5
        )
        self.value = init_weight(
            rngs, (width, groups, size), ("embed", "kv_heads", "head"), width**-0.5
        )
        self.out = init_weight(
            rngs,
            (heads, size, width),
            ("heads", "head", "embed"),
            (2 * config.layers * heads * size) ** -0.5,
        )
        has_bias = "qkv" in config.biases
        self.query_bias = init_bias((heads, size), ("heads", "head")) if has_bias else None
        self.key_bias = init_bias((groups, size), ("kv_heads", "head")) if has_bias else None
        self.value_bias = init_bias((groups, size), ("kv_heads", "head")) if has_bias else None
        self.out_bias = init_bias((width,), ("embed",)) if "out" in config.biases else None
        self.query_norm = _head_norm(config, heads, "heads")
        self.key_norm = _head_norm(config, groups, "kv_heads")

    def __call__(self, x_BLD: Array, keys: implementations.Keys, look: LayerAttention) -> Array:
        query_BLHK = _apply_norm(
            self.query_norm, apply_kernel(x_BLD, self.query[...], bias=self.query_bias)
        )
        key_BLGK = _apply_norm(
            self.key_norm, apply_kernel(x_BLD, self.key[...], bias=self.key_bias)
        )
        query_BLHK = checkpoint_name(look.rope(query_BLHK), "query")
        key_BLGK = checkpoint_name(look.rope(key_BLGK), "key")
        value_BLGK = checkpoint_name(
            apply_kernel(x_BLD, self.value[...], bias=self.value_bias), "value"
        )
        query_BLHK = constrain(query_BLHK, "batch", "length", "heads", "head")
        mixed_BLHK = look.attend(query_BLHK, key_BLGK, value_BLGK, keys)
        mixed_BLHK = constrain(mixed_BLHK, "batch", "length", "heads", "head")
        return apply_kernel(mixed_BLHK, self.out[...], axes=2, bias=self.out_bias)


def _head_norm(config: spec.Decoder, heads: int, axis: str) -> RMSNorm | None:
    """Return the norm of queries or keys: of each head with one scale for all, or of all heads as one row."""
    if config.qk_norm is None:
        return None
    shape: tuple[int, ...] = (config.head_channels,)
    axes: Axes = ("head",)
    if config.qk_norm == "whole":
        shape, axes = (heads, *shape), (axis, *axes)
    return RMSNorm(shape, config.norm_eps, axes, from_one=config.norm_from_one)


class GatedMLP(nnx.Module):
    """(activation(x · gate) * (x · up)) · down."""

    def __init__(self, config: spec.Decoder, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.mlp_units
        self.gate = init_weight(rngs, (width, hidden), ("embed", "hidden"), width**-0.5)
        self.up = init_weight(rngs, (width, hidden), ("embed", "hidden"), width**-0.5)
        self.down = init_weight(
            rngs, (hidden, width), ("hidden", "embed"), (2 * config.layers * hidden) ** -0.5
        )
        has_bias = "mlp" in config.biases
        self.gate_bias = init_bias((hidden,), ("hidden",)) if has_bias else None
        self.up_bias = init_bias((hidden,), ("hidden",)) if has_bias else None
        self.down_bias = init_bias((width,), ("embed",)) if has_bias else None
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x_BLD: Array) -> Array:
        gate_BLF = checkpoint_name(apply_kernel(x_BLD, self.gate[...], bias=self.gate_bias), "gate")
        up_BLF = checkpoint_name(apply_kernel(x_BLD, self.up[...], bias=self.up_bias), "up")
        hidden_BLF = constrain(
            gated_activation(self.activation, gate_BLF, up_BLF), "batch", "length", "hidden"
        )
        return apply_kernel(hidden_BLF, self.down[...], bias=self.down_bias)


class Block(nnx.Module):
    """One layer: attention, then the MLP, each on the stream and added to it; norms before, behind, or both."""

    def __init__(self, rngs: nnx.Rngs, config: spec.Decoder, *, is_sparse: bool = False) -> None:
        def make_norm(position: str) -> RMSNorm | None:
            if config.norms not in (position, "both"):
                return None
            return RMSNorm(config.width, config.norm_eps, from_one=config.norm_from_one)

        self.attention_norm, self.attention_out_norm = make_norm("before"), make_norm("after")
        self.attention = SelfAttention(config, rngs)
        self.mlp_norm, self.mlp_out_norm = make_norm("before"), make_norm("after")
        self.mlp: Any = Experts(config, rngs, ACTIVATIONS) if is_sparse else GatedMLP(config, rngs)

    def __call__(self, x_BLD: Array, keys: implementations.Keys, look: LayerAttention) -> Array:
        x_BLD = self.add_attention(x_BLD, keys, look)
        return self.add_mlp(x_BLD, self.mlp(gather_sequence(_apply_norm(self.mlp_norm, x_BLD))))

    def add_attention(
        self, x_BLD: Array, keys: implementations.Keys, look: LayerAttention
    ) -> Array:
        """Add the output of attention to the stream."""
        mixed_BLD = split_sequence(
            self.attention(gather_sequence(_apply_norm(self.attention_norm, x_BLD)), keys, look)
        )
        return x_BLD + _apply_norm(self.attention_out_norm, mixed_BLD)

    def add_mlp(self, x_BLD: Array, mlp_BLD: Array) -> Array:
        """Add the MLP's output `mlp_BLD` to the stream."""
        return split_sequence(x_BLD + _apply_norm(self.mlp_out_norm, split_sequence(mlp_BLD)))

    def apply_routed(
        self,
        carry: tuple[Array, RoutingTotals],
        keys: implementations.Keys,
        look: LayerAttention,
        real_BL: Array,
        place_M: Array,
    ) -> tuple[Array, RoutingTotals]:
        """Apply the layer in a decoder with experts; `place_M` is 1 at this layer among those with experts."""
        x_BLD, routed = carry
        if not isinstance(self.mlp, Experts):
            return self(x_BLD, keys, look), routed
        x_BLD = self.add_attention(x_BLD, keys, look)
        mlp_BLD, counts = self.mlp(gather_sequence(_apply_norm(self.mlp_norm, x_BLD)), real_BL)
        return self.add_mlp(x_BLD, mlp_BLD), routed.add_layer(counts, place_M)


def _apply_norm(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class Decoder(LanguageModel):
    """tokens_BL -> logits_BLV. Blocks with experts and those without are a stack each: [layers, ...]."""

    def __init__(
        self, config: spec.Decoder, rngs: nnx.Rngs, options: ModelOptions = DEFAULT_OPTIONS
    ) -> None:
        super().__init__(options)
        self.embedding = init_weight(
            rngs, (config.vocab, config.width), ("vocab", "embed"), config.width**-0.5
        )
        stacked = nnx.vmap(partial(Block, config=config, is_sparse=bool(config.experts)))
        layers = config.layer_stacks
        self.blocks = stacked(rngs.split(len(layers["blocks"])))
        if dense := layers.get("dense_blocks"):
            self.dense_blocks = nnx.vmap(partial(Block, config=config))(rngs.split(len(dense)))
        self.norm = RMSNorm(config.width, config.norm_eps, from_one=config.norm_from_one)
        head = partial(
            init_weight, rngs, (config.width, config.vocab), ("embed", "vocab"), config.width**-0.5
        )
        self.head = None if config.tied else head()
        self.scanned, self.cap = config.scan, config.logit_cap
        self.factor = config.width**0.5 if config.embedding_scale else None
        self.mixture = None if config.experts is None else Mixture.from_config(config)
        self.spans = tuple(_layer_spans(config))
        # The compiler removes a loop of one round.
        self.apply, self.apply_alone = (
            _functions_by_layer(config, options, looped=looped) for looped in (True, False)
        )

    def features(self, tokens_BL: Array, keys: implementations.Keys = None) -> Array:
        """Return the normalized stream x_BLD. Raises SpecError in training where routers add to the loss."""
        if self.mixture is not None and self.mixture.is_penalized and not self.deterministic:
            raise SpecError(
                "the task's loss calls the model, or its features, and so leaves out "
                "train.model.balance and router_z; "
                "add the penalty of model.read(tokens), as NextToken does, or set both to 0"
            )
        return self.read(tokens_BL, keys).x_BLD

    def read(
        self, tokens_BL: Array, keys: implementations.Keys = None, real_BL: Array | None = None
    ) -> Features:
        """Return the features and the routing of the tokens in `real_BL`, by default those visible by `keys`."""
        x_BLD = self.embed_inputs(tokens_BL)
        if self.mixture is None:
            x_BLD = run_stack(
                self._layer_functions(self.spans[0]), self.blocks, x_BLD, keys, scanned=self.scanned
            )
            return Features(gather_sequence(self.norm(x_BLD)))
        if real_BL is None:
            real_BL = padding.real_tokens(
                {"tokens": tokens_BL, **implementations.as_visible(keys).to_keys()}
            )
        real_BL = real_BL.astype(jnp.float32)
        carry: Any = x_BLD, RoutingTotals.zeros(self.mixture)
        for span in self.spans:
            layers = slice_stack(getattr(self, span.stack), span.start, span.stop)
            # A layer adds to the row of its place. Layers without experts ignore it.
            place_NM = jnp.eye(span.stop - span.start, self.mixture.layers, dtype=jnp.float32)
            place_NM = jnp.roll(place_NM, span.start, axis=1)
            carry = run_stack(
                self._layer_functions(span),
                layers,
                carry,
                keys,
                real_BL,
                per_layer=(place_NM,),
                scanned=self.scanned,
            )
        x_BLD, routed = carry
        means = routed.metric_means(real_BL.sum(), self.mixture)
        return Features(
            gather_sequence(self.norm(x_BLD)), self.mixture.compute_penalty(means), means
        )

    def embed_inputs(self, tokens_BL: Array, places_BL: Array | None = None) -> Array:
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
    """Consecutive equal layers: places start to stop of a stack, beginning with the layer of this number."""

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
    """Return the function that applies a layer, in a loop or alone, for each place in the pattern of windows."""

    def make_function(name: str) -> Callable[..., Any]:
        look = LayerAttention.from_config(config, name, options.attention)

        def apply(block: Block, x: Any, keys: implementations.Keys, *of_experts: Array) -> Any:
            return (
                block(x, keys, look)
                if config.experts is None
                else block.apply_routed(x, keys, look, *of_experts)
            )

        # With several looks the body of a loop holds several layers, whose recomputation the
        # compiler could merge.
        scanned = looped and config.scan and len(config.attention_spans) == 1
        return remat.remat_layer(apply, options.remat, REMAT_NAMES, scanned=scanned)

    by_look = {name: make_function(name) for name in set(config.attention_spans)}
    return tuple(by_look[name] for name in config.attention_spans)
