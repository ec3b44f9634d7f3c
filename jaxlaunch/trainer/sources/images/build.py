"""Builds the index of a split from class folders, lists, and files that contain many images.

Members of WebDataset tars and values of uncompressed Arrow files are read in place. The images of a
Parquet file are copied to the cache, because Parquet can only be read by row groups, a hundred
images at a time. As in Hugging Face's datasets, a column has bytes, or structs with bytes.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlaunch import atomic_file
from jaxlaunch.spelling import suggest_name
from jaxlaunch.trainer.buckets import faults, remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.files import printable_path
from jaxlaunch.trainer.errors import DataError, StorageError
from jaxlaunch.trainer.sources.images import index
from jaxlaunch.trainer.sources.images.index import (
    Index,
    Label,
    Member,
    join_path,
    number_labels,
    parse_label,
)
from jaxlaunch.trainer.sources.images.listing import FileListing
from jaxlaunch.trainer.sources.images.picture import IMAGE_SUFFIXES
from jaxlaunch.trainer.spec import Images

IMAGE_NAMES = ("image", "file_name", "filename", "file", "path", "image_path", "img", "image_id")
LABEL_NAMES = ("label", "labels", "class", "category", "target", "fine_label", "y")
# Members of a WebDataset that contain a label.
LABEL_MEMBERS = (".cls", ".cls.txt", ".label", ".txt")
# Fields of the JSON members of a WebDataset that contain a label.
LABEL_FIELDS = ("label", "cls", "class", "category")
# Larger members are not read as labels.
MAX_LABEL_BYTES = 1 << 20
# Number of rows of a Parquet file that are in memory at once.
BATCH_ROWS = 256
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "category", "target")
_HINTS = {
    "tar": "a member of the same name with .cls or .json has it, or the folder that the "
    "image is in",
    "table": "set data.label to the column that has it",
}
Classes = Sequence[Label] | None
Row = Mapping[str, Any]


def build_index(data: Images, listing: FileListing, classes: Classes, folder: Path) -> Index:
    """Build the index of the listed files. `classes` are the allowed classes, None for any."""
    if not listing.names:
        return index.make_index(listing.root, [], [], ())
    match listing.kind:
        case "folder" | "files":
            image_index = _index_folders(listing, classes)
        case "list":
            image_index = _index_lists(data, listing, classes)
        case _:
            image_index = _index_containers(data, listing, classes, folder)
    return dataclasses.replace(image_index, has_splits=listing.has_splits)


def identify_images(
    data: Images, listing: FileListing, image_index: Index, patterns: Sequence[str]
) -> splits.Keys:
    """Return the hash of each image's group, or else of its identity. Raises DataError."""
    if data.group is not None:
        match listing.kind:
            case "list":
                return np.array([key for _, key in _list_identities(data, listing)], np.uint64)
            case "tar" | "table":
                assert image_index.key_N is not None, "its members have groups"
                return image_index.key_N
        raise DataError(
            f"data.group = {data.group} is a column, and {printable_path(patterns[0])} holds image "
            "files without columns; list their paths, labels and groups in a .csv or .jsonl"
        )
    names = listing.names
    if listing.kind == "list":
        names = tuple(name for name, _ in _list_identities(data, listing))
    elif listing.kind == "files":
        names = tuple(splits.name_files(patterns, names))
    return image_index.identify_images(names)


def _index_folders(listing: FileListing, classes: Classes) -> Index:
    """Build the index of images in class folders, or of files whose folder is their class."""
    depth = 1 if listing.has_splits else 0
    labels: list[str] = []
    for name in listing.names:
        parts = name.split("/")
        if len(parts) <= depth + 1:
            raise DataError(
                f"{printable_path(join_path(listing.root, name))} is not in a class folder; put "
                "the images of a class into a folder of its name, or list paths and labels in .csv"
            )
        labels.append(parts[depth] if listing.kind == "folder" else parts[-2])
    if listing.kind == "folder" and not remote.is_remote(listing.root):
        root = join_path(listing.root, listing.names[0].split("/")[0]) if depth else listing.root
        folders = {path.name for path in Path(root).iterdir() if path.is_dir()}
        empty = sorted(name for name in folders - set(labels) if not name.startswith("."))
        if empty:
            problem = f"the folder {empty[0]!r} has no image ({', '.join(IMAGE_SUFFIXES)})"
            raise DataError(f"{printable_path(root)}: {problem}; fill or remove it")
    location = printable_path(listing.root or os.path.dirname(listing.names[0]))
    label_N, class_names = number_labels(labels, classes, location)
    return index.make_index(listing.root, listing.names, label_N, class_names, listing.left_out)


# --- lists of paths and labels --------------------------------------------------------------------


def _index_lists(data: Images, listing: FileListing, classes: Classes) -> Index:
    names: list[str] = []
    labels: list[Label] = []
    labels_by_name: dict[str, Label] = {}
    paths = [join_path(listing.root, name) for name in listing.names]
    for path in paths:
        columns = None
        for number, row in read_rows(path):
            columns = columns or (
                _find_column(path, data.image, "image", IMAGE_NAMES, row),
                _find_column(path, data.label, "label", LABEL_NAMES, row),
            )
            name, label = row.get(columns[0]), row.get(columns[1])
            location = f"{printable_path(path)}, row {number}"
            if not isinstance(name, str) or not name:
                raise DataError(
                    f"{location}: its {columns[0]!r} is {name!r}, not the path of an image"
                )
            if label is None or label == "" or not isinstance(label, str | int):
                raise DataError(f"{location}: its {columns[1]!r} is {label!r}, not a label")
            image, label = join_path(os.path.dirname(path), name), parse_label(label)
            if (other_label := labels_by_name.setdefault(image, label)) != label:
                classes_text = f"of class {label!r}, and of {other_label!r} above"
                raise DataError(f"{location}: {printable_path(name)} is {classes_text}; keep one")
            is_readable = remote.is_remote(image) or os.path.isfile(image)
            if data.on_broken == "stop" and not is_readable:
                problem = "is a folder" if os.path.isdir(image) else "is not there"
                fault = f"the file {printable_path(image)} {problem}; fix or remove the row"
                raise DataError(f"{location}: {fault}")
            names.append(image)
            labels.append(label)
        if columns is None:
            raise DataError(f"{printable_path(path)} has no rows")
    if not all(isinstance(label, int) for label in labels):
        labels = [str(label) for label in labels]
    label_N, class_names = number_labels(labels, classes, printable_path(paths[0]))
    return index.make_index("", names, label_N, class_names)


def _list_identities(data: Images, listing: FileListing) -> Iterator[tuple[str, int]]:
    """Yield the name of each image in the list, and the hash of its group, 0 without groups."""
    for path in (join_path(listing.root, name) for name in listing.names):
        column = None
        for number, row in read_rows(path):
            column = column or _find_column(path, data.image, "image", IMAGE_NAMES, row)
            group = 0
            if data.group is not None:
                location = f"{printable_path(path)}, row {number}"
                group = _group_key(data.group, row.get(data.group), location)
            yield str(row[column]), group


def _group_key(name: str, value: Any, location: str) -> int:
    """Return the hash of an image's group. Raises DataError if it has none."""
    if value is None or value == "":
        raise DataError(f"{location}: it has no group {name!r}; name one, or remove the row")
    return splits.hash_value(value)


def _find_column(
    path: str, requested: str | None, key: str, usual_names: Sequence[str], row: Row
) -> str:
    """Return the requested column, or else the first usual name in the row. Raises DataError."""
    for name in usual_names if requested is None else [requested]:
        if name in row:
            return name
    problem = f"no column of the {key} by a usual name; set data.{key}"
    if requested:
        problem = f"no column {requested!r}{suggest_name(requested, row)}"
    names = ", ".join(map(str, row)) or "none"
    raise DataError(f"{printable_path(path)} has {problem}; it has {names}")


def check_row_columns(data: Images, path: str, row: Row) -> None:
    """Raise DataError for a column that the data block names and that a row does not have."""
    for key, name in (("image", data.image), ("label", data.label), ("group", data.group)):
        if name is not None:
            _find_column(path, name, key, (), row)


def read_rows(path: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a .csv, .tsv or .jsonl file, numbered from 1. Raises DataError."""
    data = files.read_bytes(path, 0, files.file_size(path))
    text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="")
    parse = _read_json if path.lower().endswith((".jsonl", ".ndjson")) else _read_csv
    try:
        yield from parse(path, text)
    except UnicodeDecodeError as error:
        fault = f"{printable_path(path)} is not UTF-8: {error.reason}; save it as UTF-8"
        raise DataError(fault) from None


def _read_json(path: str, text: io.TextIOWrapper) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(text, 1):
        if line.strip():
            location = f"{printable_path(path)}, row {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{location}: it is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{location}: it is not a JSON object")
            yield number, row


def _read_csv(path: str, text: io.TextIOWrapper) -> Iterator[tuple[int, Row]]:
    first_line = text.readline()
    delimiter = ";" if ";" in first_line and "," not in first_line else ","
    delimiter = "\t" if path.lower().endswith(".tsv") else delimiter
    reader = csv.reader(itertools.chain([first_line], text), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if duplicate := next((name for name in header if header.count(name) > 1), None):
            raise DataError(f"{printable_path(path)} has two columns {duplicate!r}; rename one")
        for number, values in enumerate(reader, 1):
            if values and len(values) != len(header):
                counts = f"{len(values)} values, and the header has {len(header)}; correct the row"
                raise DataError(f"{printable_path(path)}, row {number}: {counts}")
            if values:
                yield number, dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{printable_path(path)}, line {reader.line_num}: {error}") from None


# --- files that contain many images ---------------------------------------------------------------


def _index_containers(data: Images, listing: FileListing, classes: Any, folder: Path) -> Index:
    """Build the index of all images in tars or tables. Raises DataError naming the image."""
    paths = [join_path(listing.root, name) for name in listing.names]
    sources: list[str] = []
    members: list[Member] = []
    counts: list[int] = []
    names: list[str] | None = None
    for file_index, path in enumerate(paths):
        if listing.kind == "tar":
            source, file_members = path, list(_tar_members(path, data))
        else:
            copy_path = folder / f"{file_index}.images"
            source, file_members, file_classes = column_members(data, path, copy_path)
            names = file_classes if names is None else names
            if file_classes != names:
                first = printable_path(paths[0])
                raise DataError(f"{printable_path(path)} names other classes than {first}")
        if not file_members:
            raise DataError(f"{printable_path(path)} holds no image")
        sources.append(source)
        members += file_members
        counts.append(len(file_members))
    file_N = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    labels: list[Label] = []
    for member_index, member in enumerate(members):
        if member.label is None:
            file_index = file_N[member_index]
            path, row = paths[file_index], member_index - sum(counts[:file_index]) + 1
            hint = _HINTS[listing.kind]
            raise DataError(f"{printable_path(path)}, image {row} has no label; {hint}")
        labels.append(member.label)
    if names is not None and all(isinstance(label, int) for label in labels):
        labels = [names[int(label)] if 0 <= int(label) < len(names) else label for label in labels]
        classes = classes or names
    elif not all(isinstance(label, int) for label in labels):
        labels = [str(label) for label in labels]
    label_N, class_names = number_labels(labels, classes, printable_path(paths[0]))
    return dataclasses.replace(
        index.make_index("", sources, label_N, class_names),
        file_N=file_N,
        start_N=np.array([member.start for member in members], np.int64),
        size_N=np.array([member.size for member in members], np.int64),
        key_N=None
        if data.group is None
        else np.array([member.group for member in members], np.uint64),
        printed=tuple(paths),
        identity=files.sample_digest(paths),
    )


class _SourceFile(io.RawIOBase):
    """A seekable reader of a local file or an object in a bucket."""

    def __init__(self, path: str) -> None:
        self._path, self._position, self._size = path, 0, files.file_size(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = files.read_bytes(self._path, self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextlib.contextmanager
def open_tar(path: str) -> Iterator[tarfile.TarFile]:
    """Open a tar for reading. Errors within the block become DataError or StorageError."""
    try:
        with (
            files.report_damage(path, "is not a tar, or is truncated or damaged"),
            tarfile.open(fileobj=io.BufferedReader(_SourceFile(path), 1 << 16), mode="r:") as tar,
        ):
            yield tar
    except OSError as error:
        raise faults.read_error(f"{printable_path(path)} cannot be read", error) from error


def _tar_members(path: str, data: Images) -> Iterator[Member]:
    """Yield the images of a tar, each with the label of the members of the same name.

    The name of a member extends to the first dot.
    """
    with open_tar(path) as tar:
        for key, infos in itertools.groupby(_visible_members(tar, path), _member_key):
            image, label, group = None, None, None
            for info in infos:
                ending = info.name[len(key) :].lower()
                if ending.endswith(IMAGE_SUFFIXES):
                    if image is not None:
                        hint = "has two images; give each a name of its own"
                        raise DataError(f"{printable_path(path)}: {printable_path(key)} {hint}")
                    folder = os.path.basename(os.path.dirname(key))
                    image = Member(info.offset_data, info.size, folder or None)
                    continue
                member_label = _read_label(tar, info, ending, data.label, path)
                label = label if member_label is None else member_label
                if data.group is not None and ending == ".json":
                    group = _read_label(tar, info, ending, data.group, path)
            if image is None:
                continue
            if data.group is not None:
                location = f"{printable_path(path)}, {printable_path(key)}"
                image = image._replace(group=_group_key(data.group, group, location))
            yield image._replace(label=image.label if label is None else label)


def _visible_members(tar: tarfile.TarFile, path: str) -> Iterator[tarfile.TarInfo]:
    """Yield the files of a tar that are not hidden. Raises DataError if the tar is truncated."""
    size = files.file_size(path)
    for info in tar:
        if not info.isreg() or os.path.basename(info.name).startswith("."):
            continue
        if info.offset_data + info.size > size:
            name = printable_path(info.name)
            raise DataError(f"{printable_path(path)} is truncated: it ends within {name}")
        yield info


def _member_key(info: tarfile.TarInfo) -> str:
    """Return the path of a member up to the first dot in its file name."""
    folder, name = os.path.split(info.name)
    return os.path.join(folder, name.partition(".")[0])


def _read_label(
    tar: tarfile.TarFile, member: tarfile.TarInfo, ending: str, field: str | None, path: str
) -> Label | None:
    if ending not in (*LABEL_MEMBERS, ".json") or member.size > MAX_LABEL_BYTES:
        return None
    file = tar.extractfile(member)
    assert file is not None, "it is a regular file"
    try:
        text = file.read().decode("utf-8-sig").strip()
        if ending != ".json":
            return parse_label(text) if field is None and text else None
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        name = printable_path(member.name)
        raise DataError(f"{printable_path(path)}: {name} cannot be read: {error}") from None
    if not isinstance(row, dict):
        return None
    value = next((row[key] for key in ([field] if field else LABEL_FIELDS) if key in row), None)
    return parse_label(value) if isinstance(value, str | int) else None


def column_members(
    data: Images, path: str, copy_path: Path
) -> tuple[str, list[Member], list[str] | None]:
    """Return the file to read, its images with their labels, and the names of the classes.

    Raises DataError if the file is damaged or lacks a column.
    """
    import pyarrow
    from pyarrow import parquet

    local_copy = files.local_path(path)
    with files.report_damage(path):
        if path.lower().endswith(".parquet"):
            file = parquet.ParquetFile(local_copy)
            columns, names = _choose_columns(data, path, file.schema_arrow)
            batches = file.iter_batches(BATCH_ROWS, columns=list(columns))
        else:
            memory_map = pyarrow.memory_map(local_copy)
            schema, batches = files.arrow_batches(memory_map)
            columns, names = _choose_columns(data, path, schema)
            members = _members_in_place(path, batches, columns, memory_map)
            if members is not None:
                return path, members, names
            # The file is compressed, so its images are copied, which reads its batches again.
            batches = files.arrow_batches(memory_map)[1]
        return str(copy_path), _copy_members(path, batches, columns, copy_path), names


def _choose_columns(
    data: Images, path: str, schema: Any
) -> tuple[tuple[str, ...], list[str] | None]:
    """Return the columns of image, label and, if the job sets it, group, and the class names."""
    features, image = files.arrow_features(schema), find_image_column(data.image, path, schema)
    candidates = [name for name in LABEL_COLUMNS if name in schema.names]
    label = _check_column(path, schema, "label", data.label, "ClassLabel", candidates)
    columns = [image, label]
    if data.group is not None:
        columns.append(_check_column(path, schema, "group", data.group, "", []))
    names = features.get(label, {}).get("names")
    return tuple(columns), [str(name) for name in names] if isinstance(names, list) else None


def find_image_column(requested: str | None, path: str, schema: Any) -> str:
    """Return the requested column, the image column of `datasets`, or the first one with bytes."""
    candidates = [field.name for field in schema if holds_bytes(field.type)]
    image = _check_column(path, schema, "image", requested, "Image", candidates)
    column_type = schema.field(image).type
    if not holds_bytes(column_type):
        problem = f"its column {image!r} is of {column_type}, not bytes of images"
        raise DataError(f"{printable_path(path)}: {problem}")
    return image


def _check_column(
    path: str, schema: Any, key: str, name: str | None, feature: str, candidates: list[str]
) -> str:
    """Return the column `name`, or else the one with this feature of `datasets` or a usual name."""
    features = files.arrow_features(schema)
    by_feature = [
        column for column in schema.names if features.get(column, {}).get("_type") == feature
    ]
    name = name or next(iter([*by_feature, *candidates]), None)
    if name is not None and schema.names.count(name) == 1:
        return name
    if name is None:
        problem = f"no column that is known for the {key}; set data.{key}"
    else:
        has_several = name in schema.names
        suggestion = "" if has_several else suggest_name(name, schema.names)
        problem = f"{'several columns' if has_several else 'no column'} {name!r}{suggestion}"
    raise DataError(f"{printable_path(path)} has {problem}; it has {', '.join(schema.names)}")


def holds_bytes(arrow_type: Any) -> bool:
    """Return whether a pyarrow type is bytes, or a struct with a field `bytes`."""
    from pyarrow import types

    if types.is_struct(arrow_type):
        return any(
            arrow_type.field(index).name == "bytes" for index in range(arrow_type.num_fields)
        )
    binary_checks = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(is_type(arrow_type) for is_type in binary_checks)


def _read_batch(
    path: str, first: int, batch: Any, columns: tuple[str, ...]
) -> tuple[Any, list[Label], list[int | None]]:
    """Return the validated images, the labels and the hashes of the groups of a batch.

    `first` is the number of rows before the batch. Raises DataError for a row without a value.
    """
    import pyarrow.compute

    images, label_column, *group_columns = (batch.column(name) for name in columns)
    if pyarrow.types.is_struct(images.type):
        images = pyarrow.compute.struct_field(images, "bytes")
    images.validate(full=True)
    if pyarrow.types.is_binary_view(images.type):
        images = images.cast(pyarrow.large_binary())
    if images.null_count:
        row = first + images.is_null().to_pylist().index(True) + 1
        raise DataError(f"{printable_path(path)}, row {row}: its {columns[0]!r} has no bytes")
    values = label_column.to_pylist()
    for row, value in enumerate(values, first + 1):
        if not isinstance(value, str | int) or value == "":
            problem = f"its {columns[1]!r} is {value!r}, not a label"
            raise DataError(f"{printable_path(path)}, row {row}: {problem}")
    plain_values = (int(value) if isinstance(value, bool) else value for value in values)
    groups: list[int | None] = [None] * len(values)
    if group_columns:
        groups = [
            _group_key(columns[2], value, f"{printable_path(path)}, row {row}")
            for row, value in enumerate(group_columns[0].to_pylist(), first + 1)
        ]
    return images, [parse_label(value) for value in plain_values], groups


def _members_in_place(
    path: str, batches: Iterator[Any], columns: tuple[str, ...], memory_map: Any
) -> list[Member] | None:
    """Return the members of a mapped file, or None if its buffers are decompressed copies."""
    from pyarrow import types

    buffer = memory_map.read_at(memory_map.size(), 0)
    base, end = np.frombuffer(buffer, np.uint8).ctypes.data, memory_map.size()
    members: list[Member] = []
    for batch in batches:
        images, labels, groups = _read_batch(path, len(members), batch, columns)
        if not len(images):
            continue
        start = images.buffers()[2].address - base
        if not 0 <= start <= end - images.buffers()[2].size:
            return None
        # The start of each value in the buffer, and the end of the last one.
        dtype = np.int64 if types.is_large_binary(images.type) else np.int32
        offsets = np.frombuffer(images.buffers()[1], dtype)
        bounds_N = offsets[images.offset : images.offset + len(images) + 1].astype(np.int64) + start
        members += map(Member, bounds_N.tolist(), np.diff(bounds_N).tolist(), labels, groups)
    return members


def _copy_members(
    path: str, batches: Iterator[Any], columns: tuple[str, ...], copy_path: Path
) -> list[Member]:
    members: list[Member] = []
    offset = 0
    try:
        with atomic_file.open_draft(copy_path) as draft, draft.open("wb") as file:
            for batch in batches:
                images, labels, groups = _read_batch(path, len(members), batch, columns)
                for value, label, group in zip(images, labels, groups, strict=True):
                    size = file.write(value.as_buffer())
                    members.append(Member(offset, size, label, group))
                    offset += size
    except OSError as error:
        if error.errno is None:
            # pyarrow raises this error for a damaged file.
            raise
        problem = f"cannot be copied to {copy_path.parent} ({error})"
        hint = "set XDG_CACHE_HOME to a folder with room"
        raise StorageError(f"the images of {printable_path(path)} {problem}; {hint}") from error
    return members
