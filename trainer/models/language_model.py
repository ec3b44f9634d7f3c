"""What a model of tokens is to its task: features, then logits, so that a loss may take the second in parts.

B batch, L length, D model, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from trainer.attention import Keys
from trainer.models.setting import Setting
from trainer.sharding import constrain


class LanguageModel(nnx.Module):
    """tokens_BL -> logits_BLV. Without a head of its own it takes the embedding's."""

    embedding: nnx.Param[Array]  # [V, D]
    head: nnx.Param[Array] | None  # [D, V]

    def __init__(self, setting: Setting) -> None:
        self.output, self.loss = setting.output, setting.loss
        self.deterministic = False  # nnx's name for evaluation

    def __call__(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """Logits_BLV in the output dtype; those of position l have seen those of 0..l that `keys` leaves visible."""
        return self.project(self.features(tokens_BL, keys), self.head_DV)

    def features(self, tokens_BL: Array, keys: Keys = None) -> Array:
        """What the logits are made of: the normalized stream x_BLD."""
        raise NotImplementedError

    def embedded(self, tokens_BL: Array) -> Array:
        """The tokens' rows of the embedding, x_BLD.

        Looked up in whole rows: a table split along D would give a stream split along D and copied along B.
        """
        return jnp.take(self.table_VD, tokens_BL, axis=0)

    @property
    def table_VD(self) -> Array:
        """The embedding with its rows whole: what looks up and a tied head then share one copy of it."""
        return constrain(self.embedding[...], "vocab", "embed")

    @property
    def head_DV(self) -> Array:
        """Whole columns: a loss in chunks would otherwise gather a head split along D once for every chunk."""
        return self.table_VD.T if self.head is None else constrain(self.head[...], "embed", "vocab")

    def project(self, x_BLD: Array, head_DV: Array) -> Array:
        """Features times the head: logits_BLV in the output dtype."""
        logits_BLV = jnp.matmul(x_BLD, head_DV, preferred_element_type=self.output)
        return constrain(logits_BLV, "batch", "length", "vocab")
