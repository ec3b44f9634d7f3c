"""What a table holds: rows, columns and their kinds, missing values, rows that are there twice."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.inspect import sheet
from jaxlaunch.trainer.sources.images import build
from jaxlaunch.trainer.sources.tables import features, files
from jaxlaunch.trainer.sources.tables.files import Columns

MOST_CLASSES = 100
LISTED = 20  # values of a column that are named


def looked(path: str, place: str, label: str | None, pictures: str | None) -> dict[str, Any]:
    """What is there, and the data block that reads it. Raises DataError."""
    paths, has_splits = files.found(place, "train", "path")
    table = files.read(paths)
    splits = {"train": len(table)}
    if has_splits and (held := files.found(place, "eval", "path")[0]):
        splits["eval"] = len(files.read(held))
    columns = {name: _column(table, name) for name in [*table.values, *table.unusable]}
    label = label or next((name for name in build.LABEL if name in table.values), None) or [*table.values][-1]
    if label not in table.values:
        raise DataError(f"{path} has no column {label!r} of numbers or texts; it has {', '.join(table.values)}")
    block: dict[str, Any] = {"source": "table", "path": path, "label": label}
    usable = [name for name, about in columns.items() if name and name != label and "refused" not in about]
    if len(usable) < sum(bool(name) and name != label for name in columns):
        block["columns"] = usable
    if any(columns[name]["missing"] for name in usable):
        block["missing"] = "mean"
    block |= {} if "eval" in splits else {"eval_split": 0.2}
    target, model = _target(table, label, columns[label], block)
    if pictures is not None:
        sheet.of_table(table, [*usable, label], pictures)
    return {
        "kind": "table",
        "splits": splits,
        "columns": columns,
        "duplicates": {"count": _twice(table), "first": []},
        "data": block,
        "model": {"classes": model},
        "loss": {"target": target},
    }


def _column(table: Columns, name: str) -> dict[str, Any]:
    """Kind, missing values and the range or the values of a column; why it cannot be a feature."""
    if name in table.unusable:
        return {"kind": "other", "missing": 0, "refused": table.unusable[name]}
    try:
        found = features.numbers(table, name)
    except DataError as error:
        return {"kind": "mixed", "missing": 0, "refused": str(error)}
    if found is None:
        counts = collections.Counter("" if value is None else str(value) for value in table.values[name])
        missing = counts.pop("", 0)
        about: dict[str, Any] = {"kind": "texts", "missing": missing, "different": len(counts)}
        if len(counts) > features.MOST_VALUES:
            return about | {"refused": f"has {len(counts)} different texts"}
        return about | {"values": dict(counts.most_common(LISTED))}
    known = found[np.isfinite(found)]
    shape = list(table.values[name].shape[1:])
    dtype = "numbers" if table.values[name].dtype.kind == "O" else str(table.values[name].dtype)
    about = {"kind": dtype, "missing": int(len(found) - np.isfinite(found).all(1).sum())} | (
        {"shape": shape} if shape else {}
    )
    if not len(known):
        return about | {"refused": "has no value"}
    return about | {"least": float(known.min()), "mean": float(known.mean()), "most": float(known.max())}


def _target(table: Columns, label: str, about: dict[str, Any], block: dict[str, Any]) -> tuple[str, int]:
    """What is predicted, and the outputs of the model; the block gets the classes where they are no 0 to n - 1."""
    found = features.numbers(table, label)
    if found is None:
        return "class", about["different"]
    known = found[np.isfinite(found)]
    different = np.unique(known)
    named = table.classes.get(label)
    if named is not None:
        return "class", len(named)
    if found.shape[1] > 1 or len(different) > MOST_CLASSES or (different != np.trunc(different)).any():
        return "regression", found.shape[1]
    if different.tolist() != list(range(len(different))):
        block["classes"] = [int(each) for each in different]
    return "class", len(different)


def _twice(table: Columns) -> int:
    """Rows that are equal to one before them."""
    seen: set[tuple[Any, ...]] = set()
    for row in zip(*(values.tolist() for values in table.values.values()), strict=True):
        seen.add(tuple(map(str, row)))
    return len(table) - len(seen)
