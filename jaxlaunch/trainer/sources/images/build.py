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
from jaxlaunch.trainer.sources.images import held, index, labels, picture
from jaxlaunch.trainer.sources.images.index import Index, joined, shown
from jaxlaunch.trainer.sources.images.labels import Label
from jaxlaunch.trainer.sources.images.listing import Found
from jaxlaunch.trainer.spec import Images

IMAGE = ("image", "file_name", "filename", "file", "path", "image_path", "img", "image_id")
LABEL = ("label", "labels", "class", "category", "target", "fine_label", "y")
Classes = Sequence[Label] | None


def built(data: Images, found: Found, classes: Classes, folder: Path) -> Index:
    """The index of what was found; `classes` are those of training, or of the job. Raises DataError."""
    if not found.names:
        return index.of_files(found.root, [], [], ())
    match found.kind:
        case "folder" | "files":
            made = _of_folders(found, classes)
        case "list":
            made = _of_lists(data, found, classes)
        case _:
            made = held.built(data, found, classes, folder)
    return dataclasses.replace(made, has_splits=found.has_splits)


def _of_folders(found: Found, classes: Classes) -> Index:
    """The class of an image is the folder below the set's, or below that of its split; of a glob, its own folder."""
    where = shown(found.root or os.path.dirname(found.names[0]))
    depth = 1 if found.has_splits else 0
    of_names: list[str] = []
    for name in found.names:
        parts = name.split("/")
        is_inside = len(parts) > depth + 1
        if not is_inside:
            raise DataError(
                f"{shown(joined(found.root, name))} is in no folder of a class; the images of a class are in a folder "
                "of its name, or a .csv has paths and labels"
            )
        of_names.append(parts[depth] if found.kind == "folder" else parts[-2])
    if found.kind == "folder":
        _check_empty(found, set(of_names), depth)
    label_N, named = labels.numbered(of_names, classes, where)
    return index.of_files(found.root, found.names, label_N, named, found.left_out)


def _check_empty(found: Found, classes: set[str], depth: int) -> None:
    if remote.is_remote(found.root):
        return
    root = joined(found.root, found.names[0].split("/")[0]) if depth else found.root
    with os.scandir(root) as entries:
        there = sorted(each.name for each in entries if not each.name.startswith(".") and each.is_dir())
    if empty := [name for name in there if name not in classes]:
        raise DataError(
            f"{shown(root)}: the folder {empty[0]!r} has no image ({', '.join(picture.ENDINGS)}); fill or remove it"
        )


# --- lists of paths and labels ----------------------------------------------------------------------------------------


def _of_lists(data: Images, found: Found, classes: Classes) -> Index:
    names: list[str] = []
    raw: list[Label] = []
    of_name: dict[str, Label] = {}
    for path in (joined(found.root, name) for name in found.names):
        column = None
        for number, row in rows(path):
            column = column or (
                _column(path, data.image, "image", IMAGE, row),
                _column(path, data.label, "label", LABEL, row),
            )
            name, label = row.get(column[0]), row.get(column[1])
            if not isinstance(name, str) or not name:
                raise DataError(f"{shown(path)}, row {number}: its {column[0]!r} names no file")
            if label is None or label == "" or not isinstance(label, str | int):
                raise DataError(f"{shown(path)}, row {number}: its {column[1]!r} is not a label, but {label!r}")
            names.append(name if name.startswith("/") or "://" in name else joined(os.path.dirname(path), name))
            raw.append(labels.whole(label))
            where = f"{shown(path)}, row {number}"
            if (other := of_name.setdefault(names[-1], raw[-1])) != raw[-1]:
                raise DataError(f"{where}: {shown(name)} is of class {raw[-1]!r}, and of {other!r} above; keep one")
            if data.on_broken == "stop" and not remote.is_remote(names[-1]) and not os.path.isfile(names[-1]):
                what = "is a folder" if os.path.isdir(names[-1]) else "is not there"
                raise DataError(f"{where}: the file {shown(names[-1])} {what}; fix or remove the row")
        if column is None:
            raise DataError(f"{shown(path)} has no rows")
    if not all(isinstance(label, int) for label in raw):
        raw = [str(label) for label in raw]
    label_N, named = labels.numbered(raw, classes, shown(joined(found.root, found.names[0])))
    return index.of_files("", names, label_N, named)


def rows(path: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a .csv, .tsv or .jsonl with their numbers from 1. Raises DataError naming the row."""
    text = io.TextIOWrapper(io.BytesIO(files.read_bytes(path, 0, files.file_size(path))), "utf-8-sig", newline="")
    try:
        yield from _lines(path, text) if path.lower().endswith((".jsonl", ".ndjson")) else _csv(path, text)
    except UnicodeDecodeError as error:
        raise DataError(f"{shown(path)} is not UTF-8: {error.reason}; save it as UTF-8") from None


def _lines(path: str, text: io.TextIOWrapper) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{shown(path)}, row {number}: it is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{shown(path)}, row {number}: it is not an object with fields by name")
            yield number, row


def _csv(path: str, text: io.TextIOWrapper) -> Iterator[tuple[int, Mapping[str, Any]]]:
    first = text.readline()
    delimiter = "\t" if path.lower().endswith(".tsv") else ";" if ";" in first and "," not in first else ","
    reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if twice := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"{shown(path)} has two columns {twice!r}; rename one")
        for number, values in enumerate(reader, 1):
            if values and len(values) != len(header):
                raise DataError(f"{shown(path)}, row {number}: {len(values)} values, and the header has {len(header)}")
            if values:
                yield number, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{shown(path)}, line {reader.line_num}: {error}") from None


def _column(path: str, asked: str | None, key: str, usual: Sequence[str], row: Mapping[str, Any]) -> str:
    """The column that is asked for, else the first of the usual names that is there. Raises DataError for none."""
    if asked is not None and asked in row:
        return asked
    if asked is None and (name := next((each for each in usual if each in row), None)):
        return name
    what = f"no column {asked!r}" if asked else f"no column of the {key} by a usual name; set data.{key}"
    raise DataError(f"{shown(path)} has {what}; it has {', '.join(map(str, row)) or 'none'}")
