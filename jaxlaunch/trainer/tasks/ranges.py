"""Integers of examples: read without loss, and within the range of a model. On the host, before they reach a device.

On a device a label out of range makes the loss NaN, and a token reads another's row: neither says which example it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.attention import padding
from jaxlaunch.trainer.data.examples import Batch, Unusable

INT32 = np.iinfo(np.int32)


def of(raw: Mapping[str, Any], key: str) -> Any:
    """The value of a key of a record. Raises Unusable without it."""
    if key not in raw:
        raise Unusable(f"no {key}, which the task reads; it has {', '.join(sorted(map(str, raw))) or 'nothing'}")
    return raw[key]


def whole(key: str, value: Any) -> npt.NDArray[np.int32]:
    """`value` as int32, of the same shape. Raises Unusable where it holds anything but whole numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise Unusable(f"{key} of {array.dtype}; it is made of whole numbers")
    if array.dtype.kind == "f":
        is_wrong = ~(np.isfinite(array) & (array == np.trunc(array)))
        if is_wrong.any():
            raise Unusable(f"{key} {array[is_wrong].flat[0]}, not a whole number")
    if array.dtype.itemsize >= 4 and array.dtype != np.int32:
        is_wrong = (array < INT32.min) | (array > INT32.max)
        if is_wrong.any():
            raise Unusable(f"{key} {array[is_wrong].flat[0]}, too large for the int32 it becomes")
    return array.astype(np.int32)


def label(value: Any) -> npt.NDArray[np.int32]:
    """A label as an int32 scalar: one number, in whatever shape. Raises Unusable for any other."""
    array = np.asarray(value)
    if array.size == 1:
        return whole("label", array).reshape(())
    is_one_hot = array.ndim == 1 and array.dtype.kind in "biuf" and array.sum() == 1 and np.count_nonzero(array) == 1
    hint = f"; it looks one-hot: its class is {int(array.argmax())}" if is_one_hot else ""
    raise Unusable(f"a label of shape {list(array.shape)}, but a label is one whole number, the class{hint}")


def flags(value: Any) -> npt.NDArray[np.float32]:
    """A label that says yes or no for each class, as float32. Raises Unusable for numbers other than 0 and 1."""
    array = numbers(value)
    if array.ndim != 1 or not np.isin(array, (0.0, 1.0)).all():
        raise Unusable(
            f"a label of shape {list(array.shape)}, from {array.min()} to {array.max()}, but with loss.target = "
            "multi_label a label is 0 or 1 for each class, [classes]"
        )
    return array


def numbers(value: Any) -> npt.NDArray[np.float32]:
    """A label of numbers as float32, its shape [] or [K]. Raises Unusable for what is no finite number."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.ndim > 1 or not array.size or not np.isfinite(array).all():
        raise Unusable(f"a label {array.ravel()[:3].tolist()} of {array.dtype}{list(array.shape)}, not finite numbers")
    return array.astype(np.float32)


def many(value_B: npt.NDArray[Any], target: str) -> npt.NDArray[Any]:
    """Labels of many examples at once, [B] or [B, K], as `label`, `flags` or `numbers` reads each; raises Unusable."""
    if target == "class":
        return whole("label", value_B)
    label_B = np.asarray(value_B, np.float32)
    if not np.isfinite(label_B).all() or (target == "multi_label" and not np.isin(label_B, (0.0, 1.0)).all()):
        raise Unusable("a label that cannot be used")
    return label_B


def outside(key: str, array_BX: npt.NDArray[Any], size: int, what: str) -> tuple[int, str] | None:
    """The first row with a number outside 0 … size − 1 (`what` these are), and a sentence on it; None without one."""
    if not array_BX.size or (array_BX.min() >= 0 and array_BX.max() < size):
        return None
    return first(key, array_BX, (array_BX < 0) | (array_BX >= size), f"outside 0 to {size - 1}, {what}")


def first(key: str, array_BX: npt.NDArray[Any], wrong_BX: npt.NDArray[np.bool_], why: str) -> tuple[int, str] | None:
    """The first row of which something is wrong, and a sentence that names the number; None where nothing is."""
    if not wrong_BX.any():
        return None
    row, *place = np.argwhere(wrong_BX)[0].tolist()
    return row, f"{key} {array_BX[row, *place]}{f' at place {place[0]}' if place else ''}, {why}"


def counting(batch: Batch, rows: npt.NDArray[np.intp], *, seen: bool) -> npt.NDArray[np.bool_]:
    """Which tokens of these rows [B, L + 1] are predicted or, if `seen`, read by a position that predicts one.

    As the loss of trainer/tasks/lm weighs them; `batch` has its keys. Other rows are False.
    """
    counts_BT = np.zeros(batch["tokens"].shape, bool)
    if len(rows):
        of_rows = {key: array[rows] for key, array in batch.items()}
        real_RT, weighs_RL = padding.real_tokens(of_rows), padding.targets(of_rows)
        for at, row in enumerate(rows):
            counts_BT[row] = _counting(batch.get("segments", counts_BT)[row], real_RT[at], weighs_RL[at], seen)
    return counts_BT


def _counting(
    numbers_T: npt.NDArray[Any], real_T: npt.NDArray[np.bool_], weighs_L: npt.NDArray[np.bool_], seen: bool
) -> npt.NDArray[np.bool_]:
    index_T, segment_T = np.arange(len(real_T)), np.unique(numbers_T, return_inverse=True)[1]
    counts_T = np.append(False, weighs_L)
    if seen:  # a key is read by the queries from its own position on, in its own segment, that predict something
        last_S = np.full(segment_T.max() + 1, -1)
        np.maximum.at(last_S, segment_T[:-1], np.where(weighs_L, index_T[:-1], -1))
        counts_T |= (index_T <= last_S[segment_T]) & real_T
    return counts_T
