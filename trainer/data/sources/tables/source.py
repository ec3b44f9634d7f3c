"""Rows of a table by number: its columns as features, and a label.

A column of numbers is scaled by its mean and deviation in training; one of texts becomes a 0 or 1 for each of its
values there. N rows, F features, K labels.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.sources.images import build, labels
from jaxlaunch.trainer.data.sources.images.index import shown
from jaxlaunch.trainer.data.sources.share import Share
from jaxlaunch.trainer.data.sources.tables import files
from jaxlaunch.trainer.data.sources.tables.files import Column, Columns
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec import Table

MOST_VALUES = 100  # of a column of texts
Split = Literal["train", "eval"]
Target = Literal["class", "multi_label", "regression"]


class Scale(NamedTuple):
    """Mean and deviation of labels that are numbers, in training: the loss is of what is left when they are out."""

    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]

    @property
    def unit(self) -> float | None:
        """One deviation of all labels; None where each has its own."""
        return float(self.deviation) if self.deviation.ndim == 0 else None

    def within(self, label: Any) -> Any:
        """Labels as the model has them."""
        return (label - self.mean) / self.deviation

    def outside(self, found: Any) -> Any:
        """What the model has found, in the unit of the labels."""
        return found * self.deviation + self.mean


class Rows:
    """`features` float32 [F], and `label`: int32 of a class, else float32 [] or [K]."""

    is_light = True

    def __init__(
        self,
        name: str,
        x_NF: npt.NDArray[np.float32],
        label_N: npt.NDArray[Any],
        classes: tuple[str, ...],
        scale: Scale | None,
    ) -> None:
        self.name, self.classes, self.scale = name, classes, scale
        self._x_NF, self.label_N = x_NF, label_N

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self._x_NF[index], "label": self.label_N[index]}

    def fingerprint(self) -> str:
        """Number of rows and features, and a digest of all of them and of the classes."""
        hashed = hashlib.sha256(json.dumps(self.classes).encode(errors="surrogatepass"))
        hashed.update(self._x_NF.tobytes() + self.label_N.tobytes())
        return f"table, {len(self)} rows of {self._x_NF.shape[1]} features, sha256 {hashed.hexdigest()[:12]}"


def source(data: Table, split: Split, target: Target) -> Rows | None:
    """The rows of a split; None where nothing is held out. Raises DataError naming file, row and column."""
    return _splits(data.model_dump_json(), target)[split]


@functools.lru_cache(maxsize=2)  # the trainer opens both splits, and the task asks for the shape
def _splits(block: str, target: Target) -> dict[Split, Rows | None]:
    data = Table.model_validate_json(block)
    table, has_splits = training(data)
    coder = Coder(data, table, target)
    held_out = None
    if data.eval_path is not None:
        held_out = files.read(files.found(data.eval_path, "train", "eval_path")[0])
    elif has_splits and (paths := files.found(data.path, "eval", "path")[0]):
        held_out = files.read(paths)
    if held_out is not None or not data.eval_split:
        every_N = np.ones(len(table), bool)
        coder.fit(table, every_N)
        evaluated = None if held_out is None else coder.rows(held_out, np.ones(len(held_out), bool))
        return {"train": coder.rows(table, every_N), "eval": evaluated}
    share = Share(data.eval_split, len(table))
    if not share.kept:
        raise DataError(f"data.eval_split = {data.eval_split} of {len(table)} rows leaves none to train on")
    is_held_N = share.is_held_out(np.arange(len(table)))
    coder.fit(table, ~is_held_N)
    return {"train": coder.rows(table, ~is_held_N), "eval": coder.rows(table, is_held_N)}


def training(data: Table) -> tuple[Columns, bool]:
    """The table that is trained on, and whether files are named by their splits. Raises DataError."""
    paths, has_splits = files.found(data.path, "train", "path")
    return files.read(paths), has_splits


class Coder:
    """What columns become, as the rows of training say: of texts a place for each value, else mean and deviation."""

    def __init__(self, data: Table, table: Columns, target: Target) -> None:
        self._data, self._target = data, target
        self.label = _labels_of(data, table)
        known = [name for name in table.values if name and name not in self.label]
        self.names = data.columns or known + [name for name in table.unusable if name not in self.label]
        _check_columns(table, [*self.label, *self.names])
        if not self.names:
            raise DataError(f"{shown(table.paths[0])} has no column but the label")
        self._values: dict[str, tuple[str, ...]] = {}
        self._scales: dict[str, tuple[Column, Column]] = {}
        self._classes: Sequence[labels.Label] | None = data.classes
        self._scale: Scale | None = None

    def fit(self, table: Columns, is_train_N: npt.NDArray[np.bool_]) -> None:
        """Takes values, means and deviations of these rows, and the classes of all. Raises DataError."""
        for name in self.names:
            found = numbers(table, name)
            if found is None:
                self._values[name] = _distinct(table, name, is_train_N)
                continue
            x_NK = np.where(np.isfinite(found), found, np.nan)[is_train_N]
            count_K = np.maximum(np.isfinite(x_NK).sum(0), 1)
            mean_K = np.nansum(x_NK, 0) / count_K
            deviation_K = np.sqrt(np.nansum(np.square(x_NK - mean_K), 0) / count_K)
            self._scales[name] = mean_K, np.where(deviation_K > 0, deviation_K, 1.0)
        label_N, self._classes = self._labels(table)
        if self._target == "regression":
            mean, deviation = label_N[is_train_N].mean(0), label_N[is_train_N].std(0)
            self._scale = Scale(mean, np.where(deviation > 0, deviation, np.float32(1)))

    def rows(self, table: Columns, chosen_N: npt.NDArray[np.bool_]) -> Rows:
        """These rows of a table. Raises DataError."""
        _check_columns(table, [*self.label, *self.names])
        label_N, classes = self._labels(table)
        name = f"table {shown(table.paths[0])}"
        return Rows(
            name, self.features(table)[chosen_N], label_N[chosen_N], tuple(map(str, classes or ())), self._scale
        )

    def features(self, table: Columns) -> npt.NDArray[np.float32]:
        """The columns as numbers, [N, F]. Raises DataError for a row that lacks one."""
        return np.concatenate([self._features(table, name) for name in self.names], axis=1)

    def _features(self, table: Columns, name: str) -> npt.NDArray[np.float32]:
        if name in self._values:
            texts = table.values[name]
            is_missing = np.array([value is None or value == "" for value in texts])
            self._check_missing(table, name, is_missing)
            place = {value: at for at, value in enumerate(self._values[name])}
            at_N = np.array([place.get(str(value), -1) for value in texts])
            return np.asarray(at_N[:, None] == np.arange(len(place)), np.float32)
        found = numbers(table, name)
        if found is None:
            raise DataError(f"{shown(table.paths[0])}: its column {name!r} has texts, where training has numbers")
        mean, deviation = self._scales[name]
        if found.shape[1] != len(mean):
            raise DataError(
                f"{shown(table.paths[0])}: its column {name!r} has {found.shape[1]} numbers, not {len(mean)}"
            )
        is_missing = np.asarray(~np.isfinite(found))
        self._check_missing(table, name, np.asarray(is_missing.any(1)))
        return np.where(is_missing, 0.0, (found - mean) / deviation).astype(np.float32)

    def _check_missing(self, table: Columns, name: str, is_missing_N: npt.NDArray[np.bool_]) -> None:
        if self._data.missing == "stop" and is_missing_N.any():
            raise DataError(
                f"{table.where(int(is_missing_N.argmax()))}: its {name!r} has no value; set data.missing: mean, or "
                "leave the column out of data.columns"
            )

    def _labels(self, table: Columns) -> tuple[npt.NDArray[Any], Sequence[labels.Label] | None]:
        """Labels and, where they are classes with names, these."""
        if self._target == "class":
            if len(self.label) > 1:
                raise DataError(f"data.label names {len(self.label)} columns; loss.target = class takes one")
            return self._of_class(table, self.label[0])
        found = [_label_numbers(table, name, self._target) for name in self.label]
        label_NK = np.concatenate(found, axis=1).astype(np.float32)
        return label_NK[:, 0] if label_NK.shape[1] == 1 and self._target == "regression" else label_NK, None

    def _of_class(self, table: Columns, name: str) -> tuple[npt.NDArray[Any], Sequence[labels.Label] | None]:
        where, found = f"{shown(table.paths[0])}, {name!r}", numbers(table, name)
        if found is None:
            texts = table.values[name]
            empty = next((row for row, value in enumerate(texts) if value is None or value == ""), None)
            if empty is not None:
                raise DataError(f"{table.where(empty)}: its label {name!r} is empty; remove the row")
            return labels.numbered([str(value) for value in texts], self._classes, where)
        number_N = _whole(table, name, found)
        named = table.classes.get(name, ())
        if len(named) and number_N.min() >= 0 and number_N.max() < len(named):
            return labels.numbered([named[number] for number in number_N], self._classes or named, where)
        label_N, _ = labels.numbered(number_N.tolist(), self._classes, where)
        return label_N, self._classes or tuple(range(int(label_N.max()) + 1))


def _whole(table: Columns, name: str, found: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """A label's numbers as whole ones. Raises DataError naming the row of one that is none."""
    if found.shape[1] > 1:
        raise DataError(f"{shown(table.paths[0])}: its label {name!r} is {found.shape[1]} numbers; a class is one")
    number_N = found[:, 0]
    is_odd_N = np.asarray(~(np.isfinite(number_N) & (number_N == np.trunc(number_N)) & (abs(number_N) < 2**31)))
    if is_odd_N.any():
        row = int(is_odd_N.argmax())
        if np.isnan(number_N[row]):
            raise DataError(f"{table.where(row)}: its label {name!r} is empty; remove the row")
        raise DataError(
            f"{table.where(row)}: its label {name!r} is {number_N[row]}, not the number of a class; numbers are "
            "predicted with train.loss.target: regression"
        )
    return number_N.astype(np.int64)


def numbers(table: Columns, name: str) -> npt.NDArray[np.float64] | None:
    """A column as numbers [N, K], NaN where there is none; None for texts. Raises DataError where it has both."""
    values = table.values[name]
    if values.dtype.kind != "O":
        return values.reshape(len(values), -1).astype(np.float64)
    found = [_number(value) for value in values]
    wrong = [row for row, number in enumerate(found) if number is None]
    if not wrong:
        return np.array(found, np.float64)[:, None]
    count = sum(number is not None and np.isfinite(number) for number in found)
    if count <= len(wrong):
        return None
    raise DataError(
        f"{table.where(wrong[0])}: its {name!r} is {values[wrong[0]]!r}, where {count} of {len(found)} rows have a "
        "number; fix the row, or leave the column out of data.columns"
    )


def _number(value: Any) -> float | None:
    if value is None:
        return np.nan
    if isinstance(value, str) and value.strip().lower() in files.MISSING:
        return np.nan
    try:
        return float(value) if isinstance(value, str | int | float) and "_" not in str(value) else None
    except (ValueError, OverflowError):
        return None


def _label_numbers(table: Columns, name: str, target: Target) -> npt.NDArray[np.float64]:
    found = numbers(table, name)
    if found is None:
        raise DataError(f"{shown(table.paths[0])}: its label {name!r} has texts; loss.target: {target} takes numbers")
    is_missing_N = ~np.isfinite(found).all(1)
    if is_missing_N.any():
        raise DataError(f"{table.where(int(is_missing_N.argmax()))}: its label {name!r} is empty; remove the row")
    return found


def _labels_of(data: Table, table: Columns) -> list[str]:
    asked = [data.label] if isinstance(data.label, str) else data.label
    if asked is None:
        asked = [name for name in build.LABEL if name in table.values][:1]
        if not asked:
            having = labels.listed([*table.values])
            raise DataError(
                f"{shown(table.paths[0])} has no column that is known for the label; set data.label; it has {having}"
            )
    return asked


def _check_columns(table: Columns, names: Sequence[str]) -> None:
    """Raises DataError for a column that is not there, or is neither numbers nor texts."""
    for name in names:
        if name in table.unusable:
            raise DataError(
                f"{shown(table.paths[0])}: its column {name!r} {table.unusable[name]}; leave it out of data.columns"
            )
        if name not in table.values:
            having = labels.listed([*table.values])
            raise DataError(f"{shown(table.paths[0])} has no column {name!r}; it has {having}")


def _distinct(table: Columns, name: str, chosen_N: npt.NDArray[np.bool_]) -> tuple[str, ...]:
    found = sorted({str(value) for value in table.values[name][chosen_N] if value is not None and value != ""})
    if len(found) > MOST_VALUES:
        raise DataError(
            f"{shown(table.paths[0])}: its column {name!r} has {len(found)} different texts, more than {MOST_VALUES}; "
            "leave it out of data.columns"
        )
    return tuple(found)
