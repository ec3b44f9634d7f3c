"""A decoder or GPT-2 for generation, with separate parameters and a cache for each layer.

Training scans over stacked layers, but here the layers are unrolled. A scan would copy each layer
out of the stack, and because a single token reads each parameter only once, the copy would take
longer than the token.

A cache stores the keys and values of the tokens that a layer has seen, so that each further token
has the same cost. It is a ring buffer: the token at index t of a row is in slot t mod S. A layer
with a window has as many slots as its window, but at most one for every token. The other layers
have one for every token. Prompts are padded on the left, so all rows of a batch end at the same
index; a row begins at index `pad` and sees nothing before it.

B batch, L length, P tokens of the prompts, D model, V vocabulary, H query heads, G key and value
heads, R query heads that share keys, K head size, S slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.attention.implementations import MASKED_SCORE, Attention, Keys, Visible
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.decoder import Block, Decoder, LayerAttention
from jaxlaunch.trainer.models.experts import Mixture, RoutingTotals
from jaxlaunch.trainer.models.gpt2 import GPT2
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.models.layers import ModelOptions, gather_sequence
from jaxlaunch.trainer.numerics import memory, precision
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.step.state import ModelArrays, NamedArrays

Config = spec.Decoder | spec.GPT2
# The attention for prompts, whose lengths a kernel may not accept.
ATTENTION = "xla"


class Weights(NamedTuple):
    """Parameters by name.

    Attributes:
        outer: Parameters outside of the layers.
        layers: Parameters of each layer, by their names in the layer.
    """

    outer: NamedArrays
    layers: tuple[NamedArrays, ...]


class Network:
    """The forward passes of generation: for prompts, for one more token, and without a cache.

    Raises SpecError for a model that does not predict tokens or cannot be split over the mesh.
    """

    def __init__(
        self, model: Any, mesh: jax.sharding.Mesh, dtypes: spec.Precision = "fp32"
    ) -> None:
        if not isinstance(model, spec.Decoder | spec.GPT2):
            kind = f"train.model.kind = {model.kind}"
            raise SpecError(f"{kind} does not generate tokens; decoder, gpt2 and transformers do")
        self.config: Config = model
        # The largest number of tokens of a row, if there is one.
        self.position_rows = model.position_rows if isinstance(model, spec.GPT2) else None
        self.mesh = mesh
        self._precision = precision.resolve_precision(dtypes)
        build = partial(_build_model, model, self._precision.output)
        with self.tracing_context():
            self._arrays = ModelArrays(nnx.eval_shape(build))
        dtype, self.abstract = self._precision.compute, {}
        for name, leaf in self._arrays.params.items():
            split = sharding.state_sharding(name, leaf.shape, self._arrays.axes[name], mesh)
            self.abstract[name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=split)
        pattern = _layer_pattern(model)
        self._traits = [pattern[layer % len(pattern)] for layer in range(model.layers)]
        # The layers in each stack of parameters.
        self._stacks: Mapping[str, tuple[int, ...]] = {"blocks": tuple(range(model.layers))}
        if isinstance(model, spec.Decoder):
            self._stacks = model.layer_stacks

    @contextlib.contextmanager
    def tracing_context(self) -> Iterator[None]:
        """Set the mesh and the precision for tracing."""
        matmul = self._precision.matmul
        precision = jax.default_matmul_precision(matmul) if matmul else contextlib.nullcontext()
        eager = nnx.use_eager_sharding(False)  # type: ignore[no-untyped-call]
        with jax.set_mesh(self.mesh), eager, precision:
            yield

    def cache_slots(self, length: int) -> tuple[int, ...]:
        """Return the number of slots in each layer's cache for rows of up to `length` tokens."""
        return tuple(
            length if traits.window is None else min(traits.window, length)
            for traits in self._traits
        )

    # --- parameters -------------------------------------------------------------------------------

    def bytes_per_device(self, count: int, length: int) -> int:
        """Return the bytes of weights and caches on a device, for `count` rows of `length`."""
        config, mp = self.config, self.mesh.shape["mp"]
        heads, size = config.heads, config.width // config.heads
        if isinstance(config, spec.Decoder):
            heads, size = config.kv_head_count, config.head_channels
        rows = -(-count // meshes.count_shards(self.mesh))
        local_heads = heads if heads % mp else heads // mp
        numbers = 2 * rows * local_heads * size * sum(self.cache_slots(length))
        cache_bytes = numbers * jnp.dtype(self._precision.compute).itemsize
        return memory.bytes_per_device(self.abstract) + cache_bytes

    def unstack_params(self, params: dict[str, Array]) -> Weights:
        """Convert stacked `params` in any float dtype to weights.

        Each stacked array is removed from `params` after its layers have been copied, so that at
        most one array is in memory twice.
        """
        outer: NamedArrays = {}
        layers: tuple[NamedArrays, ...] = tuple({} for _ in range(self.config.layers))
        for name in list(params):
            leaf, target = params.pop(name), self.abstract[name]
            stack, _, parameter_name = name.partition(".")
            with self.tracing_context():
                if stack not in self._stacks:
                    outer[name] = copy_array(leaf, target.dtype, target.sharding)
                    continue
                layer_spec = jax.sharding.PartitionSpec(*target.sharding.spec[1:])
                split = jax.sharding.NamedSharding(self.mesh, layer_spec)
                parts = _unstack_layers(leaf, target.dtype, split)
            for layer, part in zip(self._stacks[stack], parts, strict=True):
                layers[layer][parameter_name] = part
        return Weights(outer, layers)

    def stack_params(self, weights: Weights) -> dict[str, Array]:
        """Return the stacked parameters, by their names in checkpoints."""
        params = {}
        with self.tracing_context():
            for name in self.abstract:
                stack, _, parameter_name = name.partition(".")
                if stack in self._stacks:
                    params[name] = jnp.stack(
                        [weights.layers[layer][parameter_name] for layer in self._stacks[stack]]
                    )
                else:
                    params[name] = weights.outer[name]
        return params

    def build_model(self, params: Mapping[str, Array]) -> LanguageModel:
        """Return a model with these stacked parameters, to be called with tokens_BL."""
        model: LanguageModel = self._arrays.merge_model(dict(params), {}, jax.random.key(0))
        model.eval()  # type: ignore[no-untyped-call]
        return model

    # --- forward passes ---------------------------------------------------------------------------

    def run_prompts(
        self, weights: Weights, tokens_BP: Array, pad_B: Array, slots: Sequence[int]
    ) -> tuple[Array, tuple[Cache, ...]]:
        """Return logits_BV after the last token of left-padded prompts, and the caches."""
        position_BP = jnp.arange(tokens_BP.shape[1])[None, :] - pad_B[:, None]
        keys = Visible(mask_BL=(position_BP >= 0).astype(jnp.int32))
        layers = zip(self._traits, slots, strict=True)
        attends = [PromptAttention(traits.plain, count) for traits, count in layers]
        model, x_BPD = self._run_layers(
            weights, tokens_BP, jnp.maximum(position_BP, 0), attends, keys
        )
        logits_BV = model.project(x_BPD[:, -1:], model.head_DV)[:, 0]
        return logits_BV, tuple(attend.cache for attend in attends)

    def run_token(
        self, weights: Weights, token_B: Array, index: Array, pad_B: Array, caches: Sequence[Cache]
    ) -> tuple[Array, tuple[Cache, ...]]:
        """Return logits_BV after one more token per row, at `index`, and the updated caches."""
        attends = [
            TokenAttention(cache, index, pad_B, scale=traits.scale, cap=traits.cap)
            for traits, cache in zip(self._traits, caches, strict=True)
        ]
        positions_B1 = (index - pad_B)[:, None]
        model, x_B1D = self._run_layers(weights, token_B[:, None], positions_B1, attends)
        return model.project(x_B1D, model.head_DV)[:, 0], tuple(attend.cache for attend in attends)

    def compute_logits(self, weights: Weights, tokens_BL: Array) -> Array:
        """Return logits_BLV of rows that are padded on the right, without a cache."""
        attends = [traits.plain for traits in self._traits]
        positions_BL = jnp.arange(tokens_BL.shape[1])[None, :]
        model, x_BLD = self._run_layers(weights, tokens_BL, positions_BL, attends)
        return model.project(x_BLD, model.head_DV)

    def _run_layers(
        self,
        weights: Weights,
        tokens_BL: Array,
        positions_BL: Array,
        attends: Sequence[Attention],
        keys: Keys = None,
    ) -> tuple[LanguageModel, Array]:
        """Apply all layers.

        Args:
            weights: Weights.
            tokens_BL: Tokens.
            positions_BL: Position of each token in its text.
            attends: Attention of each layer.
            keys: Keys that are visible.

        Returns:
            The model, of which only the parts outside of the layers are usable, and the normalized
            residual stream x_BLD after the last layer.
        """
        model = self.build_model({**self._arrays.params, **weights.outer})
        blocks = {
            layer: _Stack(getattr(model, stack))
            for stack in self._stacks
            for layer in self._stacks[stack]
        }
        if isinstance(self.config, spec.GPT2):
            # Positions past the table belong to padding.
            positions_BL = jnp.minimum(positions_BL, self.config.position_rows - 1)
        x_BLD = model.embed_inputs(tokens_BL, positions_BL)
        for layer, traits in enumerate(self._traits):
            block = blocks[layer].build_layer(weights.layers[layer])
            x_BLD = traits.apply(block, x_BLD, attends[layer], positions_BL, keys)
        return model, gather_sequence(model.norm(x_BLD))


class _Stack:
    """The structure of a stack of layers, from which single layers are built."""

    def __init__(self, layers: nnx.Module) -> None:
        self._graph, state = nnx.split(layers)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        self._names = [".".join(str(key.key) for key in path[:-1]) for path, _ in leaves]

    def build_layer(self, params: NamedArrays) -> Any:
        """Return a layer with these parameters."""
        leaves = [params[name] for name in self._names]
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))


class LayerTraits(NamedTuple):
    """The properties by which the attention of layers differs.

    Attributes:
        plain: Attention over whole rows, without a cache.
        window: Number of keys that a query sees, or None for all.
        scale: Factor of the scores, or None for the default.
        cap: Bound of the scores.
        apply: Function (block, x_BLD, attend, positions_BL, keys) -> x_BLD that applies a layer.
    """

    plain: Attention
    window: int | None
    scale: float | None
    cap: float | None
    apply: Callable[..., Array]


def _layer_pattern(config: Config) -> list[LayerTraits]:
    """Return the traits of the first layers. All layers repeat this pattern."""
    if isinstance(config, spec.GPT2):
        plain = implementations.causal_attention(ATTENTION)
        return [LayerTraits(plain, None, None, None, _apply_gpt2_layer)]
    pattern, scale = [], (config.query_scalar or config.head_channels) ** -0.5
    for span in config.attention_spans:
        attention = LayerAttention.from_config(config, span, ATTENTION)
        window = config.window if span == "window" else None
        apply = partial(_apply_decoder_layer, config, attention)
        pattern.append(LayerTraits(attention.attend, window, scale, config.score_cap, apply))
    return pattern


def _apply_gpt2_layer(
    block: Any, x_BLD: Array, attend: Attention, positions_BL: Array, keys: Keys
) -> Array:
    block.attention.attend = attend
    output_BLD: Array = block(x_BLD, keys, None)
    return output_BLD


def _apply_decoder_layer(
    config: spec.Decoder,
    attention: LayerAttention,
    block: Block,
    x_BLD: Array,
    attend: Attention,
    positions_BL: Array,
    keys: Keys,
) -> Array:
    attention = LayerAttention(attend, partial(attention.rope, positions_BL=positions_BL))
    if config.experts is None:
        output_BLD: Array = block(x_BLD, keys, attention)
        return output_BLD
    # Generation does not use the routing's counts, so they may be those of any layer.
    mixture = Mixture.from_config(config)
    real_BL = jnp.ones(x_BLD.shape[:2], jnp.float32)
    layer_M = jnp.zeros(mixture.layers, jnp.float32)
    carry = x_BLD, RoutingTotals.zeros(mixture)
    output_BLD, _ = block(carry, keys, attention, real_BL, layer_M)
    return output_BLD


def _build_model(config: Config, output: jnp.dtype) -> LanguageModel:
    options = ModelOptions(attention=ATTENTION, output=output)
    if isinstance(config, spec.GPT2):
        config = config.model_copy(update={"dropout": 0.0, "drop_path": 0.0})
        return GPT2(config, nnx.Rngs(0), options)
    # With a capacity, padding would affect which tokens are left out.
    return Decoder(config.model_copy(update={"capacity": None}), nnx.Rngs(0), options)


@partial(jax.jit, static_argnums=(1, 2))
def copy_array(array: Array, dtype: jnp.dtype, split: jax.sharding.NamedSharding) -> Array:
    """Return a copy of an array in another dtype and sharding."""
    copy: Array = jax.lax.with_sharding_constraint(array.astype(dtype), split)
    return copy


@partial(jax.jit, static_argnums=(1, 2))
def _unstack_layers(
    stack: Array, dtype: jnp.dtype, split: jax.sharding.NamedSharding
) -> tuple[Array, ...]:
    return tuple(copy_array(part, dtype, split) for part in jnp.unstack(stack))


# --- the cache ------------------------------------------------------------------------------------


class Cache(NamedTuple):
    """Keys and values of one layer, with the heads in front, so that each head is one matrix."""

    key_BGSK: Array
    value_BGSK: Array

    def with_token(self, key_B1GK: Array, value_B1GK: Array, index: Array) -> Cache:
        """Return the cache with the token at `index` in place of the oldest one."""
        slot = index % self.key_BGSK.shape[2]
        update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot, axis=2)
        key_BGSK = update(self.key_BGSK, key_B1GK.swapaxes(1, 2))
        value_BGSK = update(self.value_BGSK, value_B1GK.swapaxes(1, 2))
        return Cache(_constrain_ring(key_BGSK), _constrain_ring(value_BGSK))

    def visible_BS(self, index: Array, pad_B: Array) -> Array:
        """Return which slots hold a token of the row, after the token at `index` was added."""
        slots = self.key_BGSK.shape[2]
        # The index of the token in each slot, which is negative for an empty slot.
        index_S = index - (index - jnp.arange(slots)) % slots
        return index_S[None, :] >= pad_B[:, None]


def _constrain_ring(ring_BGSK: Array) -> Array:
    return sharding.constrain(ring_BGSK, "batch", "kv_heads", "length", "head")


def _make_ring(array_BPGK: Array, slots: int) -> Array:
    """Return a ring buffer [B, G, slots, K] with the last tokens of the prompts."""
    array_BGPK, length = array_BPGK.swapaxes(1, 2), array_BPGK.shape[1]
    if length < slots:
        return _constrain_ring(jnp.pad(array_BGPK, ((0, 0), (0, 0), (0, slots - length), (0, 0))))
    return _constrain_ring(jnp.roll(array_BGPK[:, :, length - slots :], length % slots, axis=2))


class PromptAttention:
    """Attention over whole prompts. A call stores their keys and values in `cache`."""

    cache: Cache

    def __init__(self, plain: Attention, slots: int) -> None:
        self._plain, self._slots = plain, slots

    def __call__(self, query_BPHK: Array, key_BPGK: Array, value_BPGK: Array, keys: Keys) -> Array:
        """Return the output of attention, [B, P, H, K]."""
        self.cache = Cache(_make_ring(key_BPGK, self._slots), _make_ring(value_BPGK, self._slots))
        return self._plain(query_BPHK, key_BPGK, value_BPGK, keys)


class TokenAttention:
    """Attention of one token per row to the tokens in `cache`. A call adds the token to it."""

    def __init__(
        self, cache: Cache, index: Array, pad_B: Array, *, scale: float | None, cap: float | None
    ) -> None:
        self.cache, self._index, self._pad_B = cache, index, pad_B
        self._scale, self._cap = scale, cap

    def __call__(self, query_B1HK: Array, key_B1GK: Array, value_B1GK: Array, keys: Keys) -> Array:
        """Return the output of attention, [B, 1, H, K]."""
        self.cache = self.cache.with_token(key_B1GK, value_B1GK, self._index)
        batch, _, heads, size = query_B1HK.shape
        groups, dtype = key_B1GK.shape[2], query_B1HK.dtype
        query_BGRK = query_B1HK.reshape(batch, groups, heads // groups, size)
        query_BGRK = query_BGRK * (size**-0.5 if self._scale is None else self._scale)
        scores_BGRS = jnp.einsum(
            "bgrk,bgsk->bgrs", query_BGRK, self.cache.key_BGSK, preferred_element_type=jnp.float32
        )
        if self._cap is not None:
            scores_BGRS = self._cap * jnp.tanh(scores_BGRS / self._cap)
        visible_B11S = self.cache.visible_BS(self._index, self._pad_B)[:, None, None, :]
        scores_BGRS = jnp.where(visible_B11S, scores_BGRS, MASKED_SCORE)
        probs_BGRS = jax.nn.softmax(scores_BGRS).astype(dtype)
        mixed_BGRK = jnp.einsum("bgrs,bgsk->bgrk", probs_BGRS, self.cache.value_BGSK)
        return mixed_BGRK.reshape(batch, 1, heads, size).astype(dtype)
