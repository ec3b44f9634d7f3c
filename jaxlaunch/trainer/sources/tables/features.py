"""What the columns of a table become, as the rows of training say: of any table with these columns, then and later.

A column of numbers is scaled by its mean and deviation; one of texts becomes a 0 or 1 for each of its values.
N rows, F features, K numbers of a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import labels
from jaxlaunch.trainer.sources.images.index import shown
from jaxlaunch.trainer.sources.tables import files
from jaxlaunch.trainer.sources.tables.files import Column, Columns

MOST_VALUES = 100  # of a column of texts
Missing = Literal["stop", "mean"]


class Numbers(NamedTuple):
    """Mean and deviation of a column of numbers, [K]."""

    mean: Column
    deviation: Column


class Texts(NamedTuple):
    """The values of a column of texts, in their order."""

    values: tuple[str, ...]


class Features:
    """Columns by name, in the order of the features."""

    def __init__(self, columns: Mapping[str, Numbers | Texts], missing: Missing) -> None:
        self._columns, self._missing = columns, missing

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Features:
        """What `described` said."""
        columns: dict[str, Numbers | Texts] = {}
        for each in described["columns"]:
            if "values" in each:
                columns[each["name"]] = Texts(tuple(each["values"]))
            else:
                columns[each["name"]] = Numbers(np.array(each["mean"]), np.array(each["deviation"]))
        return cls(columns, described["missing"])

    def described(self) -> dict[str, Any]:
        """The same as JSON, exact to the bit."""
        said = [
            {"name": name, "values": list(column.values)}
            if isinstance(column, Texts)
            else {"name": name, "mean": column.mean.tolist(), "deviation": column.deviation.tolist()}
            for name, column in self._columns.items()
        ]
        return {"columns": said, "missing": self._missing}

    @property
    def texts(self) -> frozenset[str]:
        """The columns of texts, which stay texts where a file has digits alone in them."""
        return frozenset(name for name, column in self._columns.items() if isinstance(column, Texts))

    def read(self, table: Columns) -> tuple[npt.NDArray[np.float32], dict[int, str]]:
        """The features of every row, [N, F], and what is wrong with a row, by its number from 0.

        Raises DataError for a column that is not there, or of another kind as a whole.
        """
        check_columns(table, [*self._columns])
        wrong: dict[int, str] = {}
        parts = [self._part(table, name, wrong) for name in self._columns]
        return np.concatenate(parts, axis=1), wrong

    def of_all(self, table: Columns) -> npt.NDArray[np.float32]:
        """The features of every row, [N, F]. Raises DataError for the first row that something is wrong with."""
        x_NF, wrong = self.read(table)
        if wrong:
            row = min(wrong)
            hint = (
                "fix the row"
                if self._missing == "mean"
                else "fix the row, or set data.missing: mean where values are missing"
            )
            raise DataError(f"{table.where(row)}: {wrong[row]}; {hint}, or leave the column out of data.columns")
        return x_NF

    def _part(self, table: Columns, name: str, wrong: dict[int, str]) -> npt.NDArray[np.float32]:
        column, values = self._columns[name], table.values[name]
        if isinstance(column, Texts):
            self._note_missing(name, np.array([_is_no_text(value) for value in values]), wrong)
            place = {value: at for at, value in enumerate(column.values)}
            at_N = np.array([place.get(str(value), -1) for value in values])
            return np.asarray(at_N[:, None] == np.arange(len(place)), np.float32)
        if values.dtype.kind != "O":
            found = values.reshape(len(values), -1).astype(np.float64)
        else:
            read = [number(value) for value in values]
            for row, (value, each) in enumerate(zip(values, read, strict=True)):
                if each is None:
                    wrong.setdefault(row, f"its {name!r} is {value!r}, and training has numbers there")
            found = np.array([np.nan if each is None else each for each in read], np.float64)[:, None]
        if found.shape[1] != len(column.mean):
            raise DataError(
                f"{shown(table.paths[0])}: its column {name!r} has {found.shape[1]} numbers, not {len(column.mean)}"
            )
        is_missing = np.asarray(~np.isfinite(found))
        self._note_missing(name, np.asarray(is_missing.any(1)), wrong)
        scaled = (found - column.mean) / column.deviation
        return np.where(is_missing, 0.0, scaled).astype(np.float32)

    def _note_missing(self, name: str, is_missing_N: npt.NDArray[np.bool_], wrong: dict[int, str]) -> None:
        if self._missing == "stop":
            for row in np.flatnonzero(is_missing_N).tolist():
                wrong.setdefault(row, f"its {name!r} has no value")


def fitted(table: Columns, names: Sequence[str], chosen_N: npt.NDArray[np.bool_], missing: Missing) -> Features:
    """What the columns become by these rows of a table. Raises DataError naming the column, or the row."""
    columns: dict[str, Numbers | Texts] = {}
    for name in names:
        found = numbers(table, name)
        if found is None:
            columns[name] = Texts(_distinct(table, name, chosen_N))
            continue
        x_NK = np.where(np.isfinite(found), found, np.nan)[chosen_N]
        count_K = np.maximum(np.isfinite(x_NK).sum(0), 1)
        with np.errstate(over="ignore", invalid="ignore"):
            mean_K = np.nansum(x_NK, 0) / count_K
            deviation_K = np.sqrt(np.nansum(np.square(x_NK - mean_K), 0) / count_K)
        if not np.isfinite(deviation_K).all():
            raise DataError(
                f"{shown(table.paths[0])}: its column {name!r} has numbers up to {np.nanmax(abs(x_NK)):g}, whose "
                "deviation 64 bits do not hold; write them in a larger unit, or leave the column out of data.columns"
            )
        columns[name] = Numbers(mean_K, np.where(deviation_K > 0, deviation_K, 1.0))
    return Features(columns, missing)


def numbers(table: Columns, name: str) -> npt.NDArray[np.float64] | None:
    """A column as numbers [N, K], NaN where there is none; None for texts. Raises DataError where it has both."""
    values = table.values[name]
    if values.dtype.kind != "O":
        return values.reshape(len(values), -1).astype(np.float64)
    found = [number(value) for value in values]
    wrong = [row for row, each in enumerate(found) if each is None]
    if not wrong:
        return np.array(found, np.float64)[:, None]
    count = sum(each is not None and np.isfinite(each) for each in found)
    if count <= len(wrong):
        return None
    raise DataError(
        f"{table.where(wrong[0])}: its {name!r} is {values[wrong[0]]!r}, where {count} of {len(found)} rows have a "
        "number; fix the row, or leave the column out of data.columns"
    )


def number(value: Any) -> float | None:
    """A value as a number, NaN where it is missing; None for what is none."""
    if value is None:
        return np.nan
    if isinstance(value, str) and value.strip().lower() in files.MISSING:
        return np.nan
    try:
        return float(value) if isinstance(value, int | float) or (isinstance(value, str) and "_" not in value) else None
    except ValueError:
        return None
    except OverflowError:  # a whole number of more digits than a float has: not finite, as 1e400 is
        return np.inf


def check_columns(table: Columns, names: Sequence[str]) -> None:
    """Raises DataError for a column that is not there, or is neither numbers nor texts."""
    for name in names:
        if name in table.unusable:
            raise DataError(
                f"{shown(table.paths[0])}: its column {name!r} {table.unusable[name]}; leave it out of data.columns"
            )
        if name not in table.values:
            having = labels.listed([*table.values])
            raise DataError(f"{shown(table.paths[0])} has no column {name!r}; it has {having}")


def _is_no_text(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and np.isnan(value))


def _distinct(table: Columns, name: str, chosen_N: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    found = sorted({str(value) for value in table.values[name][chosen_N] if value is not None and value != ""})
    if len(found) > MOST_VALUES:
        raise DataError(
            f"{shown(table.paths[0])}: its column {name!r} has {len(found)} different texts, more than {MOST_VALUES}; "
            "leave it out of data.columns"
        )
    return tuple(found)
