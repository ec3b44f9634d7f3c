"""Attention by the name of its implementation. What auto is, trainer/attention/availability decides; here it is xla.

| name | where | what |
|---|---|---|
| xla | everywhere | the scores of all pairs, softmax in float32 |
| cudnn | CUDA devices, float16 and bfloat16 | cuDNN's fused kernel: no array of all pairs |
| splash | TPU, lengths that are multiples of 128 | JAX's Pallas kernel, which skips blocks that nothing sees |

It also says where each is available. B batch, L length, H query heads, G key and value heads,
K head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer.attention import placeholder_kernel
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import flops


class Visible(NamedTuple):
    """Which keys a query may see, within what causality leaves it. A field that is None restricts nothing."""

    mask_BL: Array | None = None  # no query sees a key whose mask is 0
    segments_BL: Array | None = None  # a query sees the keys of its own segment: rows of several examples
    lengths_B: Array | None = None  # no query sees a key at or after this position: rows padded at their end

    def as_keys(self) -> dict[str, Array]:
        """What is restricted, by the keys of an example."""
        named = zip(("attention_mask", "segments", "length"), self, strict=True)
        return {key: array for key, array in named if array is not None}

    def pairs_B1LL(self, length: int) -> Array | None:
        """All of it as one boolean mask [B, 1, L or 1, L], whose third axis is 1 where every query sees the same keys;
        None where all see all."""
        parts = []
        if self.mask_BL is not None:
            parts.append((self.mask_BL != 0)[:, None, None, :])
        if self.segments_BL is not None:
            parts.append(self.segments_BL[:, None, :, None] == self.segments_BL[:, None, None, :])
        if self.lengths_B is not None:
            parts.append(jnp.arange(length)[None, None, None, :] < self.lengths_B[:, None, None, None])
        return reduce(jnp.logical_and, parts) if parts else None

    @property
    def places_BL(self) -> Array | None:
        """Position of each token in its segment, from 0; None without segments."""
        if self.segments_BL is None:
            return None
        index_BL = jnp.broadcast_to(jnp.arange(self.segments_BL.shape[1])[None, :], self.segments_BL.shape)
        is_first_BL = jnp.diff(self.segments_BL, axis=1, prepend=self.segments_BL[:, :1] - 1) != 0
        return index_BL - jax.lax.cummax(jnp.where(is_first_BL, index_BL, 0), axis=1)


UNSEEN = -1e38  # a score: far below all others, and finite after a subtraction
FUSED = "fused"  # for plans; a job cannot name it
SPLASH = "splash"  # it names its result itself, with what its backward pass needs of it
MIXED = "mixed"  # the name by which remat may keep what attention makes
Keys = Array | Visible | None  # an array is a mask
# (query_BLHK, key_BLGK, value_BLGK, keys) -> out_BLHK; query head h reads key head h // (H / G).
# A query that sees no key takes the mean of some values, which is finite: its gradient does no harm where the loss
# gives it no weight.
Attention = Callable[[Array, Array, Array, Keys], Array]


def visible(keys: Keys) -> Visible:
    """`keys` as a Visible: an array is its mask."""
    return keys if isinstance(keys, Visible) else Visible(keys)


def causal(name: str, *, window: int | None = None, cap: float | None = None, scale: float | None = None) -> Attention:
    """The implementation `name`; a query sees the keys up to its own position. Raises SpecError for an unknown name.

    `window`: of these the last so many alone, its own included. Scores are times `scale`, default K^-½, and then
    within ±`cap` by a tanh.
    """
    attend = partial(_named(name), is_causal=True, window=window, cap=cap, scale=scale)

    def within_scope(query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, keys: Keys) -> Array:
        """`attend` in the scope by which its FLOPs are counted."""
        with jax.named_scope(flops.causal_scope(query_BLHK.shape[1], window)):
            return attend(query_BLHK, key_BLGK, value_BLGK, keys)

    return within_scope


def full(name: str) -> Attention:
    """The implementation `name`; every query sees every key. Raises SpecError for an unknown name."""
    return partial(_named(name), is_causal=False)


def _named(name: str) -> Callable[..., Array]:
    if name not in TRACED:
        raise SpecError(f"train.attention = {name!r} is not supported; use one of {', '.join(ATTENTION)}")
    kernel = TRACED[name]
    named = kernel if name == SPLASH else lambda *args, **keys: checkpoint_name(kernel(*args, **keys), MIXED)
    return jax.named_scope("attention")(named)  # the scope by which a profile recognizes it


def _xla(
    query_BLHK: Array,
    key_BLGK: Array,
    value_BLGK: Array,
    keys: Keys,
    *,
    is_causal: bool,
    window: int | None = None,
    cap: float | None = None,
    scale: float | None = None,
) -> Array:
    """Scores and softmax in float32. Heads come first, each a matrix of its own, and the queries carry the scale: half
    the time on a CPU of jax.nn's, which scales the scores and leaves the order to the products."""
    mask_B1LL = visible(keys).pairs_B1LL(key_BLGK.shape[1])
    batch, length, heads, size = query_BLHK.shape
    groups, dtype = key_BLGK.shape[2], query_BLHK.dtype
    operands = query_BLHK * (size**-0.5 if scale is None else scale), key_BLGK, value_BLGK
    if dtype == jnp.float16 and jax.default_backend() == "cpu":  # XLA has no such product on CPU
        operands = jax.tree.map(lambda operand: operand.astype(jnp.float32), operands)
    query_BHLK, key_BGLK, value_BGLK = (operand.swapaxes(1, 2) for operand in operands)
    rows, sharing = heads // groups * length, heads // groups  # R: the queries that read the same keys
    query_BGRK = query_BHLK.reshape(batch, groups, rows, size)
    scores_BGRL = jnp.einsum("bgrk,bglk->bgrl", query_BGRK, key_BGLK, preferred_element_type=jnp.float32)
    if cap is not None:
        scores_BGRL = cap * jnp.tanh(scores_BGRL / cap)
    if is_causal:
        seen_LL = jnp.tri(length, dtype=bool)
        if window is not None and window < length:
            seen_LL &= ~jnp.tri(length, k=-window, dtype=bool)
        scores_BGRL = jnp.where(jnp.tile(seen_LL, (sharing, 1)), scores_BGRL, UNSEEN)
    if mask_B1LL is not None:
        mask_B1RL = mask_B1LL if mask_B1LL.shape[2] == 1 else jnp.tile(mask_B1LL, (1, 1, sharing, 1))
        scores_BGRL = jnp.where(mask_B1RL, scores_BGRL, UNSEEN)
    shares_BGRL = jax.nn.softmax(scores_BGRL).astype(value_BGLK.dtype)
    mixed_BGRK = jnp.einsum("bgrl,bglk->bgrk", shares_BGRL, value_BGLK)
    return mixed_BGRK.reshape(batch, heads, length, size).swapaxes(1, 2).astype(dtype)


def _cudnn(
    query_BLHK: Array,
    key_BLGK: Array,
    value_BLGK: Array,
    keys: Keys,
    *,
    is_causal: bool,
    window: int | None = None,
    cap: float | None = None,
    scale: float | None = None,
) -> Array:
    """cuDNN reads a mask as an array of all pairs; lengths need no such array, and it computes nothing past them.

    Raises ValueError for a cap, which it does not have.
    """
    if cap is not None:
        raise ValueError("cuDNN's kernel does not support score_cap")
    seen, length = visible(keys), query_BLHK.shape[1]
    mask_BLL, lengths_B = None, seen.lengths_B
    if seen.mask_BL is not None or seen.segments_BL is not None:
        mask_BLL, lengths_B = seen.pairs_B1LL(length), None
    # JAX refuses every odd length in training, as if there were a mask (0.10.2, 0.11.2): one more that is not seen.
    odd = length % 2
    if odd and mask_BLL is None and lengths_B is None and not is_causal:
        lengths_B = jnp.full(query_BLHK.shape[0], length, jnp.int32)
    query_BLHK, key_BLGK, value_BLGK = (
        jnp.pad(each, ((0, 0), (0, odd), (0, 0), (0, 0))) for each in (query_BLHK, key_BLGK, value_BLGK)
    )
    if mask_BLL is not None:
        mask_BLL = jnp.broadcast_to(mask_BLL, (*mask_BLL.shape[:2], length, length))
        mask_BLL = jnp.pad(mask_BLL, ((0, 0), (0, 0), (0, odd), (0, odd)))
    if lengths_B is not None:
        lengths_B = jnp.clip(lengths_B.astype(jnp.int32), 1, length)  # a row of no keys has no softmax
    with jax.numpy_dtype_promotion("standard"):
        mixed_BLHK: Array = jax.nn.dot_product_attention(
            query_BLHK,
            key_BLGK,
            value_BLGK,
            mask=mask_BLL,
            is_causal=is_causal,
            query_seq_lengths=lengths_B,
            key_value_seq_lengths=lengths_B,
            scale=scale,
            local_window_size=None if window is None or window >= length else (window - 1, 0),
            implementation="cudnn",
        )
    return mixed_BLHK[:, :length]


def _splash(
    query_BLHK: Array,
    key_BLGK: Array,
    value_BLGK: Array,
    keys: Keys,
    *,
    is_causal: bool,
    window: int | None = None,
    cap: float | None = None,
    scale: float | None = None,
) -> Array:
    """Keys that no query may see get a segment of their own."""
    seen, (batch, length) = visible(keys), query_BLHK.shape[:2]
    ids = None
    if any(each is not None for each in seen):
        own_BL = jnp.zeros((batch, length), jnp.int32) if seen.segments_BL is None else seen.segments_BL
        is_seen_B11L = Visible(seen.mask_BL, None, seen.lengths_B).pairs_B1LL(length)
        key_BL = own_BL if is_seen_B11L is None else jnp.where(is_seen_B11L[:, 0, 0], own_BL, -1)
        ids = own_BL.astype(jnp.int32), key_BL.astype(jnp.int32)
    from jaxlaunch.trainer.attention import splash  # Pallas takes half a second to import

    scores = splash.Scores(is_causal, window, cap, scale)
    return splash.attend(query_BLHK, key_BLGK, value_BLGK, ids, scores, name=MIXED)


ATTENTION: dict[str, Callable[..., Array]] = {"auto": _xla, "xla": _xla, "cudnn": _cudnn, SPLASH: _splash}
TRACED = {**ATTENTION, FUSED: placeholder_kernel.fused(_xla)}
