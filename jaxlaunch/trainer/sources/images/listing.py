"""Which files hold the images of a split, and what kind of set they are: by names alone.

A folder has a folder for each class, or a metadata file, or the shards that Hugging Face and WebDataset write. Where
names say of which split a file is, as `train/cat/1.jpg` and `train-00000-of-00002.parquet` do, training reads the one
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
from jaxlaunch.trainer.sources.images.index import shown
from jaxlaunch.trainer.sources.images.picture import ENDINGS

Split = Literal["train", "eval"]
TRAIN = ("train", "training")
EVAL = ("validation", "valid", "val", "dev", "test", "testing", "eval")  # the first that is there is evaluated
TABLES = (".parquet", ".arrow")
LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
METADATA = tuple(f"metadata{ending}" for ending in LISTS)  # beside images, as Hugging Face's image folders have it
PACKED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz", ".zip")
_OF_SPLIT = re.compile(rf"({'|'.join((*TRAIN, *EVAL))})(?![a-z0-9])", re.IGNORECASE)


class Found(NamedTuple):
    """The files of a split: `kind` is folder, files, list, tar or table; their names are below `root`."""

    kind: str
    root: str
    names: tuple[str, ...]
    left_out: int = 0  # files of the folder that are none of these
    has_splits: bool = False  # the names say of which split each file is


def found(patterns: str | Sequence[str], split: Split, key: str = "path") -> Found:
    """What a folder, a file, or globs name. Raises DataError for what holds no images that can be read."""
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if len(listed) == 1 and is_folder(listed[0]):
        return _of_folder(listed[0].rstrip("/") or "/", split, key)
    matched = files.match_files(listed, key)
    kinds = {kind_of(path): path for path in matched}
    if len(kinds) > 1:
        first, second = list(kinds.values())[:2]
        raise DataError(f"data.{key} names files of several kinds, such as {shown(first)} and {shown(second)}")
    kind, path = next(iter(kinds.items()))
    if kind == "other":
        hint = "unpack it, or pack it as .tar" if path.lower().endswith(PACKED) else _KINDS
        raise DataError(f"data.{key}: {shown(path)} holds no images that can be read; {hint}")
    return Found(kind, "", tuple(matched))


_KINDS = "a folder, image files, .tar, .parquet, .arrow, or a .csv, .tsv or .jsonl of paths and labels can be read"


def kind_of(path: str) -> str:
    """What a file is, by its name."""
    ending = os.path.splitext(path)[1].lower()
    for kind, endings in (("files", ENDINGS), ("tar", (".tar",)), ("table", TABLES), ("list", LISTS)):
        if ending in endings:
            return kind
    return "other"


def is_folder(path: str) -> bool:
    """Whether a path or a URL names a folder."""
    if not remote.is_remote(path):
        return os.path.isdir(path)
    remote.check("train.data.path", path)
    return not re.search(r"[*?\[]", path) and kind_of(path) == "other" and bool(remote.entries(path))


def _of_folder(folder: str, split: Split, key: str) -> Found:
    names = sorted(walked(folder))
    of_kind: dict[str, list[str]] = {}
    for name in names:
        of_kind.setdefault(kind_of(name), []).append(name)
    metadata = [name for name in of_kind.get("list", []) if os.path.basename(name) in METADATA]
    kind = next((each for each in ("table", "tar") if each in of_kind and "files" not in of_kind), "")
    chosen = metadata or of_kind.get(kind or "files", [])
    if not chosen:
        raise DataError(f"data.{key} = {shown(folder)} holds no images; {_KINDS}")
    mine, has_splits = of_split(chosen, split)
    # A file of `datasets` that is a cache of another, beside the rows of save_to_disk.
    mine = [name for name in mine if not os.path.basename(name).startswith("cache-")]
    kind = "list" if metadata else kind or "folder"
    left_out = len(names) - len(chosen)
    return Found(kind, folder, tuple(mine), left_out, has_splits)


def of_split(names: list[str], split: Split) -> tuple[list[str], bool]:
    """The names of a split, and whether they say of which each is; all of them where they do not."""
    by_split = {each: [name for name in names if split_of(name) == each] for each in ("train", "eval")}
    return (_first_of(by_split[split]), True) if by_split["train"] else (names, False)


def _first_of(names: list[str]) -> list[str]:
    """Of the names of a split those under its first name: a folder with validation and test is evaluated on one."""
    words = [_word(name) for name in names]
    first = next((word for word in (*TRAIN, *EVAL) if word in words), None)
    return [name for name, word in zip(names, words, strict=True) if word == first]


def split_of(name: str) -> str | None:
    """The split that the name of a file says: by its first folder, or by how another part of it begins."""
    word = _word(name)
    return None if word is None else "train" if word in TRAIN else "eval"


def _word(name: str) -> str | None:
    parts = name.split("/")
    # Of an image only the outermost folder tells: a class, or a file, may be called anything.
    told = parts[:1] if kind_of(name) == "files" and len(parts) > 2 else parts[:0]
    for part in told if kind_of(name) == "files" else parts:
        if (word := _OF_SPLIT.match(part)) is not None:
            return word[1].lower()
    return None


def walked(folder: str) -> Iterator[str]:
    """Names of all files below a folder, relative to it; hidden ones are none, and a loop of links is walked once."""
    if remote.is_remote(folder):
        with remote.storage(f"listing {folder}"):
            yield from remote.names(folder)
        return
    yield from _below(folder, "", {_identity(folder)})


def marks(path: str) -> list[tuple[str, int, int]]:
    """What tells that a folder here is as it was: when the names of each folder in it last changed.

    Of files that hold many images or their labels, size and time too. No file of an image is asked for anything.
    """
    left, seen, known = [path], [], set()
    while left:
        folder = left.pop()
        about = os.stat(folder)
        if (about.st_dev, about.st_ino) in known:
            continue
        known.add((about.st_dev, about.st_ino))
        seen.append((folder, 0, about.st_mtime_ns))
        with os.scandir(folder) as entries:
            for each in entries:
                if each.name.startswith("."):
                    continue
                if _is(each, os.DirEntry.is_dir):
                    left.append(each.path)
                elif kind_of(each.name) in ("tar", "table", "list"):
                    of_file = each.stat()
                    seen.append((each.path, of_file.st_size, of_file.st_mtime_ns))
    return sorted(seen)


def marked(patterns: Sequence[str], key: str) -> Any:
    """The marks of all that the patterns name: a folder here by its folders, one in a bucket by every name in it."""
    if len(patterns) == 1 and is_folder(patterns[0]):
        return list(walked(patterns[0])) if remote.is_remote(patterns[0]) else marks(patterns[0])
    return [_mark(path) for path in files.match_files(patterns, key)]


def _mark(path: str) -> list[Any]:
    if kind_of(path) == "files":
        return [path]
    about = files.stat_object(path) if remote.is_remote(path) else os.stat(path)
    return [path, *about] if isinstance(about, files.ObjectStat) else [path, about.st_size, about.st_mtime_ns]


def _below(folder: str, above: str, on_the_way: set[tuple[int, int]]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        listed = sorted((each for each in entries if not each.name.startswith(".")), key=lambda each: each.name)
    for each in listed:
        if _is(each, os.DirEntry.is_file):
            yield above + each.name
        elif _is(each, os.DirEntry.is_dir) and (who := _identity(each.path)) not in on_the_way:
            yield from _below(each.path, f"{above}{each.name}/", on_the_way | {who})


def _is(entry: os.DirEntry[str], kind: Callable[[os.DirEntry[str]], bool]) -> bool:
    """Whether an entry is of a kind; a link that leads to itself is of none."""
    try:
        return kind(entry)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _identity(folder: str) -> tuple[int, int]:
    about = os.stat(folder)
    return about.st_dev, about.st_ino
