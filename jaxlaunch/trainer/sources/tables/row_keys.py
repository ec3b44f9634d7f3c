"""Hashes table rows, so that equal rows and the rows of a group are in the same split.

N rows, K numbers of a column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.order import hash_uint64
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.tables.features import is_missing_value
from jaxlaunch.trainer.sources.tables.files import Column, Columns, parse_number


def row_keys(table: Columns, names: Sequence[str]) -> splits.Keys:
    """Return the hash of each row's values in these columns, independent of their order."""
    key_N = np.zeros(len(table), np.uint64)
    for name in names:
        column_key = np.uint64(splits.hash_text(name))
        key_N += hash_uint64(_value_keys(table.values[name]) ^ column_key, splits.GOLDEN)
    return key_N


def group_keys(table: Columns, name: str) -> splits.Keys:
    """Return the hash of each row's group. Raises DataError for a row without one."""
    values = table.values[name]
    is_object = values.dtype.kind == "O"
    is_missing = [is_missing_value(value) for value in values] if is_object else np.isnan(values)
    for row in np.flatnonzero(np.reshape(is_missing, (len(values), -1)).any(1))[:1].tolist():
        fault = f"its group {name!r} is empty"
        raise DataError(f"{table.locate_row(row)}: {fault}; name one, or remove the row")
    return _value_keys(values)


def _value_keys(values: Column) -> splits.Keys:
    """Return the hash of each value [N, …]. Numbers have the same hash in any file format."""
    if values.dtype.kind != "O":
        return _number_keys(values.reshape(len(values), -1).astype(np.float64))
    parsed = [parse_number(value) for value in values]
    is_text_N = np.array([number is None for number in parsed], bool)
    key_N = _number_keys(np.array([0 if n is None else n for n in parsed], np.float64)[:, None])
    key_by_text = {text: splits.hash_value(text) for text in {*values[is_text_N].tolist()}}
    key_N[is_text_N] = [key_by_text[text] for text in values[is_text_N]]
    return key_N


def _number_keys(x_NK: npt.NDArray[np.float64]) -> splits.Keys:
    # Zero and NaN have several representations.
    canonical_NK = np.where(np.isnan(x_NK), np.nan, x_NK + 0.0)
    bits_NK = canonical_NK.view(np.uint64)
    key_N = np.zeros(len(x_NK), np.uint64)
    for column in range(x_NK.shape[1]):
        key_N = hash_uint64(key_N ^ bits_NK[:, column], splits.GOLDEN)
    return key_N
