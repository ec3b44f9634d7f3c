"""The base class of language models: features of tokens, then logits.

Both are separate methods, so that a loss can compute the logits in chunks.

B batch, L length, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.attention.implementations import Keys
from jaxlaunch.trainer.models.experts import Routing
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.parallel.sharding import constrain, gather_weight
from jaxlaunch.trainer.spec import Loss

ArrayPair = tuple[Array, Array]


class Features(NamedTuple):
    """The outputs of a model before it computes logits.

    Attributes:
        x_BLD: The normalized residual stream after the last layer.
        routing: Sums over the routing of tokens to experts, which the loss needs.
    """

    x_BLD: Array
    routing: Routing | None = None


class SeparateHead(Protocol):
    """A model whose logits are a function of features and one matrix: a loss can chunk them."""

    output: jnp.dtype
    loss: Loss
    logit_cap: float | None
    deterministic: bool

    @property
    def head_DV(self) -> Array:
        """The gathered output matrix [D, V]."""

    def read(self, tokens_BL: Array, keys: Keys = None, real_BL: Array | None = None) -> Features:
        """Return the features of tokens."""

    def project(self, x_BLD: Array, head_DV: Array, output: jnp.dtype | None = None) -> Array:
        """Return the logits_BLV of features."""


class LanguageModel(nnx.Module):
    """A model that maps tokens_BL to logits_BLV.

    Attributes:
        embedding: The embedding [V, D].
        head: The output matrix [D, V], or None to use the embedding.
        blocks: The layers, with stacked parameters [layers, ...].
        norm: Normalization of the residual stream after the last layer.
        logit_cap: Bound of the logits, applied with a tanh.
    """

    embedding: nnx.Param[Array]
    head: nnx.Param[Array] | None
    blocks: nnx.Module
    norm: Callable[[Array], Array]

    def __init__(self, options: ModelOptions) -> None:
        self.output, self.loss = options.output, options.loss
        self.logit_cap: float | None = None
        # nnx's train() and eval() set the attribute of this name.
        self.deterministic = False

    def __call__(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return logits_BLV in the output dtype. A position sees the visible ones up to itself."""
        return self.project(self.features(tokens_BL, keys), self.head_DV)

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Return the normalized residual stream x_BLD after the last layer."""
        raise NotImplementedError

    def read(self, tokens_BL: Array, keys: Keys = None, real_BL: Array | None = None) -> Features:
        """Return the features and the routing, which counts the tokens where `real_BL` is true."""
        return Features(self.features(tokens_BL, keys))

    def embed_inputs(self, tokens_BL: Array, positions_BL: Array | None = None) -> Array:
        """Return the input x_BLD of the first layer; positions are 0 to L - 1 by default."""
        raise NotImplementedError

    def embed_tokens(self, tokens_BL: Array) -> Array:
        """Return the rows of the embedding for the tokens, x_BLD.

        By default the table is gathered, and its gradient is summed over the devices. If the table
        is larger than the rows that a device looks up, it is cheaper to exchange the rows: the
        devices that share a table look up each other's tokens in their own columns of it. A table
        that is also the head is gathered in any case.
        """
        vocab, width = self.embedding.shape
        mesh = jax.sharding.get_abstract_mesh()
        fsdp, ep, mp = (mesh.shape.get(axis, 1) for axis in ("fsdp", "ep", "mp"))
        tokens_per_device = tokens_BL.size // max(1, mesh.size // mp)
        is_table_larger = tokens_per_device < vocab // mp
        exchanges_rows = fsdp > 1 and ep == 1 and width % fsdp == 0 and is_table_larger
        if not exchanges_rows:
            return jnp.take(constrain(self.embedding[...], "vocab", "embed"), tokens_BL, axis=0)
        if self.head is None:
            return jnp.take(self.table_VD, tokens_BL, axis=0)
        tokens_BL = constrain(tokens_BL, "other_batch", "length")
        x_BLD = jnp.take(self.embedding[...], tokens_BL, axis=0)
        return constrain(x_BLD, "other_batch", "length", "columns")

    @property
    def table_VD(self) -> Array:
        """The gathered embedding [V, D], which the lookup shares with a tied head."""
        return gather_weight(self.embedding[...], "vocab", "embed")

    @property
    def head_DV(self) -> Array:
        """The gathered output matrix [D, V]. A loss in chunks gathers it only once."""
        if self.head is None:
            return self.table_VD.T
        return gather_weight(self.head[...], "embed", "vocab")

    def project(self, x_BLD: Array, head_DV: Array, output: jnp.dtype | None = None) -> Array:
        """Return the logits_BLV of features in dtype `output`, with the cap applied."""
        logits_BLV = _project_logits(x_BLD, head_DV, output or self.output)
        if self.logit_cap is not None:
            logits_BLV = self.logit_cap * jnp.tanh(logits_BLV / self.logit_cap)
        return constrain(logits_BLV, "batch", "length", "vocab")


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project_logits(x: Array, head_DV: Array, output: jnp.dtype) -> Array:
    """Return x [..., D] times the head.

    For x in bfloat16, the backward pass also multiplies in bfloat16.
    """
    return jnp.matmul(x, head_DV, preferred_element_type=output)


def _logits_forward(x: Array, head_DV: Array, output: jnp.dtype) -> tuple[Array, ArrayPair]:
    return _project_logits(x, head_DV, output), (x, head_DV)


def _logits_backward(output: jnp.dtype, residuals: ArrayPair, gradient: Array) -> ArrayPair:
    x, head_DV = residuals
    # Small gradients of logits would underflow in float16, so it keeps their own dtype.
    if x.dtype == jnp.bfloat16:
        gradient = gradient.astype(x.dtype)
    x_gradient = jnp.matmul(gradient, head_DV.T.astype(gradient.dtype)).astype(x.dtype)
    x_ND, gradient_NV = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    head_gradient = jnp.matmul(x_ND.T.astype(gradient.dtype), gradient_NV)
    return x_gradient, head_gradient.astype(head_DV.dtype)


_project_logits.defvjp(_logits_forward, _logits_backward)
