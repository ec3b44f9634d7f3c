"""Tables in fixed proportions: all have the same columns, scaled by the rows that are trained on of all parts together.

N rows, B rows of a batch, F features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.order import Share
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import labels
from jaxlaunch.trainer.sources.mixture import Mixture
from jaxlaunch.trainer.sources.tables import features, files
from jaxlaunch.trainer.sources.tables.files import Columns
from jaxlaunch.trainer.sources.tables.source import Coder, Rows, Split, Target
from jaxlaunch.trainer.spec import Mixture as Mixed
from jaxlaunch.trainer.spec import Table

EMPTY, NUMBERS = "no value", "numbers"  # of a column, in words


class Tables(Mixture):
    """The rows of all parts, in memory, with what `Rows` says of its own."""

    has_rows = True

    def __init__(self, parts: Mapping[str, Rows], weights: Mapping[str, float]) -> None:
        super().__init__(parts, weights)
        self._rows = list(parts.values())
        self._first_S = np.cumsum([0, *map(len, self._rows)])
        one = self._rows[0]
        self.classes, self.scale, self.described = one.classes, one.scale, one.described

    def rows(self, index_B: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Many rows at once: `features` [B, F], and `label` [B] or [B, K]."""
        part_B = np.searchsorted(self._first_S, index_B, side="right") - 1
        batch: dict[str, npt.NDArray[Any]] = {}
        for number, part in enumerate(self._rows):
            here_B = part_B == number
            for key, found in part.rows(index_B[here_B] - self._first_S[number]).items():
                batch.setdefault(key, np.empty((len(index_B), *found.shape[1:]), found.dtype))[here_B] = found
        return batch


class Opened(NamedTuple):
    """A part: its table, its rows that are trained on, and the files that it is evaluated on beside its table."""

    block: Table
    table: Columns
    is_held_N: npt.NDArray[np.bool_]
    paths: list[str]


def source(data: Mixed, split: Split, target: Target) -> Tables | None:
    """The rows of a split of all parts. Raises DataError naming the part, or file, row and column."""
    return _splits(data.model_dump_json(), target)[split]


@functools.lru_cache(maxsize=2)  # the trainer opens both splits, and the task asks for the shape
def _splits(block: str, target: Target) -> dict[Split, Tables | None]:
    data = Mixed.model_validate_json(block)
    weights = {name: part.weight for name, part in data.parts.items()}
    parts = dict(_opened(data, target))
    trained = {name: parts[name] for name in parts if weights[name]}
    columns = _check_columns(trained)
    classes = _check_classes(trained, target) if data.classes is None else data.classes
    whole = files.together([_only(part.table, columns) for part in trained.values()])
    coder = Coder(next(iter(trained.values())).block.model_copy(update={"classes": classes}), whole, target)
    coder.fit(whole, np.concatenate([~part.is_held_N for part in trained.values()]))
    train = {name: coder.rows(part.table, ~part.is_held_N) for name, part in trained.items()}
    held_out = {name: rows for name, part in parts.items() if (rows := _held_out(part, coder, target)) is not None}
    return {
        "train": Tables(train, weights),
        "eval": Tables(held_out, dict.fromkeys(held_out, 1.0)) if held_out else None,
    }


def _held_out(part: Opened, coder: Coder, target: Target) -> Rows | None:
    """The rows that a part is evaluated on, of its own table or of other files."""
    if not part.paths:
        return coder.rows(part.table, part.is_held_N) if part.is_held_N.any() else None
    table = files.read(part.paths, coder.texts)
    table = _with_names(table, coder.label) if target == "class" else table
    return coder.rows(table, np.ones(len(table), bool))


def _opened(data: Mixed, target: Target) -> Iterator[tuple[str, Opened]]:
    for name, block in data.blocks().items():
        if isinstance(block, Table):
            try:
                yield name, _part(block, target, is_trained=data.parts[name].weight > 0)
            except DataError as error:
                raise DataError(f"train.data.parts.{name}: {error}") from error


def _part(block: Table, target: Target, *, is_trained: bool) -> Opened:
    """A part; one that is not trained on is evaluated on what its files hold out by their names, else on all of it."""
    found, has_splits = files.found(block.path, "train", "path")
    paths: list[str] = []
    if block.eval_path is not None:
        paths = files.found(block.eval_path, "train", "eval_path")[0]
    elif has_splits:
        paths = files.found(block.path, "eval", "path")[0]
    table = files.read(found)
    table = _with_names(table, Coder(block, table, target).label) if target == "class" else table
    if not is_trained:
        return Opened(block, table, np.ones(len(table), bool), paths or found)
    if paths or not block.eval_split:
        return Opened(block, table, np.zeros(len(table), bool), paths)
    share = Share(block.eval_split, len(table))
    if not share.kept:
        raise DataError(f"eval_split = {block.eval_split} of {len(table)} rows leaves none to train on")
    return Opened(block, table, share.is_held_out(np.arange(len(table))), paths)


def _with_names(table: Columns, label: list[str]) -> Columns:
    """The table with the names of its classes for their numbers: parts may number the same classes otherwise."""
    values, classes = dict(table.values), dict(table.classes)
    for name in label:
        named, number_N = classes.pop(name, ()), values.get(name)
        if named and number_N is not None and number_N.dtype.kind in "iu":
            if number_N.min() >= 0 and number_N.max() < len(named):
                values[name] = np.array([*named, None], object)[number_N.astype(np.int64)]
    return dataclasses.replace(table, values=values, classes=classes)


# --- what all parts have in common ------------------------------------------------------------------------------------


def _check_columns(parts: Mapping[str, Opened]) -> list[str]:
    """The columns that are read, the label among them. Raises DataError where two parts differ in one."""
    first, one = next(iter(parts.items()))
    names: dict[str, None] = {}
    for name, part in parts.items():
        coder = Coder(part.block, part.table, "class")
        names |= dict.fromkeys([*coder.label, *coder.names])
        for column in names:
            here, there = _kind(part.table, column), _kind(one.table, column)
            if here != there and {here, there} != {EMPTY, NUMBERS}:
                raise DataError(
                    f"train.data.parts.{name} has {here} in the column {column!r}, and train.data.parts.{first} has "
                    f"{there} there; give all parts the same columns, or name those to read in train.data.columns"
                )
    return [*names]


def _check_classes(parts: Mapping[str, Opened], target: Target) -> list[str | int] | None:
    """The classes of all parts; None where labels are no classes. Raises DataError where two parts differ."""
    if target != "class":
        return None
    found = {name: Coder(part.block, part.table, target).classes(part.table) for name, part in parts.items()}
    first, wanted = next(iter(found.items()))
    for name, classes in found.items():
        if {*map(str, classes)} != {*map(str, wanted)}:
            raise DataError(
                f"train.data.parts.{name} has the {len(classes)} classes {labels.listed(classes)}, and "
                f"train.data.parts.{first} the {len(wanted)} classes {labels.listed(wanted)}; list the classes of both "
                "in train.data.classes"
            )
    return wanted


def _kind(table: Columns, name: str) -> str:
    """What stands in a column, in words."""
    if name not in table.values:
        return "no numbers or texts" if name in table.unusable else "nothing"
    found = features.numbers(table, name)
    if found is None:
        return "texts"
    return EMPTY if not np.isfinite(found).any() else NUMBERS if found.shape[1] == 1 else f"{found.shape[1]} numbers"


def _only(table: Columns, names: list[str]) -> Columns:
    """The table with these columns alone."""
    chosen: dict[str, Any] = {
        key: {name: getattr(table, key)[name] for name in names if name in getattr(table, key)}
        for key in ("values", "classes", "unusable")
    }
    return dataclasses.replace(table, **chosen)
