"""Rows of a table as a file, .csv, .jsonl or .parquet: it appears when all rows are in it."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import atomic_file
from jaxlaunch.trainer.errors import DataError, SpecError

ENDINGS = (".csv", ".jsonl", ".parquet")
ROWS = 4096  # of a group of Parquet
Row = Mapping[str, Any]


def check(path: str) -> None:
    """Raises SpecError for a name or a place that no table is written to."""
    if "://" in path:
        raise SpecError(f"{path} is not a local file; write to a local one, and copy it from there")
    if os.path.splitext(path)[1] not in ENDINGS:
        raise SpecError(f"{path} has an unknown ending; {', '.join(ENDINGS)} can be written")
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SpecError(f"{path} cannot be written: {folder} is not a folder that this user can write to")


def write(path: str | None, rows: Iterable[Row], most: int) -> tuple[int, list[Row]]:
    """Writes the rows; their number, and without a path the first `most` of them. Raises DataError where none is."""
    each = iter(rows)
    first = next(each, None)
    if first is None:
        raise DataError("nothing is left that can be read")
    whole = itertools.chain([first], each)
    if path is None:
        kept = list(itertools.islice(whole, most))
        return len(kept) + sum(1 for _ in whole), kept
    count = 0
    with atomic_file.draft(Path(path)) as draft, _writer(os.path.splitext(path)[1], draft, first) as add:
        for row in whole:
            add(row)
            count += 1
    return count, []


@contextlib.contextmanager
def _writer(ending: str, path: Path, first: Row) -> Iterator[Callable[[Row], None]]:
    """What adds a row; `first` has the columns of all."""
    if ending == ".parquet":
        with _parquet(path) as add:
            yield add
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if ending == ".jsonl":
            yield lambda row: print(json.dumps(row, ensure_ascii=False), file=file)
            return
        table = csv.DictWriter(file, [*first])
        table.writeheader()
        yield table.writerow


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Callable[[Row], None]]:
    import pyarrow
    from pyarrow import parquet

    held: list[Row] = []
    writer = None

    def flush() -> None:
        nonlocal writer
        group = pyarrow.Table.from_pylist(held)
        writer = writer or parquet.ParquetWriter(path, group.schema)
        writer.write_table(group)
        held.clear()

    def add(row: Row) -> None:
        held.append(row)
        if len(held) == ROWS:
            flush()

    try:
        yield add
        if held:
            flush()
    finally:
        if writer is not None:
            writer.close()
