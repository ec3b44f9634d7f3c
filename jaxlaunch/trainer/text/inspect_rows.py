"""Recognizes rows of text for `launcher data`: their format and layouts, and the block for them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.text import chats, documents, layouts
from jaxlaunch.trainer.text.documents import Part, UnfitRowError, Values

# Number of unfit rows in the report.
SHOWN_ROWS = 10
FORMATS = (layouts.PREFERENCE, layouts.KTO, layouts.CHAT)


def inspect_rows(path: str, location: str, other_columns: Collection[str]) -> dict[str, Any] | None:
    """Return a report on rows of text and the keys that train on them, None for other data.

    One of `other_columns` makes a row with a text one of a table or of a list of images.
    Raises DataError for files of JSON, which only texts are read from, in no known layout.
    """
    try:
        paths = documents.find_files(location)
    except DataError:
        return None
    if any(documents.file_kind(name) == "text" for name in paths):
        return None
    parts = list(itertools.chain.from_iterable(documents.split_units(paths)))
    first_row: Values = next(_read_rows(parts[0]), {})
    row_format = _recognize(first_row, other_columns)
    if row_format is None:
        if all(name.lower().endswith(".json") for name in paths):
            raise DataError(f"{paths[0]}, row 1: {_describe_mismatch(first_row)}")
        return None
    counts: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    unfit: list[str] = []
    rows_by_path: Counter[str] = Counter()
    unfit_count = 0
    is_plain = row_format == layouts.CHAT
    for part in parts:
        for values in _read_rows(part):
            rows_by_path[part.path] += 1
            try:
                if row_format == "text":
                    _check_text(values)
                    counts["text"] += 1
                    continue
                row = layouts.read_row(values, row_format)
            except UnfitRowError as error:
                unfit_count += 1
                place = f"{part.path}, row {rows_by_path[part.path]}"
                unfit += [f"{place}: {error}"] if len(unfit) < SHOWN_ROWS else []
                continue
            counts[row.layout] += 1
            is_plain &= row.is_plain
            unread.update(row.unread)
    if is_plain:
        row_format = layouts.COMPLETION
    is_comparison = row_format in (layouts.PREFERENCE, layouts.KTO)
    block = {"source": "text", "path": path, "format": row_format, "tokenizer": "FOLDER"}
    loss: dict[str, Any] = {"loss": {layouts.KTO: {}}} if row_format == layouts.KTO else {}
    return {
        "kind": "text",
        "splits": {"train": rows_by_path.total()},
        "format": row_format,
        "layouts": dict(counts.most_common()),
        "unread": dict(unread.most_common()),
        "broken": {"count": unfit_count, "first": unfit},
        "task": "dpo" if is_comparison else "lm",
        "data": block,
        **loss,
    }


def _read_rows(part: Part) -> Iterator[Values]:
    columns = {name for row_format in FORMATS for name in layouts.list_columns(row_format)}
    names = (*sorted(columns), *chats.OPTIONAL_FIELDS, documents.DEFAULT_FIELD)
    return (values for values, _ in documents.read_rows(part, None, dict, names))


def _recognize(values: Values, other_columns: Collection[str]) -> str | None:
    """Return the format of a row: text, or that of its layout."""
    recognized = layouts.recognize_row(values)
    if recognized is not None:
        return recognized[0]
    is_text = isinstance(values.get(documents.DEFAULT_FIELD), str)
    return "text" if is_text and not any(name in values for name in other_columns) else None


def _check_text(values: Values) -> None:
    """Raise UnfitRowError for a row that does not contain a text."""
    field = documents.DEFAULT_FIELD
    if field not in values:
        raise UnfitRowError(f"it has the columns {', '.join(values) or 'none'}, and no {field!r}")
    if not isinstance(values[field], str):
        kind = documents.describe_value(values[field])
        raise UnfitRowError(f"its {field!r} is {kind}, not a text")


def _describe_mismatch(values: Values) -> str:
    unfit = (layouts.find_unfit_values(values, row_format) for row_format in FORMATS)
    problems = dict.fromkeys(itertools.chain.from_iterable(unfit))
    formats = "; ".join(layouts.describe_layouts(row_format) for row_format in FORMATS)
    mismatch = f"it has the columns {', '.join(values)}, and the known layouts are {formats}"
    return "; ".join([*problems, mismatch])
