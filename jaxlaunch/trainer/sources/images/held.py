"""The index of images that other files hold: members of WebDataset tars, values of a column of Parquet and Arrow.

Members of a tar, and the values of Arrow that is not compressed, are read where they lie. Those of Parquet are copied
once into the cache, one after the other: it can only be read by row groups, a hundred images at a time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import index, labels
from jaxlaunch.trainer.sources.images.index import Index, Member, joined, shown
from jaxlaunch.trainer.sources.images.labels import Label
from jaxlaunch.trainer.sources.images.listing import Found
from jaxlaunch.trainer.sources.images.picture import ENDINGS
from jaxlaunch.trainer.spec import Images

OF_CLASS = (".cls", ".cls.txt", ".label", ".txt")  # members of a WebDataset that are a label
IN_JSON = ("label", "cls", "class", "category")
MOST_LABEL = 1 << 20  # bytes of a member that is read as a label


def built(data: Images, found: Found, classes: Any, folder: Path) -> Index:
    """The index of all members of the files. Raises DataError naming the file and the member or row."""
    paths = [joined(found.root, name) for name in found.names]
    of_files: list[str] = []
    members: list[list[Member]] = []
    names: list[str] | None = None
    for number, path in enumerate(paths):
        if found.kind == "tar":
            place, each = path, list(_of_tar(path, data.label))
        else:
            from jaxlaunch.trainer.sources.images import columns

            place, each, named = columns.members(data, path, folder / f"{number}.images")
            names = named if names is None else names
            if named != names:
                raise DataError(f"{shown(path)} names other classes than {shown(paths[0])}")
        if not each:
            raise DataError(f"{shown(path)} holds no image")
        of_files.append(place)
        members.append(each)
    raw = [member.label for each in members for member in each]
    where = shown(paths[0])
    if None in raw:
        at = next(number for number, each in enumerate(members) if any(member.label is None for member in each))
        row = next(row for row, member in enumerate(members[at], 1) if member.label is None)
        raise DataError(f"{shown(paths[at])}, image {row} has no label; {_HINT[found.kind]}")
    given = [each for each in raw if each is not None]
    if names is not None and all(isinstance(each, int) for each in given):
        given = [names[int(each)] if 0 <= int(each) < len(names) else each for each in given]
        classes = classes or names
    elif not all(isinstance(each, int) for each in given):
        given = [str(each) for each in given]
    label_N, said = labels.numbered(given, classes, where)
    made = index.of_files("", of_files, label_N, said)
    flat = [member for each in members for member in each]
    return Index(
        "",
        made.names,
        made.end_F,
        label_N,
        said,
        np.repeat(np.arange(len(members), dtype=np.int32), [len(each) for each in members]),
        np.array([member.start for member in flat], np.int64),
        np.array([member.size for member in flat], np.int64),
        printed=tuple(paths),
        identity=files.sample_digest(paths),
    )


_HINT = {
    "tar": "a member of the same name with .cls or .json has it, or the folder that the image is in",
    "table": "set data.label to the column that has it",
}


class Bytes(io.RawIOBase):
    """A file here or in a bucket, read in place."""

    def __init__(self, path: str) -> None:
        self._path, self._at, self._size = path, 0, files.file_size(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = files.read_bytes(self._path, self._at, len(buffer))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@contextlib.contextmanager
def opened_tar(path: str) -> Iterator[tarfile.TarFile]:
    """A tar to read. What fails while it is read raises DataError, or StorageError where the storage does."""
    try:
        with tarfile.open(fileobj=io.BufferedReader(Bytes(path), 1 << 16), mode="r:") as tar:
            yield tar
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise faults.unreadable(f"{shown(path)} cannot be read", error) from error
        raise DataError(f"{shown(path)} is not a tar, or is truncated or damaged: {error}") from None


def _of_tar(path: str, field: str | None) -> Iterator[Member]:
    """The images of a tar. What belongs together has one name up to its first dot."""
    size = files.file_size(path)
    with opened_tar(path) as tar:
        key, image, label = "", None, None
        for each in tar:
            if not each.isreg() or os.path.basename(each.name).startswith("."):
                continue
            if each.offset_data + each.size > size:
                raise DataError(f"{shown(path)} is truncated: it ends within {shown(each.name)}")
            stem, _, ending = os.path.basename(each.name).partition(".")
            folder = os.path.dirname(each.name)
            if f"{folder}/{stem}" != key:
                if image is not None:
                    yield image._replace(label=label if label is not None else image.label)
                key, image, label = f"{folder}/{stem}", None, None
            if f".{ending}".lower().endswith(ENDINGS):
                if image is not None:
                    raise DataError(f"{shown(path)}: {shown(key)} has two images; give each a name of its own")
                image = Member(each.offset_data, each.size, os.path.basename(folder) or None)
            elif (found := _label(tar, each, f".{ending}".lower(), field, path)) is not None:
                label = found
        if image is not None:
            yield image._replace(label=label if label is not None else image.label)


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, ending: str, field: str | None, path: str) -> Label | None:
    if ending not in (*OF_CLASS, ".json") or member.size > MOST_LABEL:
        return None
    file = tar.extractfile(member)
    assert file is not None, "it is a regular file"
    try:
        text = file.read().decode("utf-8-sig").strip()
        if ending != ".json":
            return labels.whole(text) if field is None and text else None
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown(path)}: {shown(member.name)} cannot be read: {error}") from None
    if not isinstance(row, dict):
        return None
    value = next((row[key] for key in ([field] if field else IN_JSON) if key in row), None)
    return labels.whole(value) if isinstance(value, str | int) else None
