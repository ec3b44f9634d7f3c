"""Masks of the tokens that are text and not padding.

The masks are derived from the keys of an example, which trainer/tasks/lm.py describes. The
functions accept NumPy and JAX arrays.

B batch, L length, T = L + 1 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Arrays [B, ...] by the keys of an example.
Arrays = Mapping[str, Any]


def real_tokens(batch: Arrays) -> Any:
    """Return which of `tokens` [B, T] are text, as a boolean array [B, T].

    Tokens are padding in rows of `weight` 0, where `attention_mask` is 0, and from `length` on. A
    segment with a number of 0 or less is padding if none of its tokens is predicted. Without a
    `mask` [B, T - 1] it counts as text if the row begins with it, because segments may be counted
    from 0. If a row has only a mask, the tokens after its last target are padding, because they do
    not affect the loss.
    """
    shape, xp = batch["tokens"].shape, np if isinstance(batch["tokens"], np.ndarray) else jnp
    index_T, real_BT = np.arange(shape[1], dtype=np.int32), xp.ones(shape, bool)
    if (visible_BT := batch.get("attention_mask")) is not None:
        real_BT = real_BT & (visible_BT != 0)
    if (length_B := batch.get("length")) is not None:
        real_BT = real_BT & (index_T[None, :] < length_B[:, None])
    mask_BL, segments_BT = batch.get("mask"), batch.get("segments")
    if segments_BT is not None:
        for is_unnumbered_BT in (segments_BT == 0, segments_BT < 0):
            is_text_B1 = is_unnumbered_BT[:, :1]
            if mask_BL is not None:
                is_predicted_BL = (
                    is_unnumbered_BT[:, 1:] & is_unnumbered_BT[:, :-1] & (mask_BL != 0)
                )
                is_text_B1 = is_predicted_BL.any(1)[:, None]
            real_BT = real_BT & (~is_unnumbered_BT | is_text_B1)
    elif mask_BL is not None and visible_BT is None and length_B is None:
        last_B1 = _last_index(mask_BL != 0, index_T[1:])
        real_BT = real_BT & (index_T[None, :] <= last_B1) & (last_B1 > 0)
    if (weight_B := batch.get("weight")) is not None:
        real_BT = real_BT & (weight_B != 0)[:, None]
    return real_BT


def input_mask(batch: Arrays) -> Any:
    """Return which input tokens are counted as text, as a boolean array [B, T - 1].

    These are the text tokens of a row except for the last one. The last one is an input only if
    padding follows it, so leaving it out makes the count independent of padding.
    """
    real_BT = real_tokens(batch)
    index_T = np.arange(real_BT.shape[1], dtype=np.int32)
    return (real_BT & (index_T[None, :] < _last_index(real_BT, index_T)))[:, :-1]


def _last_index(is_set_BX: Any, index_X: Any) -> Any:
    """Return the index of the last true value of each row, [B, 1], or 0 if there is none."""
    return (is_set_BX.astype(np.int32) * index_X[None, :]).max(1)[:, None]


def target_mask(batch: Arrays) -> Any:
    """Return which tokens after the first are predicted, as a boolean array [B, T - 1].

    A target is text that follows text of its own segment, and whose `mask`, if any, is not 0.
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
    """Return the number of tokens in `input_mask`, an int32 scalar.

    Keys of unexpected shapes, which belong to a task of the user, are ignored.
    """
    rows = split_rows(batch)
    size, length = rows["tokens"].shape
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("tokens", "attention_mask", "segments"), (size, length)
    )
    shapes |= {"mask": (size, length - 1), "length": (size,), "weight": (size,)}
    valid = {key: array for key, array in rows.items() if array.shape == shapes.get(key)}
    return jnp.asarray(input_mask(valid)).sum(dtype=jnp.int32)
