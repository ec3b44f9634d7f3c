"""Which files hold the images of a split, and what kind of set they are: by names alone.

A folder has a folder for each class, or a metadata file, or the shards that Hugging Face and WebDataset write. Where
names tell of which split a file is, as `train/cat/1.jpg` and `train-00000-of-00002.parquet` do, training reads the one
and evaluation the other.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images.index import printable
from jaxlaunch.trainer.sources.images.picture import ENDINGS

Split = Literal["train", "eval"]
TRAIN = ("train", "training")
# The first of these names that exists is evaluated.
EVAL = ("validation", "valid", "val", "dev", "test", "testing", "eval")
TABLES = (".parquet", ".arrow")
LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
KINDS = {"files": ENDINGS, "tar": (".tar",), "table": TABLES, "list": LISTS}
# Hugging Face's image folders have these files next to the images.
METADATA = tuple(f"metadata{ending}" for ending in LISTS)
PACKED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz", ".zip")
READABLE = "a folder, image files, .tar, .parquet, .arrow, or a .csv, .tsv or .jsonl of paths and labels can be read"
_SPLIT_NAME = re.compile(rf"({'|'.join((*TRAIN, *EVAL))})(?![a-z0-9])", re.IGNORECASE)


class Found(NamedTuple):
    """The files of a split: `kind` is folder, files, list, tar or table; their names are below `root`."""

    kind: str
    root: str
    names: tuple[str, ...]
    # Number of files in the folder that are not of this kind.
    left_out: int = 0
    # Whether the names tell the split of each file.
    has_splits: bool = False


def list_files(patterns: str | Sequence[str], split: Split, key: str = "path") -> Found:
    """Return what a folder, a file, or globs name. Raises DataError for what holds no images that can be read."""
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if len(listed) == 1 and is_folder(listed[0]):
        return _list_folder(listed[0].rstrip("/") or "/", split, key)
    matched = files.match_files(listed, key)
    kinds = {file_kind(path): path for path in matched}
    if len(kinds) > 1:
        first, second = list(kinds.values())[:2]
        raise DataError(f"data.{key} names files of several kinds, such as {printable(first)} and {printable(second)}")
    kind, path = next(iter(kinds.items()))
    if kind == "other":
        hint = "unpack it, or pack it as .tar" if path.lower().endswith(PACKED) else READABLE
        raise DataError(f"data.{key}: {printable(path)} holds no images that can be read; {hint}")
    return Found(kind, "", tuple(matched))


def _list_folder(folder: str, split: Split, key: str) -> Found:
    names = sorted(walk_files(folder))
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(file_kind(name), []).append(name)
    metadata = [name for name in by_kind.get("list", []) if os.path.basename(name) in METADATA]
    kind = next((kind for kind in ("table", "tar") if kind in by_kind and "files" not in by_kind), "")
    chosen = metadata or by_kind.get(kind or "files", [])
    if not chosen:
        raise DataError(f"data.{key} = {printable(folder)} holds no images; {READABLE}")
    selected, has_splits = select_split(chosen, split)
    # A file of `datasets` that is a cache of another, next to the rows of save_to_disk.
    selected = [name for name in selected if not os.path.basename(name).startswith("cache-")]
    kind = "list" if metadata else kind or "folder"
    return Found(kind, folder, tuple(selected), len(names) - len(chosen), has_splits)


def file_kind(path: str) -> str:
    """Return what a file is, by its name."""
    ending = os.path.splitext(path)[1].lower()
    return next((kind for kind, endings in KINDS.items() if ending in endings), "other")


def is_folder(path: str) -> bool:
    """Tell whether a path or a URL names a folder."""
    if not remote.is_remote(path):
        return os.path.isdir(path)
    remote.check("train.data.path", path)
    return not re.search(r"[*?\[]", path) and file_kind(path) == "other" and bool(remote.entries(path))


def select_split(names: list[str], split: Split) -> tuple[list[str], bool]:
    """Return the names of a split, and whether they tell of which each is; all of them where they do not.

    Of several names of a split the first is chosen: a folder with validation and test is evaluated on one.
    """
    words = [_split_word(name) for name in names]
    if not any(word in TRAIN for word in words):
        return names, False
    first = next((word for word in (TRAIN if split == "train" else EVAL) if word in words), None)
    return [name for name, word in zip(names, words, strict=True) if word is not None and word == first], True


def _split_word(name: str) -> str | None:
    """Return the word by which the name of a file tells its split: its first folder, or the start of another part."""
    parts = name.split("/")
    if file_kind(name) == "files":
        # Of an image only the outermost folder tells: a class, or a file, may be called anything.
        parts = parts[:1] if len(parts) > 2 else []
    return next((word[1].lower() for part in parts if (word := _SPLIT_NAME.match(part)) is not None), None)


def walk_files(folder: str) -> Iterator[str]:
    """Yield the names of all files below a folder, relative to it, but hidden ones; a loop of links is walked once."""
    if remote.is_remote(folder):
        with remote.storage(f"listing {folder}"):
            yield from remote.names(folder)
        return
    yield from _walk(folder, "", {_identity(folder)})


def _walk(folder: str, prefix: str, ancestors: set[tuple[int, int]]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in visible:
        if _is_kind(entry, os.DirEntry.is_file):
            yield prefix + entry.name
        elif _is_kind(entry, os.DirEntry.is_dir) and (identity := _identity(entry.path)) not in ancestors:
            yield from _walk(entry.path, f"{prefix}{entry.name}/", ancestors | {identity})


def mark_files(patterns: Sequence[str], key: str) -> Any:
    """Return what tells that all that the patterns name is as it was.

    Of a folder here these are the times at which the names in each folder last changed, and of files that hold many
    images or their labels size and time too; no file of an image is asked for anything. Of one in a bucket every name.
    """
    if len(patterns) == 1 and is_folder(patterns[0]):
        return list(walk_files(patterns[0])) if remote.is_remote(patterns[0]) else _mark_folder(patterns[0])
    marks: list[list[Any]] = []
    for path in files.match_files(patterns, key):
        if file_kind(path) == "files":
            marks.append([path])
        elif remote.is_remote(path):
            marks.append([path, *files.stat_object(path)])
        else:
            stat = os.stat(path)
            marks.append([path, stat.st_size, stat.st_mtime_ns])
    return marks


def _mark_folder(path: str) -> list[tuple[str, int, int]]:
    remaining, marks, seen = [path], [], set()
    while remaining:
        folder = remaining.pop()
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in seen:
            continue
        seen.add((stat.st_dev, stat.st_ino))
        marks.append((folder, 0, stat.st_mtime_ns))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if _is_kind(entry, os.DirEntry.is_dir):
                    remaining.append(entry.path)
                elif file_kind(entry.name) in ("tar", "table", "list"):
                    stat = entry.stat()
                    marks.append((entry.path, stat.st_size, stat.st_mtime_ns))
    return sorted(marks)


def _is_kind(entry: os.DirEntry[str], is_kind: Callable[[os.DirEntry[str]], bool]) -> bool:
    """Tell whether an entry is of a kind; a link that leads to itself is of none."""
    try:
        return is_kind(entry)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _identity(folder: str) -> tuple[int, int]:
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino
