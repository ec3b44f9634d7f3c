"""Images in a column of Parquet and Arrow, as Hugging Face's datasets has them: bytes, or a struct with bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from jaxlaunch import atomic_file
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError, StorageError
from jaxlaunch.trainer.sources.images import labels
from jaxlaunch.trainer.sources.images.index import Member, shown
from jaxlaunch.trainer.sources.images.labels import Label
from jaxlaunch.trainer.spec import Images

ROWS = 256  # of a Parquet file that are in memory at once
LABEL = ("label", "labels", "fine_label", "class", "category", "target")


Found = tuple[str, list[Member], list[str] | None]  # the file to read, its members, the names of the classes


def members(data: Images, path: str, copy: Path) -> Found:
    """Where the images of a file are, and their labels. Raises DataError where it is damaged or lacks a column."""
    here = files.local_path(path)
    try:
        if path.lower().endswith(".parquet"):
            file = parquet.ParquetFile(here)
            columns, names = _chosen(data, path, file.schema_arrow)
            return *_copied(path, file.iter_batches(ROWS, columns=list(columns)), columns, copy), names
        mapped = pyarrow.memory_map(here)
        schema, batches = files.arrow_batches(mapped)
        columns, names = _chosen(data, path, schema)
        found = _in_place(path, batches, columns, mapped)
        if found is None:  # it is compressed
            return *_copied(path, files.arrow_batches(mapped)[1], columns, copy), names
        return path, found, names
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the file system's
            raise
        raise DataError(f"{shown(path)} is truncated or damaged: {error}") from None


def _chosen(data: Images, path: str, schema: Any) -> tuple[tuple[str, str], list[str] | None]:
    """The columns of image and label, and the names of the classes where `datasets` noted them."""
    features, image = files.arrow_features(schema), image_of(data.image, path, schema)
    label = data.label or next(
        (name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"),
        next((name for name in LABEL if name in schema.names), None),
    )
    label = _only(path, schema, "label", label)
    names = features.get(label, {}).get("names")
    return (image, label), [str(name) for name in names] if isinstance(names, list) else None


def image_of(asked: str | None, path: str, schema: Any) -> str:
    """The column of the images: as asked, as `datasets` noted it, else the first that holds bytes. Raises DataError."""
    features = files.arrow_features(schema)
    image = asked or next(
        (name for name in schema.names if features.get(name, {}).get("_type") == "Image"),
        next((name for at, name in enumerate(schema.names) if holds_bytes(schema.field(at).type)), None),
    )
    image = _only(path, schema, "image", image)
    if not holds_bytes(schema.field(image).type):
        raise DataError(f"{shown(path)}: its column {image!r} is of {schema.field(image).type}, not bytes of images")
    return image


def _only(path: str, schema: Any, key: str, name: str | None) -> str:
    """A column's name, where there is one column of it. Raises DataError."""
    if name is not None and schema.names.count(name) == 1:
        return name
    what = f"no column {name!r}" if name else f"no column that is known for the {key}; set data.{key}"
    what = f"several columns {name!r}" if name and schema.names.count(name) > 1 else what
    raise DataError(f"{shown(path)} has {what}; it has {', '.join(schema.names)}")


def holds_bytes(kind: Any) -> bool:
    """Whether a column holds bytes, or structs with bytes."""
    types = pyarrow.types
    if types.is_struct(kind):
        return any(kind.field(at).name == "bytes" for at in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _values(path: str, first: int, batch: Any, columns: tuple[str, str]) -> tuple[Any, list[Label]]:
    """The images of a batch as an array of bytes, checked, and the labels. Raises DataError for a row without one."""
    image, label = (batch.column(name) for name in columns)
    if pyarrow.types.is_struct(image.type):
        image = image.flatten()[[image.type.field(at).name for at in range(image.type.num_fields)].index("bytes")]
    image.validate(full=True)
    if pyarrow.types.is_binary_view(image.type):
        image = image.cast(pyarrow.large_binary())
    if image.null_count:
        row = first + image.is_null().to_pylist().index(True) + 1
        raise DataError(f"{shown(path)}, row {row}: its {columns[0]!r} has no bytes")
    found = label.to_pylist()
    for row, value in enumerate(found, first + 1):
        if not isinstance(value, str | int) or isinstance(value, str) and not value:
            raise DataError(f"{shown(path)}, row {row}: its {columns[1]!r} is not a label, but {value!r}")
    return image, [labels.whole(int(each) if isinstance(each, bool) else each) for each in found]


def _bounds(image: Any) -> Any:
    """Where each value begins in the bytes of its array, and where the last ends."""
    wide = np.int64 if pyarrow.types.is_large_binary(image.type) else np.int32
    return np.frombuffer(image.buffers()[1], wide)[image.offset : image.offset + len(image) + 1].astype(np.int64)


def _in_place(path: str, batches: Iterator[Any], columns: tuple[str, str], mapped: Any) -> list[Member] | None:
    """The members of a mapped file, in the file; None where its buffers are not those of the file."""
    whole = mapped.read_at(mapped.size(), 0)
    base, end = np.frombuffer(whole, np.uint8).ctypes.data, mapped.size()
    found: list[Member] = []
    for batch in batches:
        image, of_rows = _values(path, len(found), batch, columns)
        if not len(image):
            continue
        start = image.buffers()[2].address - base
        if not 0 <= start <= end - image.buffers()[2].size:
            return None
        bounds = (_bounds(image) + start).tolist()
        found += map(Member, bounds, np.diff(bounds).tolist(), of_rows)
    return found


def _copied(path: str, batches: Iterator[Any], columns: tuple[str, str], copy: Path) -> tuple[str, list[Member]]:
    """The images one after the other in `copy`, and the members of that."""
    found: list[Member] = []
    at = 0
    try:
        with atomic_file.draft(copy) as draft, draft.open("wb") as file:
            for batch in batches:
                image, of_rows = _values(path, len(found), batch, columns)
                for value, label in zip(image, of_rows, strict=True):
                    size = file.write(value.as_buffer())
                    found.append(Member(at, size, label))
                    at += size
    except OSError as error:
        if error.errno is None:  # of pyarrow, which is damage
            raise
        raise StorageError(
            f"the images of {shown(path)} cannot be copied to {copy.parent} ({error}); set XDG_CACHE_HOME to a folder "
            "with room"
        ) from error
    return str(copy), found
