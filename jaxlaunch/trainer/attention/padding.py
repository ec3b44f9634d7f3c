"""Which tokens of a row are text, and which fill it up: one answer for the loss, routers, counts and speeds.

A row tells by the keys that it has, of those that trainer/tasks/lm lists. Functions of arrays of numpy or JAX.

B batch, L length, T = L + 1 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Mapping[str, Any]  # by the names of an example's keys, [B, ...]


def real_tokens(batch: Arrays) -> Any:
    """Return which of `tokens` [B, T] are text: boolean, [B, T].

    None of a row of `weight` 0, where `attention_mask` is 0, or from `length` on; nor of a segment numbered 0 or less,
    in which nothing is predicted. Segments may be counted from 0 all the same: without a `mask` [B, T - 1] such a
    number is a segment's where the row begins with it. Of a row that has its mask alone, nothing behind the last target
    is: no one reads it.
    """
    shape, xp = batch["tokens"].shape, np if isinstance(batch["tokens"], np.ndarray) else jnp
    index_1T, real_BT = np.arange(shape[1], dtype=np.int32)[None, :], xp.ones(shape, bool)
    if (seen_BT := batch.get("attention_mask")) is not None:
        real_BT = real_BT & (seen_BT != 0)
    if (length_B := batch.get("length")) is not None:
        real_BT = real_BT & (index_1T < length_B[:, None])
    mask_BL, segments_BT = batch.get("mask"), batch.get("segments")
    if segments_BT is not None:
        for fills_BT in (segments_BT == 0, segments_BT < 0):
            is_predicted_BL = fills_BT[:, 1:] & fills_BT[:, :-1]
            is_text_B1 = fills_BT[:, :1] if mask_BL is None else (is_predicted_BL & (mask_BL != 0)).any(1)[:, None]
            real_BT = real_BT & (~fills_BT | is_text_B1)
    elif mask_BL is not None and seen_BT is None and length_B is None:
        last_B1 = ((mask_BL != 0).astype(np.int32) * index_1T[:, 1:]).max(1)[:, None]
        real_BT = real_BT & (index_1T <= last_B1) & (last_B1 > 0)
    if (weight_B := batch.get("weight")) is not None:
        real_BT = real_BT & (weight_B != 0)[:, None]
    return real_BT


def read(batch: Arrays) -> Any:
    """Return which of the tokens that a model reads, all but the last of a row, count: boolean, [B, T - 1].

    Those that are text, but for the last of it: where a row is filled up a model reads that too, and where it is not it
    does not.
    """
    real_BT = real_tokens(batch)
    index_1T = np.arange(real_BT.shape[1], dtype=np.int32)[None, :]
    last_B1 = (real_BT.astype(np.int32) * index_1T).max(1)[:, None]
    return (real_BT & (index_1T < last_B1))[:, :-1]


def targets(batch: Arrays) -> Any:
    """Return which of `tokens` [B, T] but the first are predicted: boolean, [B, T - 1].

    Those where the `mask` is not 0, if there is one, that are text and follow text of their own segment.
    """
    real_BT = real_tokens(batch)
    is_target_BL = real_BT[:, 1:] & real_BT[:, :-1]
    if (segments_BT := batch.get("segments")) is not None:
        is_target_BL = is_target_BL & (segments_BT[:, 1:] == segments_BT[:, :-1])
    if (mask_BL := batch.get("mask")) is not None:
        is_target_BL = is_target_BL & (mask_BL != 0)
    return is_target_BL


def rows(batch: Arrays) -> dict[str, Any]:
    """Split examples of several rows, such as pairs [B, 2, T], into [B × 2, T], each with its example's weight."""
    if batch["tokens"].ndim == 2:
        return dict(batch)
    count = math.prod(batch["tokens"].shape[1:-1])
    split = {key: array.reshape(-1, *array.shape[2:]) for key, array in batch.items() if key != "weight"}
    return split | ({"weight": jnp.repeat(batch["weight"], count)} if "weight" in batch else {})


def counted(batch: Arrays) -> jax.Array:
    """Return how many tokens of a batch are `read`, an int32 scalar, by those of its keys that have the right shape."""
    split = rows(batch)
    size, length = split["tokens"].shape
    shapes: dict[str, tuple[int, ...]] = {key: (size, length) for key in ("tokens", "attention_mask", "segments")}
    shapes |= {"mask": (size, length - 1), "length": (size,), "weight": (size,)}
    known = {key: split[key] for key, shape in shapes.items() if key in split and split[key].shape == shape}
    return jnp.asarray(read(known)).sum(dtype=jnp.int32)
