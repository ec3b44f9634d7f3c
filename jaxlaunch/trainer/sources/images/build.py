"""Makes the index of a split: of folders by class, of lists, and of files that hold many images."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import containers, index, picture
from jaxlaunch.trainer.sources.images.index import Index, Label, join_path, number_labels, parse_label, printable
from jaxlaunch.trainer.sources.images.listing import Found
from jaxlaunch.trainer.spec import Images

IMAGE = ("image", "file_name", "filename", "file", "path", "image_path", "img", "image_id")
LABEL = ("label", "labels", "class", "category", "target", "fine_label", "y")
Classes = Sequence[Label] | None
Row = Mapping[str, Any]


def build_index(data: Images, found: Found, classes: Classes, folder: Path) -> Index:
    """Return the index of what was found; `classes` are those of training, or of the job. Raises DataError."""
    if not found.names:
        return index.make_index(found.root, [], [], ())
    match found.kind:
        case "folder" | "files":
            built = _index_folders(found, classes)
        case "list":
            built = _index_lists(data, found, classes)
        case _:
            built = containers.build_index(data, found, classes, folder)
    return dataclasses.replace(built, has_splits=found.has_splits)


def _index_folders(found: Found, classes: Classes) -> Index:
    """Index images by the folder below the set's, or below that of its split; those of a glob by their own folder."""
    depth = 1 if found.has_splits else 0
    labels: list[str] = []
    for name in found.names:
        parts = name.split("/")
        if len(parts) <= depth + 1:
            raise DataError(
                f"{printable(join_path(found.root, name))} is in no folder of a class; the images of a class are in a "
                "folder of its name, or a .csv has paths and labels"
            )
        labels.append(parts[depth] if found.kind == "folder" else parts[-2])
    if found.kind == "folder" and not remote.is_remote(found.root):
        root = join_path(found.root, found.names[0].split("/")[0]) if depth else found.root
        with os.scandir(root) as entries:
            names = {entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()}
        if empty := sorted(names - set(labels)):
            raise DataError(
                f"{printable(root)}: the folder {empty[0]!r} has no image ({', '.join(picture.ENDINGS)}); fill or "
                "remove it"
            )
    where = printable(found.root or os.path.dirname(found.names[0]))
    label_N, class_names = number_labels(labels, classes, where)
    return index.make_index(found.root, found.names, label_N, class_names, found.left_out)


# --- lists of paths and labels ----------------------------------------------------------------------------------------


def _index_lists(data: Images, found: Found, classes: Classes) -> Index:
    names: list[str] = []
    labels: list[Label] = []
    labels_by_name: dict[str, Label] = {}
    paths = [join_path(found.root, name) for name in found.names]
    for path in paths:
        columns = None
        for number, row in read_rows(path):
            columns = columns or (
                _find_column(path, data.image, "image", IMAGE, row),
                _find_column(path, data.label, "label", LABEL, row),
            )
            name, label = row.get(columns[0]), row.get(columns[1])
            where = f"{printable(path)}, row {number}"
            if not isinstance(name, str) or not name:
                raise DataError(f"{where}: its {columns[0]!r} names no file")
            if label is None or label == "" or not isinstance(label, str | int):
                raise DataError(f"{where}: its {columns[1]!r} is not a label, but {label!r}")
            image = name if name.startswith("/") or "://" in name else join_path(os.path.dirname(path), name)
            label = parse_label(label)
            if (other := labels_by_name.setdefault(image, label)) != label:
                raise DataError(f"{where}: {printable(name)} is of class {label!r}, and of {other!r} above; keep one")
            if data.on_broken == "stop" and not remote.is_remote(image) and not os.path.isfile(image):
                what = "is a folder" if os.path.isdir(image) else "is not there"
                raise DataError(f"{where}: the file {printable(image)} {what}; fix or remove the row")
            names.append(image)
            labels.append(label)
        if columns is None:
            raise DataError(f"{printable(path)} has no rows")
    if not all(isinstance(label, int) for label in labels):
        labels = [str(label) for label in labels]
    label_N, class_names = number_labels(labels, classes, printable(paths[0]))
    return index.make_index("", names, label_N, class_names)


def _find_column(path: str, asked: str | None, key: str, usual: Sequence[str], row: Row) -> str:
    """Return the column that is asked for, else the first of the usual names that is there. Raises DataError."""
    for name in usual if asked is None else [asked]:
        if name in row:
            return name
    what = f"no column {asked!r}" if asked else f"no column of the {key} by a usual name; set data.{key}"
    raise DataError(f"{printable(path)} has {what}; it has {', '.join(map(str, row)) or 'none'}")


def read_rows(path: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a .csv, .tsv or .jsonl with their numbers from 1. Raises DataError naming the row."""
    data = files.read_bytes(path, 0, files.file_size(path))
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="")
    try:
        yield from _read_json(path, text) if path.lower().endswith((".jsonl", ".ndjson")) else _read_csv(path, text)
    except UnicodeDecodeError as error:
        raise DataError(f"{printable(path)} is not UTF-8: {error.reason}; save it as UTF-8") from None


def _read_json(path: str, text: io.TextIOWrapper) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            where = f"{printable(path)}, row {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: it is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: it is not an object with fields by name")
            yield number, row


def _read_csv(path: str, text: io.TextIOWrapper) -> Iterator[tuple[int, Row]]:
    first = text.readline()
    delimiter = "\t" if path.lower().endswith(".tsv") else ";" if ";" in first and "," not in first else ","
    reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"{printable(path)} has two columns {twice!r}; rename one")
        for number, values in enumerate(reader, 1):
            if values and len(values) != len(header):
                counts = f"{len(values)} values, and the header has {len(header)}"
                raise DataError(f"{printable(path)}, row {number}: {counts}")
            if values:
                yield number, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{printable(path)}, line {reader.line_num}: {error}") from None
