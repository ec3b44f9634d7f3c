"""The interface of a model of tokens: features, then logits, so that a loss may compute the logits in parts.

B batch, L length, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.attention.implementations import Keys
from jaxlaunch.trainer.models.options import ModelOptions
from jaxlaunch.trainer.parallel.sharding import constrain


class Features(NamedTuple):
    """What a model makes of tokens before it computes logits."""

    x_BLD: Array  # the normalized stream after the last layer
    penalty: Array | None = None  # a mean over the tokens, which training adds to the loss
    means: Mapping[str, Array] = {}  # metrics by name


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
        """Logits_BLV in the output dtype; position l sees the positions 0..l that `keys` leaves visible."""
        return self.project(self.features(tokens_BL, keys), self.head_DV)

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """The normalized stream x_BLD, of which the logits are a product with the head."""
        raise NotImplementedError

    def read(self, tokens_BL: Array, keys: Keys = None, real_BL: Array | None = None) -> Features:
        """The features, and what the loss adds and reports beside the logits, of the tokens that `real_BL` says are
        text."""
        return Features(self.features(tokens_BL, keys))

    def stream(self, tokens_BL: Array, places_BL: Array | None = None) -> Array:
        """The stream x_BLD before the first layer, of tokens at these places, by default 0 to L - 1."""
        raise NotImplementedError

    def embedded(self, tokens_BL: Array) -> Array:
        """The tokens' rows of the embedding, x_BLD.

        Looked up in whole rows: a table split along D would give a stream split along D and copied along B.
        """
        return jnp.take(self.table_VD, tokens_BL, axis=0)

    @property
    def table_VD(self) -> Array:
        """The embedding [V, D] with its rows whole: the lookup and a tied head then share one copy of it."""
        return constrain(self.embedding[...], "vocab", "embed")

    @property
    def head_DV(self) -> Array:
        """The output matrix [D, V] with its columns whole.

        A loss in chunks would otherwise gather a head split along D once for every chunk.
        """
        return self.table_VD.T if self.head is None else constrain(self.head[...], "embed", "vocab")

    def project(self, x_BLD: Array, head_DV: Array) -> Array:
        """Features times the head, within the cap of the logits: logits_BLV in the output dtype."""
        logits_BLV = jnp.matmul(x_BLD, head_DV, preferred_element_type=self.output)
        if self.cap is not None:
            logits_BLV = self.cap * jnp.tanh(logits_BLV / self.cap)
        return constrain(logits_BLV, "batch", "length", "vocab")
