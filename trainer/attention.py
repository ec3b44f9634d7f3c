"""Causal attention by the name of its implementation. Only xla is built; auto takes the best that is.

B batch, L length, H query heads, G key and value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array

from trainer.errors import SpecError

Attention = Callable[[Array, Array, Array], Array]


def causal(name: str) -> Attention:
    """The implementation called `name`: (query_BLHK, key_BLGK, value_BLGK) -> out_BLHK. Raises SpecError for others."""
    if name not in ATTENTION:
        raise SpecError(f"train.attention = {name!r} is not supported; use one of {', '.join(ATTENTION)}")
    return ATTENTION[name]


def _xla(query_BLHK: Array, key_BLGK: Array, value_BLGK: Array) -> Array:
    """Scores and softmax in float32; query head h reads key head h // (H / G)."""
    return jax.nn.dot_product_attention(query_BLHK, key_BLGK, value_BLGK, is_causal=True, implementation="xla")


ATTENTION: dict[str, Attention] = {"auto": _xla, "xla": _xla}
