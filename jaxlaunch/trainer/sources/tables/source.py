"""Rows of a table by number: its columns as features, and a label. N rows, F features, K labels."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.order import Share
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import build, labels
from jaxlaunch.trainer.sources.images.index import shown
from jaxlaunch.trainer.sources.tables import features, files
from jaxlaunch.trainer.sources.tables.files import Columns
from jaxlaunch.trainer.spec import Table

DESCRIBED = ("columns", "missing", "label", "classes", "scale")  # the keys of what `Rows.described` says
Split = Literal["train", "eval"]
Target = Literal["class", "multi_label", "regression"]


class Scale(NamedTuple):
    """Mean and deviation of labels that are numbers, in training: the loss is of what is left when they are out."""

    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Scale:
        """What `described` said."""
        return cls(*(np.asarray(described[key], np.float32) for key in ("mean", "deviation")))

    def described(self) -> dict[str, Any]:
        """The same as JSON, exact to the bit."""
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    @property
    def unit(self) -> float | None:
        """One deviation of all labels; None where each has its own."""
        return float(self.deviation) if self.deviation.ndim == 0 else None

    def within(self, label: Any) -> Any:
        """Labels as the model has them."""
        mean, deviation = self._as(label)
        return (label - mean) / deviation

    def outside(self, found: Any) -> Any:
        """What the model has found, in the unit of the labels."""
        mean, deviation = self._as(found)
        return found * deviation + mean

    def _as(self, numbers: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Mean and deviation with as many axes as numbers [B, K]: a run refuses arrays of different ranks."""
        if self.mean.ndim == 0:
            return self.mean, self.deviation
        shape = (1,) * (numbers.ndim - 1) + (-1,)
        return self.mean.reshape(shape), self.deviation.reshape(shape)


class Rows(DataSource):
    """`features` float32 [F], and `label`: int32 of a class, else float32 [] or [K]."""

    is_light = has_rows = True

    def __init__(
        self,
        name: str,
        x_NF: npt.NDArray[np.float32],
        label_N: npt.NDArray[Any],
        classes: tuple[str, ...],
        scale: Scale | None,
        described: Mapping[str, Any],
        where: Callable[[int], str],
    ) -> None:
        self._where = where
        self.name, self.classes, self.scale, self.described = name, classes, scale, described
        self._x_NF, self.label_N = x_NF, label_N

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self._x_NF[index], "label": self.label_N[index]}

    def where(self, index: int) -> str:
        """The file of a row, and its number there."""
        return self._where(index)

    def rows(self, index_B: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Many rows at once: `features` [B, F], and `label` [B] or [B, K]."""
        return {"features": self._x_NF.take(index_B, axis=0), "label": self.label_N.take(index_B, axis=0)}

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
    paths: list[str] = []
    if data.eval_path is not None:
        paths = files.found(data.eval_path, "train", "eval_path")[0]
    elif has_splits:
        paths = files.found(data.path, "eval", "path")[0]
    if paths or not data.eval_split:
        every_N = np.ones(len(table), bool)
        coder.fit(table, every_N)
        held_out = files.read(paths, coder.texts) if paths else None
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
        features.check_columns(table, [*self.label, *self.names])
        if not self.names:
            raise DataError(f"{shown(table.paths[0])} has no column except the label")
        self._features: features.Features | None = None
        self._classes: Sequence[labels.Label] | None = data.classes
        self._scale: Scale | None = None

    @property
    def texts(self) -> frozenset[str]:
        """The columns that are texts in training."""
        return frozenset() if self._features is None else self._features.texts

    def fit(self, table: Columns, is_train_N: npt.NDArray[np.bool_]) -> None:
        """Takes values, means and deviations of these rows, and the classes of all. Raises DataError."""
        self._features = features.fitted(table, self.names, is_train_N, self._data.missing)
        label_N, self._classes = self._labels(table)
        if self._target == "regression":
            with np.errstate(over="ignore", invalid="ignore"):
                mean, deviation = label_N[is_train_N].mean(0), label_N[is_train_N].std(0)
            if not np.isfinite(deviation).all():  # the squares of what 32 bits hold need not be held by them
                wide_N = label_N[is_train_N].astype(np.float64)
                mean, deviation = wide_N.mean(0).astype(np.float32), wide_N.std(0).astype(np.float32)
            self._scale = Scale(mean, np.where(deviation > 0, deviation, np.float32(1)))

    def classes(self, table: Columns) -> list[labels.Label]:
        """The classes of a table by their numbers. Raises DataError."""
        return [*(self._labels(table)[1] or ())]

    def rows(self, table: Columns, chosen_N: npt.NDArray[np.bool_]) -> Rows:
        """These rows of a table. Raises DataError."""
        assert self._features is not None, "it is fitted"
        features.check_columns(table, [*self.label, *self.names])
        label_N, classes = self._labels(table)
        name, x_NF, named = (
            f"table {shown(table.paths[0])}",
            self._features.of_all(table),
            tuple(map(str, classes or ())),
        )
        row_N = np.flatnonzero(chosen_N)
        about = self._scale, self._described(named), lambda number: table.where(int(row_N[number]))
        return Rows(name, x_NF[chosen_N], label_N[chosen_N], named, *about)

    def _described(self, classes: tuple[str, ...]) -> dict[str, Any]:
        assert self._features is not None, "it is fitted"
        scale = None if self._scale is None else self._scale.described()
        about = {"label": self.label, "classes": list(classes), "scale": scale}
        return self._features.described() | about

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
        where, found = f"{shown(table.paths[0])}, {name!r}", features.numbers(table, name)
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


def _label_numbers(table: Columns, name: str, target: Target) -> npt.NDArray[np.float64]:
    found = features.numbers(table, name)
    if found is None:
        raise DataError(f"{shown(table.paths[0])}: its label {name!r} has texts; loss.target: {target} takes numbers")
    is_missing_N = ~np.isfinite(found).all(1)
    if is_missing_N.any():
        raise DataError(f"{table.where(int(is_missing_N.argmax()))}: its label {name!r} is empty; remove the row")
    is_large_N = (abs(found) > np.finfo(np.float32).max).any(1)
    if is_large_N.any():
        row = int(is_large_N.argmax())
        raise DataError(
            f"{table.where(row)}: its label {name!r} is {abs(found[row]).max():g}, more than 32 bits hold; write it in "
            "a larger unit"
        )
    return found


def _labels_of(data: Table, table: Columns) -> list[str]:
    asked = [data.label] if isinstance(data.label, str) else data.label
    if asked is None:
        asked = [name for name in build.LABEL if name in table.values or name in table.unusable][:1]
        if not asked:
            having = labels.listed([*table.values])
            raise DataError(
                f"{shown(table.paths[0])} has no column that is known for the label; set data.label; it has {having}"
            )
    return asked
