"""The interface of a model of tokens: features, then logits, which a loss may chunk.

B batch, L length, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.attention.implementations import Keys
from jaxlaunch.trainer.models.experts import Routing
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.parallel.sharding import constrain, gather_weight

Pair = tuple[Array, Array]


class Features(NamedTuple):
    """The outputs of a model before it computes logits."""

    x_BLD: Array  # the normalized stream after the last layer
    routing: Routing | None = None  # of the tokens to experts, for the loss


class LanguageModel(nnx.Module):
    """tokens_BL -> logits_BLV. Without a head of its own it uses the embedding."""

    embedding: nnx.Param[Array]  # [V, D]
    head: nnx.Param[Array] | None  # [D, V]
    blocks: nnx.Module  # stacked: [layers, ...]
    norm: Callable[[Array], Array]  # of the stream after the last layer

    def __init__(self, options: ModelOptions) -> None:
        self.output, self.loss = options.output, options.loss
        self.cap: float | None = None  # bound of the logits
        self.deterministic = False  # nnx's name for evaluation

    def __call__(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return logits_BLV in the output dtype; position l sees the visible ones of 0..l."""
        return self.project(self.features(tokens_BL, keys), self.head_DV)

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return the normalized stream x_BLD after the last layer."""
        raise NotImplementedError

    def read(self, tokens_BL: Array, keys: Keys = None, real_BL: Array | None = None) -> Features:
        """Return the features, and the routing of the tokens in `real_BL`."""
        return Features(self.features(tokens_BL, keys))

    def embed_inputs(self, tokens_BL: Array, places_BL: Array | None = None) -> Array:
        """Return the stream x_BLD before the first layer; places are 0 to L - 1 by default."""
        raise NotImplementedError

    def embed_tokens(self, tokens_BL: Array) -> Array:
        """Return the tokens' rows of the embedding, x_BLD.

        Whole rows are looked up, and their gradient is summed over the devices. If the table is
        larger than the rows that a device looks up, exchanging the rows is cheaper: the devices
        that share a table then look up each other's tokens in their own columns of it. A table that
        is also the head is gathered in any case.
        """
        vocab, width = self.embedding.shape
        mesh = jax.sharding.get_abstract_mesh()
        fsdp, ep, mp = (mesh.shape.get(axis, 1) for axis in ("fsdp", "ep", "mp"))
        tokens = tokens_BL.size // max(1, mesh.size // mp)  # of a device
        is_larger = fsdp > 1 and ep == 1 and width % fsdp == 0 and tokens < vocab // mp
        if not is_larger:
            return jnp.take(constrain(self.embedding[...], "vocab", "embed"), tokens_BL, axis=0)
        if self.head is None:
            return jnp.take(self.table_VD, tokens_BL, axis=0)
        tokens_BL = constrain(tokens_BL, "other_batch", "length")
        x_BLD = jnp.take(self.embedding[...], tokens_BL, axis=0)
        return constrain(x_BLD, "other_batch", "length", "columns")

    @property
    def table_VD(self) -> Array:
        """The embedding [V, D] with whole rows, shared by the lookup and a tied head."""
        return gather_weight(self.embedding[...], "vocab", "embed")

    @property
    def head_DV(self) -> Array:
        """The output matrix [D, V], gathered once for all chunks of a loss."""
        if self.head is None:
            return self.table_VD.T
        return gather_weight(self.head[...], "embed", "vocab")

    def project(self, x_BLD: Array, head_DV: Array, output: jnp.dtype | None = None) -> Array:
        """Return features times the head, within the cap: logits_BLV in `output`."""
        logits_BLV = _project_logits(x_BLD, head_DV, output or self.output)
        if self.cap is not None:
            logits_BLV = self.cap * jnp.tanh(logits_BLV / self.cap)
        return constrain(logits_BLV, "batch", "length", "vocab")


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project_logits(x: Array, head_DV: Array, output: jnp.dtype) -> Array:
    """Return x [..., D] times the head; for bfloat16 x so are its gradients' products."""
    return jnp.matmul(x, head_DV, preferred_element_type=output)


def _logits_forward(x: Array, head_DV: Array, output: jnp.dtype) -> tuple[Array, Pair]:
    return _project_logits(x, head_DV, output), (x, head_DV)


def _logits_backward(output: jnp.dtype, residuals: Pair, gradient: Array) -> Pair:
    x, head_DV = residuals
    # float16 has no room for the small ones among the gradients of logits.
    if x.dtype == jnp.bfloat16:
        gradient = gradient.astype(x.dtype)
    rows, gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    x_gradient = jnp.matmul(gradient, head_DV.T.astype(gradient.dtype)).astype(x.dtype)
    return x_gradient, jnp.matmul(rows.T.astype(gradient.dtype), gradients).astype(head_DV.dtype)


_project_logits.defvjp(_logits_forward, _logits_backward)
