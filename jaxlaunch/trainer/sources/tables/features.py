"""Encodes the columns of a table as features.

The encoding is fitted on the training rows and then applied to any table with the same columns:
numbers are scaled by mean and deviation, and texts are one-hot encoded.

N rows, F features, K numbers of a column.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.spelling import suggest_name
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images.index import list_names
from jaxlaunch.trainer.sources.tables import files
from jaxlaunch.trainer.sources.tables.files import Column, Columns, parse_number

# Maximum number of different values in a column of texts.
MAX_TEXT_VALUES = 100
Missing = Literal["stop", "mean"]
# The kind that a job declares for a column; a list has the values of an ordinal in their order.
ColumnKind = Literal["category", "date"] | list[Any]
# A deviation below this multiple of the largest number is a rounding error of equal numbers.
ROUNDING = 2 * np.finfo(np.float64).eps


class NumberStatistics(NamedTuple):
    """Mean and deviation of a column of numbers, [K]."""

    mean: Column
    deviation: Column


class Features:
    """The encoding of feature columns: statistics of numbers, or the ordered values of texts."""

    def __init__(
        self,
        columns: Mapping[str, NumberStatistics | tuple[str, ...]],
        missing: Missing,
        declared: Mapping[str, ColumnKind],
    ) -> None:
        self._columns, self._missing, self._declared = columns, missing, declared

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> Features:
        """Restore the features from their JSON form."""
        columns: dict[str, NumberStatistics | tuple[str, ...]] = {}
        for column in encoded["columns"]:
            if "values" in column:
                columns[column["name"]] = tuple(column["values"])
            else:
                numbers = NumberStatistics(np.array(column["mean"]), np.array(column["deviation"]))
                columns[column["name"]] = numbers
        return cls(columns, encoded["missing"], encoded.get("declared", {}))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, which preserves every bit of the numbers."""
        columns = [
            {"name": name, "mean": column.mean.tolist(), "deviation": column.deviation.tolist()}
            if isinstance(column, NumberStatistics)
            else {"name": name, "values": list(column)}
            for name, column in self._columns.items()
        ]
        declared = {"declared": dict(self._declared)} if self._declared else {}
        return {"columns": columns, "missing": self._missing, **declared}

    @property
    def text_columns(self) -> frozenset[str]:
        """The columns that are texts, even if another file has only digits in them."""
        columns = self._columns.items()
        texts = {name for name, column in columns if not isinstance(column, NumberStatistics)}
        return frozenset(texts | self._declared.keys())

    def read_features(self, table: Columns) -> tuple[npt.NDArray[np.float32], dict[int, str]]:
        """Return the features of every row, [N, F], and a fault for each invalid row, by its index.

        Raises DataError for a column that is missing or of another kind.
        """
        check_columns(table, [*self._columns])
        table = convert_declared(table, self._declared)
        faults: dict[int, str] = {}
        parts = [self._read_column(table, name, faults) for name in self._columns]
        return np.concatenate(parts, axis=1), faults

    def read_valid(self, table: Columns) -> npt.NDArray[np.float32]:
        """Return the features of every row, [N, F]. Raises DataError for a row with a fault."""
        x_NF, faults = self.read_features(table)
        if faults:
            row, hint = min(faults), ", or set data.missing: mean where values are missing"
            hint = f"fix the row{'' if self._missing == 'mean' else hint}"
            fault = f"{table.locate_row(row)}: {faults[row]}"
            raise DataError(f"{fault}; {hint}, or leave the column out of data.columns")
        return x_NF

    def _read_column(
        self, table: Columns, name: str, faults: dict[int, str]
    ) -> npt.NDArray[np.float32]:
        column, values = self._columns[name], table.values[name]
        if not isinstance(column, NumberStatistics):
            is_missing_N = np.array([is_missing_value(value) for value in values], bool)
            self._note_missing(name, is_missing_N, faults)
            index_by_value = {value: index for index, value in enumerate(column)}
            index_N = np.array([index_by_value.get(str(value), -1) for value in values])
            # A missing value has no category, even if the texts include "None".
            index_N[is_missing_N] = -1
            return np.asarray(index_N[:, None] == np.arange(len(index_by_value)), np.float32)
        if values.dtype.kind != "O":
            numbers = values.reshape(len(values), -1).astype(np.float64)
        else:
            parsed = [parse_number(value) for value in values]
            for row, (value, number) in enumerate(zip(values, parsed, strict=True)):
                if number is None:
                    fault = f"its {name!r} is {value!r}, and training has numbers there"
                    faults.setdefault(row, fault)
            # np.array converts None to NaN.
            numbers = np.array(parsed, np.float64)[:, None]
        if numbers.shape[1] != len(column.mean):
            problem = f"has {numbers.shape[1]} numbers, not {len(column.mean)}"
            raise DataError(f"{table.name}: its column {name!r} {problem}")
        is_missing = np.asarray(~np.isfinite(numbers))
        self._note_missing(name, np.asarray(is_missing.any(1)), faults)
        scaled = (numbers - column.mean) / column.deviation
        return np.where(is_missing, 0.0, scaled).astype(np.float32)

    def _note_missing(
        self, name: str, is_missing_N: npt.NDArray[np.bool_], faults: dict[int, str]
    ) -> None:
        if self._missing == "stop":
            for row in np.flatnonzero(is_missing_N).tolist():
                faults.setdefault(row, f"its {name!r} has no value")


def convert_declared(table: Columns, declared: Mapping[str, ColumnKind]) -> Columns:
    """Convert the columns whose kind the job declares. Raises DataError naming the row."""
    values = dict(table.values)
    for name in declared.keys() & values.keys():
        kind = declared[name]
        texts = [
            None if is_missing_value(value) else category_text(value)
            for value in values[name].tolist()
        ]
        if kind == "category":
            values[name] = np.array([*texts, None], object)[:-1]
        elif kind == "date" and values[name].dtype.kind != "O":
            # Dates in Parquet are already numbers, which have decimals.
            if values[name].dtype.kind != "f":
                problem = f"has whole numbers such as {texts[0]}, not dates"
                hint = "write dates as 2026-12-31, or leave the column out of data.columns"
                raise DataError(f"{table.name}: its column {name!r} {problem}; {hint}")
        else:
            order = [*map(category_text, kind)] if isinstance(kind, list) else []
            ranks = {text: float(rank) for rank, text in enumerate(order)}
            parse = files.parse_date if kind == "date" else ranks.get
            numbers: list[float | None] = []
            for text in texts:
                # A word for a missing number may be a value of an ordinal.
                if text is None or (
                    text not in ranks and text.strip().lower() in files.MISSING_WORDS
                ):
                    numbers.append(np.nan)
                else:
                    numbers.append(parse(text))
            if None in numbers:
                row = numbers.index(None)
                expected = f"not one of {', '.join(order)}" if order else "not a date, 2026-12-31"
                fault = f"its {name!r} is {texts[row]!r}, {expected}"
                raise DataError(f"{table.locate_row(row)}: {fault}; see data.columns")
            values[name] = np.array(numbers, np.float64)
    return dataclasses.replace(table, values=values)


def category_text(value: Any) -> str:
    """Return the text of a category, without decimals for a whole number."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def fit_features(
    table: Columns,
    names: Sequence[str],
    is_train_N: npt.NDArray[np.bool_],
    missing: Missing,
    declared: Mapping[str, ColumnKind],
) -> Features:
    """Fit the encoding on the rows of `is_train_N`. Raises DataError naming the column or row."""
    table = convert_declared(table, declared)
    columns: dict[str, NumberStatistics | tuple[str, ...]] = {}
    for name in names:
        numbers = None if declared.get(name) == "category" else column_numbers(table, name)
        if numbers is None:
            values = table.values[name][is_train_N]
            texts = {str(value) for value in values if not is_missing_value(value)}
            if len(texts) > MAX_TEXT_VALUES:
                problem = f"has {len(texts)} different texts, more than {MAX_TEXT_VALUES}"
                hint = "leave it out of data.columns"
                raise DataError(f"{table.name}: its column {name!r} {problem}; {hint}")
            columns[name] = tuple(sorted(texts))
            continue
        x_NK = np.where(np.isfinite(numbers), numbers, np.nan)[is_train_N]
        mean_K, deviation_K = fit_statistics(x_NK)
        if not np.isfinite(deviation_K).all():
            raise DataError(
                f"{table.name}: its column {name!r} has numbers up to {np.nanmax(abs(x_NK)):g}, "
                "whose deviation exceeds 64 bits; write them in a larger unit, or leave the "
                "column out of data.columns"
            )
        columns[name] = NumberStatistics(mean_K, deviation_K)
    return Features(columns, missing, declared)


def fit_statistics(
    x_NK: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and deviation of each column, [K], ignoring NaN.

    The deviation of equal values is 1. Differences are averaged, from the middle of the range for
    the mean and from the mean for the deviation, so that numbers far from 0 lose no precision.
    """
    # NumPy sums a contiguous row pairwise, which is more precise than its sum along the first axis.
    x_KN = np.ascontiguousarray(x_NK.T)
    is_number_KN = ~np.isnan(x_KN)
    count_K = np.maximum(is_number_KN.sum(1), 1)
    has_number_K = is_number_KN.any(1)
    least_K = np.where(has_number_K, np.where(is_number_KN, x_KN, np.inf).min(1, initial=np.inf), 0)
    most_K = np.where(
        has_number_K, np.where(is_number_KN, x_KN, -np.inf).max(1, initial=-np.inf), 0
    )

    def average(values_KN: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(np.where(is_number_KN, values_KN, 0.0).sum(1) / count_K)

    with np.errstate(over="ignore", invalid="ignore"):
        middle_K = least_K / 2 + most_K / 2
        mean_K = middle_K + average(x_KN - middle_K[:, None])
        difference_KN = x_KN - mean_K[:, None]
        variance_K = average(np.square(difference_KN)) - np.square(average(difference_KN))
        deviation_K = np.sqrt(np.maximum(variance_K, 0.0))
    is_equal_K = least_K == most_K
    is_rounding_K = deviation_K <= ROUNDING * np.maximum(abs(least_K), abs(most_K))
    return (
        np.where(is_equal_K, least_K, mean_K),
        np.where(is_equal_K | is_rounding_K, 1.0, deviation_K),
    )


def find_index_columns(table: Columns) -> list[str]:
    """Return the columns that pandas writes for the numbers of the rows, of each file or of all."""
    file_rows = [np.arange(count) for count in np.diff(table.ends_F, prepend=0)]
    numberings = np.concatenate(file_rows), np.arange(len(table))
    return [
        name
        for name, values in table.values.items()
        if re.fullmatch(r"Unnamed: 0(\.\d+)?|index|level_0", name)
        and values.dtype.kind in "if"
        and values.ndim == 1
        and any(np.array_equal(values, numbering) for numbering in numberings)
    ]


def is_missing_value(value: Any) -> bool:
    """Return whether a value is missing: null, an empty text, or NaN."""
    # NaN is the only value that differs from itself.
    return value is None or value == "" or value != value


def column_numbers(table: Columns, name: str) -> npt.NDArray[np.float64] | None:
    """Return a column as numbers [N, K] with NaN for missing ones, or None if it has texts.

    Raises DataError naming the row if a column of numbers has few texts.
    """
    values = table.values[name]
    if values.dtype.kind != "O":
        return values.reshape(len(values), -1).astype(np.float64)
    numbers = [parse_number(value) for value in values]
    text_rows = [row for row, number in enumerate(numbers) if number is None]
    if not text_rows:
        return np.array(numbers, np.float64)[:, None]
    count = sum(number is not None and np.isfinite(number) for number in numbers)
    # A column with at least as many texts as numbers is a column of texts.
    if count <= len(text_rows):
        return None
    raise DataError(
        f"{table.locate_row(text_rows[0])}: its {name!r} is {values[text_rows[0]]!r}, where "
        f"{count} of {len(numbers)} rows have a number; fix the row, or leave the column out of "
        "data.columns"
    )


def check_columns(table: Columns, names: Sequence[str]) -> None:
    """Raise DataError if a column is missing, or has neither numbers nor texts."""
    for name in names:
        if name in table.unusable:
            problem = f"its column {name!r} {table.unusable[name]}"
            raise DataError(f"{table.name}: {problem}; leave it out of data.columns")
        if name not in table.values:
            available = list_names([*table.values])
            suggestion = suggest_name(name, table.values)
            problem = f"has no column {name!r}{suggestion}"
            raise DataError(f"{table.name} {problem}; it has {available}")
