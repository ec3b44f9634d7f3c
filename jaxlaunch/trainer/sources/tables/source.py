"""Sources of table rows, whose columns are features and labels, and mixtures of tables.

The parts of a mixture have the same columns and the same encoding (features.py), which is fitted on
the training rows of all parts.

N rows, B rows of a batch, F features, K labels.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.files import as_list, mark_file
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import build
from jaxlaunch.trainer.sources.images.index import Label, list_names, number_labels
from jaxlaunch.trainer.sources.mixture import Mixture, report_part
from jaxlaunch.trainer.sources.tables import files
from jaxlaunch.trainer.sources.tables.features import (
    Features,
    check_columns,
    column_numbers,
    find_index_columns,
    fit_features,
    fit_statistics,
    is_missing_value,
)
from jaxlaunch.trainer.sources.tables.files import Column, Columns
from jaxlaunch.trainer.sources.tables.row_keys import group_keys, row_keys
from jaxlaunch.trainer.spec import Mixture as MixtureBlock
from jaxlaunch.trainer.spec import Table, TrainSpec

# Keys of the JSON form of a table's encoding.
ENCODING_KEYS = ("columns", "missing", "label", "classes", "scale")
# Descriptions of a column in messages.
NO_VALUES, NUMBERS = "no value", "numbers"
Target = Literal["class", "multi_label", "regression"]
Marks = tuple[tuple[Any, ...], ...]
# Smallest deviation of a label that a model can learn, in steps of float32.
MIN_STEPS = 8
# Copies of a row are kept together in groups of this size. A row with more copies is usual in a
# table with few categories, so its groups may be in different splits.
MAX_COPIES = 16


class Scale(NamedTuple):
    """The mean and deviation of numeric training labels, by which labels are normalized."""

    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]

    @classmethod
    def from_json(cls, encoded: Mapping[str, Any]) -> Scale:
        """Restore a scale from its JSON form."""
        return cls(*(np.asarray(encoded[key], np.float32) for key in cls._fields))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, which preserves every bit of the numbers."""
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    @property
    def shared_deviation(self) -> float | None:
        """The common deviation of all labels, or None if each label has its own."""
        return float(self.deviation) if self.deviation.ndim == 0 else None

    def normalize(self, label: Any) -> Any:
        """Normalize labels to the scale of the model."""
        mean, deviation = self._broadcast_to(label)
        return (label - mean) / deviation

    def denormalize(self, prediction: Any) -> Any:
        """Convert predictions of the model to the unit of the labels."""
        mean, deviation = self._broadcast_to(prediction)
        return prediction * deviation + mean

    def _broadcast_to(self, numbers: Any) -> Scale:
        """Return the scale with the axes of `numbers`, because runs forbid rank promotion."""
        if self.mean.ndim == 0:
            return self
        shape = (1,) * (numbers.ndim - 1) + (-1,)
        return Scale(self.mean.reshape(shape), self.deviation.reshape(shape))


class Rows(DataSource):
    """A source of `features` float32 [F] and `label`, an int32 class or float32 [] or [K]."""

    is_light = has_rows = True

    def __init__(
        self,
        name: str,
        x_NF: npt.NDArray[np.float32],
        label_N: npt.NDArray[Any],
        classes: tuple[str, ...],
        scale: Scale | None,
        encoding: Mapping[str, Any],
        locate_row: Callable[[int], str],
    ) -> None:
        self._locate_row = locate_row
        self.name, self.classes, self.scale, self.encoding = name, classes, scale, encoding
        self._x_NF, self.label_N = x_NF, label_N

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self._x_NF[index], "label": self.label_N[index]}

    def locate_example(self, index: int) -> str:
        """Return the file of a row and its number in the file."""
        return self._locate_row(index)

    def read_rows(self, index_B: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return many rows at once: `features` [B, F], and `label` [B] or [B, K]."""
        features_BF, label_B = self._x_NF.take(index_B, axis=0), self.label_N.take(index_B, axis=0)
        return {"features": features_BF, "label": label_B}

    def fingerprint(self) -> str:
        """Return the numbers of rows and features, and a digest of all values and classes."""
        digest = hashlib.sha256(json.dumps(self.classes).encode(errors="surrogatepass"))
        digest.update(self._x_NF.tobytes() + self.label_N.tobytes())
        if self.scale is not None and self.scale.mean.ndim:
            # An earlier version computed the scale of several labels in float32. The digest must
            # differ, so that no run resumes with another scale of its labels.
            digest.update(self.scale.mean.tobytes() + self.scale.deviation.tobytes())
        shape = f"{len(self)} rows of {self._x_NF.shape[1]} features"
        return f"table, {shape}, sha256 {digest.hexdigest()[:12]}"


def open_source(data: Table, split: Split, spec: TrainSpec) -> Rows | None:
    """Open the rows of a split, None if nothing is held out. Raises DataError."""
    return _open_splits(data.model_dump_json(), spec.loss.target, _mark_tables(data))[split]


def _mark_tables(data: Table) -> Marks:
    """Return the files of a data block, with marks that differ if a file changes."""
    paths, has_splits = files.find_tables(data.path, "train", "path")
    return tuple(map(mark_file, [*paths, *held_out_paths(data, has_splits)]))


# The trainer opens each split and the task reads the number of features, from one reading of files.
@functools.lru_cache(maxsize=2)
def _open_splits(block: str, target: Target, marks: Marks) -> dict[Split, Rows | None]:
    data = Table.model_validate_json(block)
    table, has_splits = read_training_table(data)
    encoder = TableEncoder(data, table, target)
    paths = held_out_paths(data, has_splits)
    is_held_out_N = encoder.choose_held_out(table, has_eval_files=bool(paths))
    encoder.fit(table, ~is_held_out_N)
    held_out = encoder.select_rows(table, is_held_out_N) if is_held_out_N.any() else None
    if paths:
        eval_table = files.read_tables(paths, encoder.text_columns)
        held_out = encoder.select_rows(eval_table, np.ones(len(eval_table), bool))
    train = encoder.select_rows(table, ~is_held_out_N)
    (held_out or train).notes = encoder.note_classes([train], [held_out] if held_out else [])
    return {"train": train, "eval": held_out}


def read_training_table(data: Table) -> tuple[Columns, bool]:
    """Read the training table, and return whether file names contain splits. Raises DataError."""
    paths, has_splits = files.find_tables(data.path, "train", "path")
    # Digits of a declared column are read as texts: 01 is not 1, and 20261231 is not a date.
    return files.read_tables(paths, data.declared_columns), has_splits


def held_out_paths(data: Table, has_splits: bool) -> list[str]:
    """Return the files of the evaluation, empty if it has no files of its own."""
    if data.eval_path is not None:
        return files.find_tables(data.eval_path, "train", "eval_path")[0]
    return files.find_tables(data.path, "eval", "path")[0] if has_splits else []


class TableEncoder:
    """Fits the encoding of columns and labels on the training rows, and applies it to tables."""

    def __init__(self, data: Table, table: Columns, target: Target) -> None:
        self._data, self._target = data, target
        columns = [*table.values, *table.unusable]
        usual_labels = [name for name in build.LABEL_NAMES if name in columns][:1]
        self.label = usual_labels if data.label is None else as_list(data.label)
        if not self.label:
            problem = "has no column with a usual name of a label; set data.label"
            raise DataError(f"{table.name} {problem}; it has {list_names([*table.values])}")
        # A group, such as a patient, is not a feature.
        declared = data.declared_columns
        index_columns = [name for name in find_index_columns(table) if name not in declared]
        excluded = (*self.label, data.group, *index_columns)
        others = [name for name in columns if name and name not in excluded]
        self.names = data.columns if isinstance(data.columns, list) else others
        groups = [data.group] if data.group else []
        check_columns(table, [*self.label, *self.names, *groups, *declared])
        if not self.names:
            raise DataError(f"{table.name} has no column except the label; add one")
        self._features: Features | None = None
        self._classes: Sequence[Label] | None = data.classes
        self._scale: Scale | None = None
        # What was recognized, and warnings about the split.
        self.notes: list[str] = []
        if not isinstance(data.columns, list):
            self.notes += [f"{name!r} is an index, not a feature" for name in index_columns]
        converted = self.names if target == "class" else [*self.names, *self.label]
        self.notes += [
            f"{name!r} is read as {reading}"
            for name, reading in table.readings.items()
            if name in converted and name not in declared
        ]

    @property
    def text_columns(self) -> frozenset[str]:
        """The columns that are texts in training."""
        return frozenset() if self._features is None else self._features.text_columns

    def choose_held_out(self, table: Columns, *, has_eval_files: bool) -> npt.NDArray[np.bool_]:
        """Return whether `eval_split` holds each row out. With `has_eval_files` none is held out.

        Raises DataError if a split would have no rows, and for a row without a group.
        """
        data = self._data
        if has_eval_files or not data.eval_split:
            return np.zeros(len(table), bool)
        class_N = self._read_labels(table)[0] if self._target == "class" else None
        if data.group is None:
            key_N = row_keys(table, [*self.label, *self.names])
        else:
            key_N = group_keys(table, data.group)
        is_held_out_N = splits.choose_held_out(
            key_N,
            data.eval_split,
            data.split_seed,
            class_N,
            has_groups=data.group is not None,
            max_copies=MAX_COPIES,
        )
        splits.check_both_splits(is_held_out_N, data.eval_split, "rows")
        if data.group is None:
            self.notes += splits.divided_copies_notes(key_N, is_held_out_N)
        return is_held_out_N

    def note_classes(self, train: Sequence[Rows], held_out: Sequence[Rows]) -> list[str]:
        """Return all warnings, including those for classes without a row in a split.

        `train` and `held_out` are the rows of all parts of a mixture, or of a single table.
        """
        if self._target != "class":
            return self.notes
        label_N, held_out_N = (
            np.concatenate([np.zeros(0, np.int32), *(rows.label_N for rows in parts)])
            for parts in (train, held_out)
        )
        names = [*map(str, self._classes or ())]
        lost = splits.missing_class_notes(
            label_N, held_out_N if held_out else None, names, len(names)
        )
        return [*self.notes, *lost]

    def fit(self, table: Columns, is_train_N: npt.NDArray[np.bool_]) -> None:
        """Fit the encoding on rows of `is_train_N`, and the classes on all. Raises DataError."""
        self._features = fit_features(
            table, self.names, is_train_N, self._data.missing, self._data.declared_columns
        )
        label_N, self._classes = self._read_labels(table)
        if self._target == "regression":
            numbers = [_number_label(table, name, self._target) for name in self.label]
            number_NK = np.concatenate(numbers, axis=1)[is_train_N]
            mean_K, deviation_K = fit_statistics(number_NK)
            _check_resolution(table, self.label, number_NK, deviation_K)
            shape = label_N.shape[1:]
            mean, deviation = mean_K.reshape(shape), deviation_K.reshape(shape)
            self._scale = Scale(mean.astype(np.float32), deviation.astype(np.float32))

    def read_classes(self, table: Columns) -> list[Label]:
        """Return the classes of a table in the order of their numbers. Raises DataError."""
        return [*(self._read_labels(table)[1] or ())]

    def select_rows(self, table: Columns, is_selected_N: npt.NDArray[np.bool_]) -> Rows:
        """Encode the selected rows of a table. Raises DataError."""
        assert self._features is not None, "call fit first"
        check_columns(table, [*self.label, *self.names])
        label_N, classes = self._read_labels(table)
        x_NF, names = self._features.read_valid(table), tuple(map(str, classes or ()))
        row_N = np.flatnonzero(is_selected_N)
        scale = None if self._scale is None else self._scale.to_json()
        encoding = {"label": self.label, "classes": list(names), "scale": scale}
        return Rows(
            f"table {table.name}",
            x_NF[is_selected_N],
            label_N[is_selected_N],
            names,
            self._scale,
            self._features.to_json() | encoding,
            lambda number: table.locate_row(int(row_N[number])),
        )

    def _read_labels(self, table: Columns) -> tuple[npt.NDArray[Any], Sequence[Label] | None]:
        if self._target == "class":
            if len(self.label) > 1:
                problem = f"data.label names {len(self.label)} columns"
                raise DataError(f"{problem}; loss.target = class takes one")
            return self._read_class_labels(table, self.label[0])
        numbers = [_number_label(table, name, self._target) for name in self.label]
        label_NK = np.concatenate(numbers, axis=1).astype(np.float32)
        is_single = label_NK.shape[1] == 1 and self._target == "regression"
        return label_NK[:, 0] if is_single else label_NK, None

    def _read_class_labels(
        self, table: Columns, name: str
    ) -> tuple[npt.NDArray[Any], Sequence[Label] | None]:
        location, label = f"{table.name}, {name!r}", f"its label {name!r}"
        # 10% and 2026-12-31 are names of classes, too.
        texts = table.texts.get(name, table.values[name])
        numbers = None if name in table.texts else column_numbers(table, name)
        if numbers is None:
            for row, value in enumerate(texts):
                if is_missing_value(value):
                    raise DataError(f"{table.locate_row(row)}: {label} is empty; remove the row")
            return number_labels([str(value) for value in texts], self._classes, location)
        if numbers.shape[1] > 1:
            count = numbers.shape[1]
            raise DataError(
                f"{table.name}: {label} has {count} numbers in a row, and a class is one number; "
                "set data.label to another column"
            )
        number_N = numbers[:, 0]
        # NaN and infinity are not whole numbers either.
        is_whole_N = (number_N == np.trunc(number_N)) & (abs(number_N) < 2**31)
        for row in np.flatnonzero(~is_whole_N)[:1].tolist():
            if np.isnan(number_N[row]):
                raise DataError(f"{table.locate_row(row)}: {label} is empty; remove the row")
            problem = f"{label} is {number_N[row]}, not the number of a class"
            hint = "numbers are predicted with train.loss.target: regression"
            raise DataError(f"{table.locate_row(row)}: {problem}; {hint}")
        class_N = number_N.astype(np.int64)
        names = table.classes.get(name, ())
        if len(names) and class_N.min() >= 0 and class_N.max() < len(names):
            class_names = [names[number] for number in class_N]
            return number_labels(class_names, self._classes or names, location)
        label_N, _ = number_labels(class_N.tolist(), self._classes, location)
        return label_N, self._classes or tuple(range(int(label_N.max()) + 1))


def _number_label(table: Columns, name: str, target: Target) -> npt.NDArray[np.float64]:
    label, numbers = f"its label {name!r}", column_numbers(table, name)
    if numbers is None:
        raise DataError(f"{table.name}: {label} has texts; loss.target: {target} takes numbers")
    for row in np.flatnonzero(~np.isfinite(numbers).all(1))[:1].tolist():
        raise DataError(f"{table.locate_row(row)}: {label} is empty; remove the row")
    for row in np.flatnonzero((abs(numbers) > np.finfo(np.float32).max).any(1))[:1].tolist():
        problem = f"{label} is {abs(numbers[row]).max():g}, more than 32 bits can hold"
        raise DataError(f"{table.locate_row(row)}: {problem}; write it in a larger unit")
    return numbers


def _check_resolution(
    table: Columns, label: Sequence[str], number_NK: Column, deviation_K: Column
) -> None:
    """Raise DataError if the labels vary by less than a few steps of float32."""
    largest_K = np.abs(number_NK).max(0)
    is_constant_K = number_NK.max(0) == number_NK.min(0)
    step_K = np.spacing(largest_K.astype(np.float32)).astype(np.float64)
    for column in np.flatnonzero((deviation_K < MIN_STEPS * step_K) & ~is_constant_K)[:1].tolist():
        raise DataError(
            f"{table.name}: its label {', '.join(label)} varies by {deviation_K[column]:g} around "
            f"{number_NK[:, column].mean():g}, where 32 bits have steps of {step_K[column]:g}; "
            "subtract a constant from it, such as the smallest value"
        )


# --- mixtures -------------------------------------------------------------------------------------


class TableMixture(Mixture):
    """A mixture of tables in memory, with the attributes of `Rows`."""

    has_rows = True

    def __init__(self, parts: Mapping[str, Rows], weights: Mapping[str, float]) -> None:
        super().__init__(parts, weights)
        self._rows = list(parts.values())
        self._first_S = np.cumsum([0, *map(len, self._rows)])
        first = self._rows[0]
        self.classes, self.scale, self.encoding = first.classes, first.scale, first.encoding

    def read_rows(self, index_B: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Return many rows at once: `features` [B, F], and `label` [B] or [B, K]."""
        part_B = np.searchsorted(self._first_S, index_B, side="right") - 1
        batch: dict[str, npt.NDArray[Any]] = {}
        for number, part in enumerate(self._rows):
            is_part_B = part_B == number
            for key, values in part.read_rows(index_B[is_part_B] - self._first_S[number]).items():
                stacked = np.empty((len(index_B), *values.shape[1:]), values.dtype)
                batch.setdefault(key, stacked)[is_part_B] = values
        return batch


class _TablePart(NamedTuple):
    """A part of a mixture."""

    block: Table
    table: Columns
    is_held_out_N: npt.NDArray[np.bool_]
    # Files of the evaluation; empty if it has no files of its own.
    eval_paths: list[str]
    notes: list[str]


def open_mixture(data: MixtureBlock, split: Split, spec: TrainSpec) -> TableMixture | None:
    """Open the rows of a split of all parts. Raises DataError naming the part, or file and row."""
    marks: Marks = ()
    for name, block in data.part_sources().items():
        if isinstance(block, Table):
            with report_part(name):
                marks += _mark_tables(block)
    return _open_mixture_splits(data.model_dump_json(), spec.loss.target, marks)[split]


# The trainer opens each split and the task reads the number of features, from one reading of files.
@functools.lru_cache(maxsize=2)
def _open_mixture_splits(
    block: str, target: Target, marks: Marks
) -> dict[Split, TableMixture | None]:
    data = MixtureBlock.model_validate_json(block)
    weights = {name: part.weight for name, part in data.parts.items()}
    parts: dict[str, _TablePart] = {}
    for name, table_block in data.part_sources().items():
        if isinstance(table_block, Table):
            with report_part(name):
                parts[name] = _open_part(table_block, target, is_trained=weights[name] > 0)
    train_parts = {name: parts[name] for name in parts if weights[name]}
    columns = _check_columns(train_parts)
    classes = _check_classes(train_parts, target) if data.classes is None else data.classes
    trained_parts = [*train_parts.values()]
    tables = [_select_columns(part.table, columns) for part in trained_parts]
    train_table = files.concatenate_columns(tables)
    encoder = TableEncoder(
        trained_parts[0].block.model_copy(update={"classes": classes, "group": None}),
        train_table,
        target,
    )
    encoder.fit(train_table, np.concatenate([~part.is_held_out_N for part in trained_parts]))
    train: dict[str, Rows] = {}
    held_out: dict[str, Rows] = {}
    for name, part in parts.items():
        if weights[name]:
            train[name] = encoder.select_rows(part.table, ~part.is_held_out_N)
        if part.eval_paths:
            eval_table = files.read_tables(part.eval_paths, encoder.text_columns)
            table = _name_classes(eval_table, encoder.label, target)
            held_out[name] = encoder.select_rows(table, np.ones(len(table), bool))
        elif part.is_held_out_N.any():
            held_out[name] = encoder.select_rows(part.table, part.is_held_out_N)
    held_out_mixture = TableMixture(held_out, dict.fromkeys(held_out, 1.0)) if held_out else None
    train_mixture = TableMixture(train, weights)
    notes = encoder.note_classes([*train.values()], [*held_out.values()])
    (held_out_mixture or train_mixture).notes = [
        *(f"parts.{name}: {note}" for name, part in parts.items() for note in part.notes),
        *notes,
    ]
    return {"train": train_mixture, "eval": held_out_mixture}


def _open_part(block: Table, target: Target, *, is_trained: bool) -> _TablePart:
    """Open a part. A part that is not trained on is evaluated on its eval files, or else on all."""
    table, has_splits = read_training_table(block)
    paths = held_out_paths(block, has_splits)
    table = _name_classes(table, TableEncoder(block, table, target).label, target)
    if not is_trained:
        return _TablePart(block, table, np.ones(len(table), bool), paths or [*table.paths], [])
    encoder = TableEncoder(block, table, target)
    is_held_out_N = encoder.choose_held_out(table, has_eval_files=bool(paths))
    return _TablePart(block, table, is_held_out_N, paths, encoder.notes)


def _name_classes(table: Columns, label: list[str], target: Target) -> Columns:
    """Replace class numbers by names, because parts may number the same classes differently."""
    if target != "class":
        return table
    values, classes = dict(table.values), dict(table.classes)
    for name in label:
        names, number_N = classes.pop(name, ()), values.get(name)
        if not names or number_N is None or number_N.dtype.kind not in "iu":
            continue
        if number_N.min() >= 0 and number_N.max() < len(names):
            values[name] = np.array([*names, None], object)[number_N.astype(np.int64)]
    return dataclasses.replace(table, values=values, classes=classes)


def _check_columns(parts: Mapping[str, _TablePart]) -> list[str]:
    """Return the columns to read, including the label. Raises DataError if parts differ."""
    first_name, first = next(iter(parts.items()))
    names: dict[str, None] = {}
    for name, part in parts.items():
        encoder = TableEncoder(part.block, part.table, "class")
        groups = {other.block.group for other in parts.values() if part.block.columns is None}
        features = [column for column in encoder.names if column not in groups]
        names |= dict.fromkeys([*encoder.label, *features])
        for column in names:
            description = _describe_column(part.table, column)
            first_description = _describe_column(first.table, column)
            kinds = {description, first_description}
            if len(kinds) > 1 and kinds != {NO_VALUES, NUMBERS}:
                raise DataError(
                    f"train.data.parts.{name} has {description} in the column {column!r}, and "
                    f"train.data.parts.{first_name} has {first_description} there; give all parts "
                    "the same columns, or name those to read in train.data.columns"
                )
    return [*names]


def _check_classes(parts: Mapping[str, _TablePart], target: Target) -> list[str | int] | None:
    if target != "class":
        return None
    part_classes = {
        name: TableEncoder(part.block, part.table, target).read_classes(part.table)
        for name, part in parts.items()
    }
    first, expected = next(iter(part_classes.items()))
    for name, classes in part_classes.items():
        if {*map(str, classes)} != {*map(str, expected)}:
            raise DataError(
                f"train.data.parts.{name} has the {len(classes)} classes {list_names(classes)}, "
                f"and train.data.parts.{first} the {len(expected)} classes {list_names(expected)}; "
                "list the classes of both in train.data.classes"
            )
    return expected


def _describe_column(table: Columns, name: str) -> str:
    if name not in table.values:
        return "no numbers or texts" if name in table.unusable else "nothing"
    numbers = column_numbers(table, name)
    if numbers is None:
        return "texts"
    if not np.isfinite(numbers).any():
        return NO_VALUES
    return NUMBERS if numbers.shape[1] == 1 else f"{numbers.shape[1]} numbers"


def _select_columns(table: Columns, names: list[str]) -> Columns:
    selected: list[dict[str, Any]] = [
        {name: mapping[name] for name in names if name in mapping}
        for mapping in (
            table.values,
            table.classes,
            table.unusable,
            table.readings,
            table.texts,
        )
    ]
    return Columns(table.paths, table.ends_F, *selected)
