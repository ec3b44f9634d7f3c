"""Tables in fixed proportions: all have the same columns, scaled by the rows that are trained on of all parts together.

N rows, B rows of a batch, F features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.order import Share
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images.index import list_names
from jaxlaunch.trainer.sources.mixture import Mixture
from jaxlaunch.trainer.sources.tables import files
from jaxlaunch.trainer.sources.tables.files import Columns
from jaxlaunch.trainer.sources.tables.source import Coder, Rows, Split, Target, column_numbers, held_out_paths
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
        first = self._rows[0]
        self.classes, self.scale, self.described = first.classes, first.scale, first.described

    def rows(self, index_B: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return many rows at once: `features` [B, F], and `label` [B] or [B, K]."""
        part_B = np.searchsorted(self._first_S, index_B, side="right") - 1
        batch: dict[str, npt.NDArray[Any]] = {}
        for number, part in enumerate(self._rows):
            here_B = part_B == number
            for key, values in part.rows(index_B[here_B] - self._first_S[number]).items():
                batch.setdefault(key, np.empty((len(index_B), *values.shape[1:]), values.dtype))[here_B] = values
        return batch


class _Part(NamedTuple):
    """A part: its table, its rows that are held out, and the other files that it is evaluated on."""

    block: Table
    table: Columns
    is_held_N: npt.NDArray[np.bool_]
    paths: list[str]


def open_source(data: Mixed, split: Split, target: Target) -> Tables | None:
    """Open the rows of a split of all parts. Raises DataError naming the part, or file, row and column."""
    return _open_splits(data.model_dump_json(), target)[split]


@functools.lru_cache(maxsize=2)  # the trainer opens both splits, and the task asks for the shape
def _open_splits(block: str, target: Target) -> dict[Split, Tables | None]:
    data = Mixed.model_validate_json(block)
    weights = {name: part.weight for name, part in data.parts.items()}
    parts: dict[str, _Part] = {}
    for name, table_block in data.blocks().items():
        if isinstance(table_block, Table):
            try:
                parts[name] = _open_part(table_block, target, is_trained=weights[name] > 0)
            except DataError as error:
                raise DataError(f"train.data.parts.{name}: {error}") from error
    trained = {name: parts[name] for name in parts if weights[name]}
    columns = _check_columns(trained)
    classes = _check_classes(trained, target) if data.classes is None else data.classes
    whole = files.concatenate([_select_columns(part.table, columns) for part in trained.values()])
    coder = Coder(next(iter(trained.values())).block.model_copy(update={"classes": classes}), whole, target)
    coder.fit(whole, np.concatenate([~part.is_held_N for part in trained.values()]))
    train = {name: coder.rows(part.table, ~part.is_held_N) for name, part in trained.items()}
    held_out: dict[str, Rows] = {}
    for name, part in parts.items():
        if part.paths:
            table = _name_classes(files.read_tables(part.paths, coder.texts), coder.label, target)
            held_out[name] = coder.rows(table, np.ones(len(table), bool))
        elif part.is_held_N.any():
            held_out[name] = coder.rows(part.table, part.is_held_N)
    return {
        "train": Tables(train, weights),
        "eval": Tables(held_out, dict.fromkeys(held_out, 1.0)) if held_out else None,
    }


def _open_part(block: Table, target: Target, *, is_trained: bool) -> _Part:
    """Open a part; one that is not trained on is evaluated on what its files hold out by their names, else on all."""
    table_paths, has_splits = files.find_tables(block.path, "train", "path")
    paths = held_out_paths(block, has_splits)
    table = files.read_tables(table_paths)
    table = _name_classes(table, Coder(block, table, target).label, target)
    if not is_trained:
        return _Part(block, table, np.ones(len(table), bool), paths or table_paths)
    if paths or not block.eval_split:
        return _Part(block, table, np.zeros(len(table), bool), paths)
    share = Share(block.eval_split, len(table))
    if not share.kept:
        raise DataError(f"eval_split = {block.eval_split} of {len(table)} rows leaves none to train on")
    return _Part(block, table, share.is_held_out(np.arange(len(table))), paths)


def _name_classes(table: Columns, label: list[str], target: Target) -> Columns:
    """Return the table with the names of its classes for their numbers: parts may number the same classes otherwise."""
    if target != "class":
        return table
    values, classes = dict(table.values), dict(table.classes)
    for name in label:
        names, number_N = classes.pop(name, ()), values.get(name)
        if names and number_N is not None and number_N.dtype.kind in "iu":
            if number_N.min() >= 0 and number_N.max() < len(names):
                values[name] = np.array([*names, None], object)[number_N.astype(np.int64)]
    return dataclasses.replace(table, values=values, classes=classes)


# --- what all parts have in common ------------------------------------------------------------------------------------


def _check_columns(parts: Mapping[str, _Part]) -> list[str]:
    """Return the columns that are read, the label among them. Raises DataError where two parts differ in one."""
    first_name, first = next(iter(parts.items()))
    names: dict[str, None] = {}
    for name, part in parts.items():
        coder = Coder(part.block, part.table, "class")
        names |= dict.fromkeys([*coder.label, *coder.names])
        for column in names:
            here, there = _describe_column(part.table, column), _describe_column(first.table, column)
            if here != there and {here, there} != {EMPTY, NUMBERS}:
                raise DataError(
                    f"train.data.parts.{name} has {here} in the column {column!r}, and train.data.parts.{first_name} "
                    f"has {there} there; give all parts the same columns, or name those to read in train.data.columns"
                )
    return [*names]


def _check_classes(parts: Mapping[str, _Part], target: Target) -> list[str | int] | None:
    if target != "class":
        return None
    part_classes = {name: Coder(part.block, part.table, target).classes(part.table) for name, part in parts.items()}
    first, wanted = next(iter(part_classes.items()))
    for name, classes in part_classes.items():
        if {*map(str, classes)} != {*map(str, wanted)}:
            raise DataError(
                f"train.data.parts.{name} has the {len(classes)} classes {list_names(classes)}, and "
                f"train.data.parts.{first} the {len(wanted)} classes {list_names(wanted)}; list the classes of both "
                "in train.data.classes"
            )
    return wanted


def _describe_column(table: Columns, name: str) -> str:
    if name not in table.values:
        return "no numbers or texts" if name in table.unusable else "nothing"
    numbers = column_numbers(table, name)
    if numbers is None:
        return "texts"
    if not np.isfinite(numbers).any():
        return EMPTY
    return NUMBERS if numbers.shape[1] == 1 else f"{numbers.shape[1]} numbers"


def _select_columns(table: Columns, names: list[str]) -> Columns:
    chosen: dict[str, Any] = {
        key: {name: getattr(table, key)[name] for name in names if name in getattr(table, key)}
        for key in ("values", "classes", "unusable")
    }
    return dataclasses.replace(table, **chosen)
