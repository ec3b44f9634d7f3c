"""Keys and values of the tokens that a layer has seen, so that one more token costs one token.

A cache is a ring: the token at index t of a row lies in slot t mod S. A layer with a window has as many slots as its
window, or as the row is long where that is less; the others have a slot for every token. All rows of a batch end at the
same index, so prompts are padded on the left: a row begins at the index `pad`, and sees nothing before it.

B batch, P tokens of the prompts, H query heads, G key and value heads, R query heads that share keys, K head size,
S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.attention.implementations import UNSEEN, Attention, Keys
from jaxlaunch.trainer.parallel.sharding import constrain


class Cache(NamedTuple):
    """Keys and values of one layer, heads first: each head's are a matrix of their own."""

    key_BGSK: Array
    value_BGSK: Array

    @classmethod
    def of(cls, key_BPGK: Array, value_BPGK: Array, slots: int) -> Cache:
        """The last `slots` tokens of the prompts, and empty slots where they are fewer."""
        return cls(_ring(key_BPGK, slots), _ring(value_BPGK, slots))

    def with_token(self, key_B1GK: Array, value_B1GK: Array, at: Array) -> Cache:
        """The same with the token at index `at` in place of the oldest."""
        slot = at % self.key_BGSK.shape[2]

        def put(ring_BGSK: Array, new_B1GK: Array) -> Array:
            new_BG1K = new_B1GK.swapaxes(1, 2)
            return held(jax.lax.dynamic_update_slice_in_dim(ring_BGSK, new_BG1K, slot, axis=2))

        return Cache(put(self.key_BGSK, key_B1GK), put(self.value_BGSK, value_B1GK))

    def seen_BS(self, at: Array, pad_B: Array) -> Array:
        """Which slots hold a token of the row, once the token at index `at` is in its slot."""
        slots = self.key_BGSK.shape[2]
        index_S = at - (at - jnp.arange(slots)) % slots  # of what a slot holds; below 0: nothing yet
        return index_S[None, :] >= pad_B[:, None]


def held(ring_BGSK: Array) -> Array:
    """A half of a cache, split over the mesh as the heads are."""
    return constrain(ring_BGSK, "batch", "kv_heads", "length", "head")


def _ring(each_BPGK: Array, slots: int) -> Array:
    each_BGPK, length = each_BPGK.swapaxes(1, 2), each_BPGK.shape[1]
    if length < slots:
        return held(jnp.pad(each_BGPK, ((0, 0), (0, 0), (0, slots - length), (0, 0))))
    return held(jnp.roll(each_BGPK[:, :, length - slots :], length % slots, axis=2))


class OfPrompts:
    """The attention of whole prompts; once it was called, `cache` holds their keys and values."""

    cache: Cache

    def __init__(self, plain: Attention, slots: int) -> None:
        self._plain, self._slots = plain, slots

    def __call__(self, query_BPHK: Array, key_BPGK: Array, value_BPGK: Array, keys: Keys) -> Array:
        self.cache = Cache.of(key_BPGK, value_BPGK, self._slots)
        return self._plain(query_BPHK, key_BPGK, value_BPGK, keys)


class OfToken:
    """The attention of one token a row, to itself and to those in `cache`, which then holds it too."""

    def __init__(self, cache: Cache, at: Array, pad_B: Array, *, scale: float | None, cap: float | None) -> None:
        self.cache, self._at, self._pad_B = cache, at, pad_B
        self._scale, self._cap = scale, cap

    def __call__(self, query_B1HK: Array, key_B1GK: Array, value_B1GK: Array, keys: Keys) -> Array:
        self.cache = self.cache.with_token(key_B1GK, value_B1GK, self._at)
        (batch, _, heads, size), groups, dtype = query_B1HK.shape, key_B1GK.shape[2], query_B1HK.dtype
        query_BGRK = query_B1HK.reshape(batch, groups, heads // groups, size)
        query_BGRK = query_BGRK * (size**-0.5 if self._scale is None else self._scale)
        scores_BGRS = jnp.einsum("bgrk,bgsk->bgrs", query_BGRK, self.cache.key_BGSK, preferred_element_type=jnp.float32)
        if self._cap is not None:
            scores_BGRS = self._cap * jnp.tanh(scores_BGRS / self._cap)
        seen_B11S = self.cache.seen_BS(self._at, self._pad_B)[:, None, None, :]
        shares_BGRS = jax.nn.softmax(jnp.where(seen_B11S, scores_BGRS, UNSEEN)).astype(dtype)
        mixed_BGRK = jnp.einsum("bgrs,bgsk->bgrk", shares_BGRS, self.cache.value_BGSK)
        return mixed_BGRK.reshape(batch, 1, heads, size).astype(dtype)
