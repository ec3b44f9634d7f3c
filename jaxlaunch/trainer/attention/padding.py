"""Masks of the tokens that are text and not padding.

They follow from the keys of an example that trainer/tasks/lm describes. The functions accept
arrays of numpy or JAX.

B batch, L length, T = L + 1 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Mapping[str, Any]  # key of an example -> array [B, ...]


def real_tokens(batch: Arrays) -> Any:
    """Return which of `tokens` [B, T] are text, as a boolean array [B, T].

    Tokens are padding in a row of `weight` 0, where `attention_mask` is 0, and from `length` on. A
    segment numbered 0 or less is padding if nothing in it is predicted. Without a `mask` [B, T -
    1], such a segment counts as text if the row begins with it, since segments may be counted from
    0. If a row has only a mask, the tokens after its last target are padding, because they
    influence no loss.
    """
    shape, xp = batch["tokens"].shape, np if isinstance(batch["tokens"], np.ndarray) else jnp
    index_T, real_BT = np.arange(shape[1], dtype=np.int32), xp.ones(shape, bool)
    if (visible_BT := batch.get("attention_mask")) is not None:
        real_BT = real_BT & (visible_BT != 0)
    if (length_B := batch.get("length")) is not None:
        real_BT = real_BT & (index_T[None, :] < length_B[:, None])
    mask_BL, segments_BT = batch.get("mask"), batch.get("segments")
    if segments_BT is not None:
        for filler_BT in (segments_BT == 0, segments_BT < 0):
            is_text_B1 = filler_BT[:, :1]
            if mask_BL is not None:
                is_predicted_BL = filler_BT[:, 1:] & filler_BT[:, :-1] & (mask_BL != 0)
                is_text_B1 = is_predicted_BL.any(1)[:, None]
            real_BT = real_BT & (~filler_BT | is_text_B1)
    elif mask_BL is not None and visible_BT is None and length_B is None:
        last_B1 = _last_index(mask_BL != 0, index_T[1:])
        real_BT = real_BT & (index_T[None, :] <= last_B1) & (last_B1 > 0)
    if (weight_B := batch.get("weight")) is not None:
        real_BT = real_BT & (weight_B != 0)[:, None]
    return real_BT


def input_mask(batch: Arrays) -> Any:
    """Return which input tokens, all but the last of a row, count, as a boolean array [B, T - 1].

    These are the text tokens except for the last one. A model reads the last text token only in a
    padded row, so leaving it out makes the count independent of padding.
    """
    real_BT = real_tokens(batch)
    index_T = np.arange(real_BT.shape[1], dtype=np.int32)
    return (real_BT & (index_T[None, :] < _last_index(real_BT, index_T)))[:, :-1]


def _last_index(is_set_BX: Any, index_X: Any) -> Any:
    """Return the index of the last set place of each row, [B, 1]; 0 if none is set."""
    return (is_set_BX.astype(np.int32) * index_X[None, :]).max(1)[:, None]


def target_mask(batch: Arrays) -> Any:
    """Return which of `tokens` [B, T] after the first are predicted, as a boolean array [B, T - 1].

    A target is text that follows text of its own segment, and whose `mask` is not 0 if there is
    one.
    """
    real_BT = real_tokens(batch)
    is_target_BL = real_BT[:, 1:] & real_BT[:, :-1]
    if (segments_BT := batch.get("segments")) is not None:
        is_target_BL = is_target_BL & (segments_BT[:, 1:] == segments_BT[:, :-1])
    if (mask_BL := batch.get("mask")) is not None:
        is_target_BL = is_target_BL & (mask_BL != 0)
    return is_target_BL


def split_rows(batch: Arrays) -> dict[str, Any]:
    """Split examples of several rows, as pairs [B, 2, T], into [B × 2, T]."""
    if batch["tokens"].ndim == 2:
        return dict(batch)
    count = math.prod(batch["tokens"].shape[1:-1])
    return {
        key: jnp.repeat(array, count) if key == "weight" else array.reshape(-1, *array.shape[2:])
        for key, array in batch.items()
    }


def count_input_tokens(batch: Arrays) -> jax.Array:
    """Count the tokens in `input_mask`, an int32 scalar. Ignores keys of unexpected shapes."""
    rows = split_rows(batch)
    size, length = rows["tokens"].shape
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("tokens", "attention_mask", "segments"), (size, length)
    )
    shapes |= {"mask": (size, length - 1), "length": (size,), "weight": (size,)}
    valid = {key: array for key, array in rows.items() if array.shape == shapes.get(key)}
    return jnp.asarray(input_mask(valid)).sum(dtype=jnp.int32)
