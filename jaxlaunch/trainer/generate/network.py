"""A decoder or GPT-2, laid out for generation: each layer's parameters by themselves, each layer with its own cache.

Training scans over stacked layers; here every layer is written out. What a scan takes from a stack, it copies, and
one token reads each parameter once: the copy would cost more than the token.

B batch, L length, P tokens of the prompts, D model, V vocabulary.
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
from jaxlaunch.trainer.attention.implementations import Attention, Keys, Visible
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.cache import Cache, OfPrompts, OfToken
from jaxlaunch.trainer.models.decoder import Block, Decoder, Look
from jaxlaunch.trainer.models.experts import Mixture, Routed
from jaxlaunch.trainer.models.gpt2 import GPT2
from jaxlaunch.trainer.models.language_model import LanguageModel
from jaxlaunch.trainer.models.layers import whole
from jaxlaunch.trainer.models.options import ModelOptions
from jaxlaunch.trainer.numerics import memory, precision
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.step.state import ModelArrays, Named

Config = spec.Decoder | spec.GPT2
ATTENTION = "xla"  # of prompts: kernels ask for lengths of their own


class Weights(NamedTuple):
    """Parameters by name: those beside the layers, and those of each layer."""

    outer: Named
    layers: tuple[Named, ...]


class Network:
    """The forward passes of generation: of whole prompts, of one more token a row, and without a cache.

    Raises SpecError for a model that does not predict tokens, or does not split over the mesh.
    """

    def __init__(self, model: Any, mesh: jax.sharding.Mesh, of: spec.Precision = "fp32") -> None:
        if not isinstance(model, spec.Decoder | spec.GPT2):
            raise SpecError(f"train.model.kind = {model.kind} does not generate tokens; decoder and gpt2 do")
        self.config: Config = model
        self.mesh = mesh
        self._precision = precision.policy(of)
        with self.context():
            self._arrays = ModelArrays(nnx.eval_shape(partial(_built, model, self._precision.output)))
        self.abstract = {name: self._placed(name, leaf) for name, leaf in self._arrays.params.items()}
        self._looks = _looks(model)
        stacks = model.stacks if isinstance(model, spec.Decoder) else {"blocks": tuple(range(model.layers))}
        self._stacks: Mapping[str, tuple[int, ...]] = stacks  # name of a stack of parameters -> its layers

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The mesh and the precision that everything is traced under."""
        matmul = self._precision.matmul
        with jax.set_mesh(self.mesh), nnx.use_eager_sharding(False):  # type: ignore[no-untyped-call]
            with jax.default_matmul_precision(matmul) if matmul else contextlib.nullcontext():
                yield

    def slots(self, length: int) -> tuple[int, ...]:
        """The slots of each layer's cache, for rows of up to `length` tokens."""
        windows = [look.window for look in self._looks]
        each = [windows[layer % len(windows)] for layer in range(self.config.layers)]
        return tuple(length if window is None else min(window, length) for window in each)

    # --- parameters ---------------------------------------------------------------------------------------------------

    def bytes_per_device(self, count: int, length: int) -> int:
        """Weights, and keys and values of `count` rows of `length` tokens, on one device."""
        config, mp = self.config, self.mesh.shape["mp"]
        heads = config.groups if isinstance(config, spec.Decoder) else config.heads
        size = config.size if isinstance(config, spec.Decoder) else config.width // config.heads
        rows, own = -(-count // meshes.shards(self.mesh)), heads if heads % mp else heads // mp
        tokens = 2 * rows * own * size * sum(self.slots(length))
        return memory.bytes_per_device(self.abstract) + tokens * jnp.dtype(self._precision.compute).itemsize

    def laid_out(self, params: dict[str, Array]) -> Weights:
        """Stacked `params`, in any float dtype, as the weights that the passes read.

        Each stacked array leaves `params` as soon as its layers are copied.
        """
        outer: Named = {}
        layers: tuple[Named, ...] = tuple({} for _ in range(self.config.layers))
        for name in list(params):
            leaf, like = params.pop(name), self.abstract[name]
            stack, _, rest = name.partition(".")
            with self.context():
                if stack not in self._stacks:
                    outer[name] = _copied(leaf, like.dtype, like.sharding)
                    continue
                one = jax.sharding.PartitionSpec(*like.sharding.spec[1:])  # of one layer of the stack
                parts = _unstacked(leaf, like.dtype, jax.sharding.NamedSharding(self.mesh, one))
            for layer, part in zip(self._stacks[stack], parts, strict=True):
                layers[layer][rest] = part
        return Weights(outer, layers)

    def stacked(self, weights: Weights) -> dict[str, Array]:
        """The parameters by the names that the trainer and its checkpoints have for them."""

        def of(name: str) -> Any:
            """One of them."""
            stack, _, rest = name.partition(".")
            if stack not in self._stacks:
                return weights.outer[name]
            return jnp.stack([weights.layers[layer][rest] for layer in self._stacks[stack]])

        with self.context():
            return {name: of(name) for name in self.abstract}

    def merged(self, params: Mapping[str, Array]) -> LanguageModel:
        """The model of these stacked parameters, to be called with tokens_BL."""
        model: LanguageModel = self._arrays.merge(dict(params), {}, jax.random.key(0))
        model.eval()  # type: ignore[no-untyped-call]
        return model

    def _placed(self, name: str, leaf: Any) -> jax.ShapeDtypeStruct:
        where = sharding.state_sharding(name, leaf.shape, self._arrays.axes[name], self.mesh)
        return jax.ShapeDtypeStruct(leaf.shape, self._precision.compute, sharding=where)

    # --- passes -------------------------------------------------------------------------------------------------------

    def prompts(
        self, weights: Weights, tokens_BP: Array, pad_B: Array, slots: Sequence[int]
    ) -> tuple[Array, tuple[Cache, ...]]:
        """Logits_BV after the last token of prompts that are padded on the left, and the layers' caches."""
        index_1P = jnp.arange(tokens_BP.shape[1])[None, :]
        places_BP = jnp.maximum(index_1P - pad_B[:, None], 0)
        keys = Visible(mask_BL=(index_1P >= pad_B[:, None]).astype(jnp.int32))
        attends = [OfPrompts(self._look(layer).plain, each) for layer, each in enumerate(slots)]
        model, x_BPD = self._through(weights, tokens_BP, places_BP, attends, keys)
        return model.project(x_BPD[:, -1:], model.head_DV)[:, 0], tuple(attend.cache for attend in attends)

    def token(
        self, weights: Weights, token_B: Array, at: Array, pad_B: Array, caches: Sequence[Cache]
    ) -> tuple[Array, tuple[Cache, ...]]:
        """Logits_BV after one more token a row, at index `at`, and the caches with it."""
        attends = [
            OfToken(cache, at, pad_B, scale=self._look(layer).scale, cap=self._look(layer).cap)
            for layer, cache in enumerate(caches)
        ]
        model, x_B1D = self._through(weights, token_B[:, None], (at - pad_B)[:, None], attends, None)
        return model.project(x_B1D, model.head_DV)[:, 0], tuple(attend.cache for attend in attends)

    def logits(self, weights: Weights, tokens_BL: Array) -> Array:
        """Logits_BLV without a cache; what pads a row comes after its tokens, which do not see it."""
        attends = [self._look(layer).plain for layer in range(self.config.layers)]
        model, x_BLD = self._through(weights, tokens_BL, jnp.arange(tokens_BL.shape[1])[None, :], attends, None)
        return model.project(x_BLD, model.head_DV)

    def _through(
        self, weights: Weights, tokens_BL: Array, places_BL: Array, attends: Sequence[Attention], keys: Keys
    ) -> tuple[LanguageModel, Array]:
        """The model, whose own layers are not to be used, and its normalized stream after the last layer."""
        model = self.merged({**self._arrays.params, **weights.outer})
        blocks = {layer: _Stack(getattr(model, stack)) for stack in self._stacks for layer in self._stacks[stack]}
        if isinstance(self.config, spec.GPT2):
            places_BL = jnp.minimum(places_BL, self.config.rows - 1)  # of what only fills a row
        x_BLD = model.stream(tokens_BL, places_BL)
        for layer, own in enumerate(weights.layers):
            block = blocks[layer].layer(own)
            x_BLD = self._look(layer).apply(block, x_BLD, attends[layer], places_BL, keys)
        return model, whole(model.norm(x_BLD))

    def _look(self, layer: int) -> LayerLook:
        return self._looks[layer % len(self._looks)]


class _Stack:
    """The structure of a stack of layers."""

    def __init__(self, layers: nnx.Module) -> None:
        self._graph, state = nnx.split(layers)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(state)
        self._names = [".".join(str(key.key) for key in path[:-1]) for path, _ in leaves]

    def layer(self, own: Named) -> Any:
        """The layer of these parameters."""
        leaves = [own[name] for name in self._names]
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves))


class LayerLook(NamedTuple):
    """What tells a layer's attention from another's."""

    plain: Attention  # of whole rows
    window: int | None
    scale: float | None
    cap: float | None
    apply: Callable[..., Array]  # (block, x_BLD, attend, places_BL, keys) -> x_BLD


def _looks(config: Config) -> tuple[LayerLook, ...]:
    """As a pattern that is repeated over the layers."""
    if isinstance(config, spec.GPT2):
        return (LayerLook(implementations.causal(ATTENTION), None, None, None, _gpt2_layer),)

    def of(name: str) -> LayerLook:
        """The look of that name."""
        look = Look.of(config, name, ATTENTION)
        window, scale = config.window if name == "window" else None, (config.query_scalar or config.size) ** -0.5
        return LayerLook(look.attend, window, scale, config.score_cap, partial(_decoder_layer, config, look))

    return tuple(map(of, config.looks))


def _gpt2_layer(block: Any, x_BLD: Array, attend: Attention, places_BL: Array, keys: Keys) -> Array:
    block.attention.attend = attend
    applied: Array = block(x_BLD, keys, None)
    return applied


def _decoder_layer(
    config: spec.Decoder, look: Look, block: Block, x_BLD: Array, attend: Attention, places_BL: Array, keys: Keys
) -> Array:
    look = Look(attend, partial(look.rope, places_BL=places_BL))
    if config.experts is None:
        return block(x_BLD, keys, look)
    mixture = Mixture.of(config)  # whose counts nobody reads
    real_BL, place_M = jnp.ones(x_BLD.shape[:2], jnp.float32), jnp.zeros(mixture.layers, jnp.float32)
    return block.routed((x_BLD, Routed.none(mixture)), keys, look, real_BL, place_M)[0]


def _built(config: Config, output: jnp.dtype) -> LanguageModel:
    options = ModelOptions(attention=ATTENTION, output=output)
    if isinstance(config, spec.GPT2):
        return GPT2(config.model_copy(update={"dropout": 0.0, "drop_path": 0.0}), nnx.Rngs(0), options)
    # Without a capacity: what a token finds a place for would depend on those that pad its row.
    return Decoder(config.model_copy(update={"capacity": None}), nnx.Rngs(0), options)


@partial(jax.jit, static_argnums=(1, 2))
def _copied(array: Array, dtype: jnp.dtype, where: jax.sharding.NamedSharding) -> Array:
    copied: Array = jax.lax.with_sharding_constraint(array.astype(dtype), where)
    return copied


@partial(jax.jit, static_argnums=(1, 2))
def _unstacked(stack: Array, dtype: jnp.dtype, where: jax.sharding.NamedSharding) -> tuple[Array, ...]:
    return tuple(jax.lax.with_sharding_constraint(part.astype(dtype), where) for part in jnp.unstack(stack))
