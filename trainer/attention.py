"""Attention by the name of its implementation. Only xla is built; auto takes the best that is.

B batch, L length, H query heads, G key and value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from trainer.errors import SpecError

# (query_BLHK, key_BLGK, value_BLGK, mask_BL) -> out_BLHK. No query sees a key whose mask is 0; None: all may be seen.
Attention = Callable[[Array, Array, Array, Array | None], Array]


def causal(name: str) -> Attention:
    """The implementation called `name`; a query sees the keys up to its own place. Raises SpecError for others."""
    return partial(_named(name), is_causal=True)


def full(name: str) -> Attention:
    """The implementation called `name`; every query sees every key. Raises SpecError for others."""
    return partial(_named(name), is_causal=False)


def _named(name: str) -> Callable[..., Array]:
    if name not in ATTENTION:
        raise SpecError(f"train.attention = {name!r} is not supported; use one of {', '.join(ATTENTION)}")
    return jax.named_scope("attention")(ATTENTION[name])  # by which a profile knows it


def _xla(query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, mask_BL: Array | None, *, is_causal: bool) -> Array:
    """Scores and softmax in float32; query head h reads key head h // (H / G).

    A query that sees no key takes the mean of some values, which is finite: its gradient does no harm where the loss
    gives it no weight.
    """
    mask_B11L = None if mask_BL is None else (mask_BL != 0)[:, None, None, :]
    dtype = query_BLHK.dtype
    operands = query_BLHK, key_BLGK, value_BLGK
    if dtype == jnp.float16 and jax.default_backend() == "cpu":  # XLA has no such product there
        operands = jax.tree.map(lambda operand: operand.astype(jnp.float32), operands)
    with jax.numpy_dtype_promotion("standard"):  # its scores are float32 whatever the operands are
        mixed_BLHK: Array = jax.nn.dot_product_attention(
            *operands, mask=mask_B11L, is_causal=is_causal, implementation="xla"
        )
    return mixed_BLHK.astype(dtype)


ATTENTION: dict[str, Callable[..., Array]] = {"auto": _xla, "xla": _xla}
