"""Generation with a model of transformers, by passes over whole texts without a cache.

A row holds its prompt from the first position on, and grows to the right. A model that is causal in
any way needs no mask for what follows, and what pads a row is never seen.

B batch, L length, P tokens of the prompts, S tokens of a row, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.generate.network import ATTENTION, Network, Weights, copy_array
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.numerics import memory, precision
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.step.state import ModelArrays, float_buffers
from jaxlaunch.trainer.torch_models import build

COST_NOTE = (
    "models of transformers generate without a cache: every token costs a pass over its whole text"
)


class Row(NamedTuple):
    """The tokens of each row so far, in the place of a cache."""

    tokens_BS: Array


class ModuleNetwork(Network):
    """The forward passes of generation for a model of transformers, with adapters if it has any.

    Raises SpecError as build_model does.
    """

    def __init__(
        self,
        model: spec.TransformersModel,
        mesh: jax.sharding.Mesh,
        dtypes: spec.Precision = "fp32",
        lora: spec.Lora | None = None,
    ) -> None:
        # The other networks need sizes that this one does not read.
        self.config = cast(Any, model)
        self.mesh = mesh
        self._precision = precision.resolve_precision(dtypes)
        options = ModelOptions(attention=ATTENTION, output=self._precision.output)
        with self.tracing_context():
            self._arrays = ModelArrays(
                nnx.eval_shape(lambda: build.build_model(model, nnx.Rngs(0), options, lora))
            )
        module = build.empty_module(model)
        self._has_selection = "logits_to_keep" in inspect.signature(module.forward).parameters
        config = module.config.get_text_config()
        self.position_rows = getattr(config, "max_position_embeddings", None)
        self.abstract = {}
        for name, leaf in (self._arrays.params | float_buffers(self._arrays.buffers)).items():
            split = sharding.state_sharding(name, leaf.shape, self._arrays.axes[name], mesh)
            self.abstract[name] = jax.ShapeDtypeStruct(
                leaf.shape, self._precision.compute, sharding=split
            )

    def cache_slots(self, length: int) -> tuple[int, ...]:
        """Return the number of tokens of a row, at most those for which there are positions."""
        return (min(length, self.position_rows or length),)

    def bytes_per_device(self, count: int, length: int) -> int:
        """Return the bytes of weights and rows on a device, for `count` rows of `length`."""
        rows = -(-count // meshes.count_shards(self.mesh))
        return memory.bytes_per_device(self.abstract) + 4 * rows * length

    def unstack_params(self, params: dict[str, Array]) -> Weights:
        """Convert `params` in any float dtype to weights, one after the other."""
        with self.tracing_context():
            return Weights(
                {
                    name: copy_array(params.pop(name), target.dtype, target.sharding)
                    for name, target in self.abstract.items()
                },
                (),
            )

    def stack_params(self, weights: Weights) -> dict[str, Array]:
        """Return the parameters by their names in checkpoints."""
        return dict(weights.outer)

    def build_model(self, params: Mapping[str, Array]) -> Any:
        """Return a model with these parameters, to be called with tokens_BL."""
        buffers = {name: params.get(name, leaf) for name, leaf in self._arrays.buffers.items()}
        model = self._arrays.merge_model(dict(params), buffers, jax.random.key(0))
        model.eval()
        return model

    def run_prompts(
        self, weights: Weights, tokens_BP: Array, pad_B: Array, slots: Sequence[int]
    ) -> tuple[Array, tuple[Any, ...]]:
        """Return logits_BV after the last token of left-padded prompts, and the rows."""
        length = tokens_BP.shape[1]
        source_BS = jnp.arange(slots[0])[None, :] + pad_B[:, None]
        tokens_BS = jnp.take_along_axis(tokens_BP, jnp.minimum(source_BS, length - 1), axis=1)
        tokens_BS = jnp.where(source_BS < length, tokens_BS, 0)
        return self._next_logits(weights, tokens_BS, length - 1 - pad_B), (Row(tokens_BS),)

    def run_token(
        self, weights: Weights, token_B: Array, index: Array, pad_B: Array, caches: Sequence[Any]
    ) -> tuple[Array, tuple[Any, ...]]:
        """Return logits_BV after one more token per row, at `index`, and the longer rows."""
        position_B, (row,) = index - pad_B, caches
        tokens_BS = row.tokens_BS.at[jnp.arange(len(token_B)), position_B].set(token_B)
        return self._next_logits(weights, tokens_BS, position_B), (Row(tokens_BS),)

    def compute_logits(self, weights: Weights, tokens_BL: Array) -> Array:
        """Return logits_BLV of rows that are padded on the right."""
        (count,) = self.cache_slots(tokens_BL.shape[1])
        logits_BLV: Array = self.build_model(weights.outer)(tokens_BL[:, :count])
        missing = tokens_BL.shape[1] - count
        return jnp.pad(logits_BLV, ((0, 0), (0, missing), (0, 0)))

    def _next_logits(self, weights: Weights, tokens_BS: Array, position_B: Array) -> Array:
        """Return logits_BV after the token at a position of each row."""
        model, keywords = self.build_model(weights.outer), {"input_ids": tokens_BS}
        rows_B = jnp.arange(len(position_B))
        if self._has_selection:
            # The output matrix is then applied to B positions of a row in place of all of them.
            keywords["logits_to_keep"] = position_B
            position_B = rows_B
        logits_BLV = model.call(Visible(), keywords)[0].astype(model.output)
        logits_BV: Array = logits_BLV[rows_B, position_B]
        return sharding.constrain(logits_BV, "batch", "vocab")


def build_network(
    model: Any,
    mesh: jax.sharding.Mesh,
    dtypes: spec.Precision = "fp32",
    lora: spec.Lora | None = None,
) -> Network:
    """Return the network of a model. Raises SpecError for one that does not predict tokens.

    Args:
        model: Model of the job.
        mesh: Devices.
        dtypes: Precision of weights and products.
        lora: Adapters that a model of transformers has; those of others are merged before.
    """
    if isinstance(model, spec.TransformersModel):
        return ModuleNetwork(model, mesh, dtypes, lora)
    return Network(model, mesh, dtypes)
