"""Checks of the numbers in examples: exact conversion, and the ranges that a model accepts.

On a device a label out of range makes the loss NaN, and a token out of range reads another row of
the embedding. Neither shows which example is wrong, so the checks are made on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.attention import padding
from jaxlaunch.trainer.data.examples import Batch, UnusableExampleError

INT32 = np.iinfo(np.int32)


def get_value(raw: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of a record. Raises UnusableExampleError if it is missing."""
    if key not in raw:
        keys = ", ".join(sorted(map(str, raw))) or "nothing"
        raise UnusableExampleError(f"no {key}, which the task reads; it has {keys}")
    return raw[key]


def read_integers(key: str, value: Any) -> npt.NDArray[np.int32]:
    """Convert `value` to int32. Raises UnusableExampleError for anything but whole numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UnusableExampleError(f"{key} of {array.dtype}; it is made of whole numbers")
    if array.dtype.kind == "f":
        is_wrong = ~(np.isfinite(array) & (array == np.trunc(array)))
        if is_wrong.any():
            raise UnusableExampleError(f"{key} {array[is_wrong].flat[0]}, not a whole number")
    if array.dtype.itemsize >= 4 and array.dtype != np.int32:
        is_wrong = (array < INT32.min) | (array > INT32.max)
        if is_wrong.any():
            wrong = array[is_wrong].flat[0]
            raise UnusableExampleError(f"{key} {wrong}, too large for the int32 it becomes")
    return array.astype(np.int32)


def read_class(value: Any) -> npt.NDArray[np.int32]:
    """Convert a label, one number of any shape, to an int32 scalar.

    Raises UnusableExampleError for any other label.
    """
    array = np.asarray(value)
    if array.size == 1:
        return read_integers("label", array).reshape(())
    is_row = array.ndim == 1 and array.dtype.kind in "biuf"
    is_one_hot = is_row and array.sum() == 1 and np.count_nonzero(array) == 1
    hint = f"; it looks one-hot: its class is {int(array.argmax())}" if is_one_hot else ""
    raise UnusableExampleError(
        f"a label of shape {list(array.shape)}, but a label is one whole number, the class{hint}"
    )


def read_flags(value: Any) -> npt.NDArray[np.float32]:
    """Convert a label of 0 or 1 for each class to float32.

    Raises UnusableExampleError for any other label.
    """
    array = read_numbers(value)
    if array.ndim != 1 or not np.isin(array, (0.0, 1.0)).all():
        raise UnusableExampleError(
            f"a label of shape {list(array.shape)}, from {array.min()} to {array.max()}, but with "
            "loss.target = multi_label a label is 0 or 1 for each class, [classes]"
        )
    return array


def read_numbers(value: Any) -> npt.NDArray[np.float32]:
    """Convert a label of finite numbers, [] or [K], to float32.

    Raises UnusableExampleError for any other label.
    """
    array = np.asarray(value)
    is_wrong = array.dtype.kind not in "biuf" or array.ndim > 1 or not array.size
    if is_wrong or not np.isfinite(array).all():
        raise UnusableExampleError(
            f"a label {array.ravel()[:3].tolist()} of {array.dtype}{list(array.shape)}, not "
            "finite numbers"
        )
    return array.astype(np.float32)


def read_labels(value_B: npt.NDArray[Any], target: str) -> npt.NDArray[Any]:
    """Convert the labels of a batch of examples, [B] or [B, K], as the functions above do."""
    if target == "class":
        return read_integers("label", value_B)
    label_B = np.asarray(value_B, np.float32)
    is_wrong = target == "multi_label" and not np.isin(label_B, (0.0, 1.0)).all()
    if is_wrong or not np.isfinite(label_B).all():
        raise UnusableExampleError("a label that cannot be used")
    return label_B


def find_outside(
    key: str, array_BX: npt.NDArray[Any], size: int, description: str
) -> tuple[int, str] | None:
    """Return the first row with a number that is not in range(size), and a sentence, or None."""
    if not array_BX.size or (array_BX.min() >= 0 and array_BX.max() < size):
        return None
    reason = f"outside 0 to {size - 1}, {description}"
    return find_wrong(key, array_BX, (array_BX < 0) | (array_BX >= size), reason)


def find_wrong(
    key: str, array_BX: npt.NDArray[Any], wrong_BX: npt.NDArray[np.bool_], reason: str
) -> tuple[int, str] | None:
    """Return the first row with a wrong number and a sentence about the number, or None."""
    if not wrong_BX.any():
        return None
    row, *index = np.argwhere(wrong_BX)[0].tolist()
    place_text = f" at place {index[0]}" if index else ""
    return row, f"{key} {array_BX[(row, *index)]}{place_text}, {reason}"


def find_counted_tokens(
    batch: Batch, rows: npt.NDArray[np.intp], *, include_read: bool
) -> npt.NDArray[np.bool_]:
    """Return which tokens [B, L + 1] are targets, and with `include_read` also which are inputs.

    A token is an input if a query that predicts a target sees it. The targets are those of the loss
    in trainer/tasks/lm.py. Only `rows` are computed; the others are False.
    """
    counts_BT = np.zeros(batch["tokens"].shape, bool)
    if not len(rows):
        return counts_BT
    batch_R = {key: array[rows] for key, array in batch.items()}
    real_RT, is_target_RL = padding.real_tokens(batch_R), padding.target_mask(batch_R)
    counts_BT[rows, 1:] = is_target_RL
    if include_read:
        # A token is seen by the queries at and after its position in its segment, so it is an input
        # up to the last query of the segment that predicts a target.
        index_T = np.arange(real_RT.shape[1])
        for row, real_T, is_target_L in zip(rows, real_RT, is_target_RL, strict=True):
            numbers_T = batch["segments"][row] if "segments" in batch else np.zeros_like(index_T)
            segment_T = np.unique(numbers_T, return_inverse=True)[1]
            last_S = np.full(segment_T.max() + 1, -1)
            np.maximum.at(last_S, segment_T[:-1], np.where(is_target_L, index_T[:-1], -1))
            counts_BT[row] |= (index_T <= last_S[segment_T]) & real_T
    return counts_BT
