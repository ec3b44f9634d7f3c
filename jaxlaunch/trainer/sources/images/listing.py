"""Lists the image files of a split, and recognizes the kind of a set of images by names alone.

A set is a folder that contains a folder for each class, a metadata file, or shards of Hugging Face
or WebDataset. If the names contain the split, as in `train/cat/1.jpg` and
`train-00000-of-00002.parquet`, training reads one split and evaluation another.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data.files import printable_path
from jaxlaunch.trainer.data.source import Split
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images.picture import IMAGE_SUFFIXES

TRAIN_NAMES = ("train", "training")
# Names of evaluation splits; the first one that exists is used.
EVAL_NAMES = ("validation", "valid", "val", "dev", "test", "testing", "eval")
TABLE_SUFFIXES = (".parquet", ".arrow")
LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
KINDS = {"files": IMAGE_SUFFIXES, "tar": (".tar",), "table": TABLE_SUFFIXES, "list": LIST_SUFFIXES}
# An image folder of Hugging Face has one of these files next to the images.
METADATA_FILES = tuple(f"metadata{ending}" for ending in LIST_SUFFIXES)
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz", ".zip")
READABLE_HINT = (
    "a folder, image files, .tar, .parquet, .arrow, or a .csv, .tsv or .jsonl of paths "
    "and labels can be read"
)
_SPLIT_NAME = re.compile(rf"({'|'.join((*TRAIN_NAMES, *EVAL_NAMES))})(?![a-z0-9])", re.IGNORECASE)


class FileListing(NamedTuple):
    """The files of a split. `kind` is folder, files, list, tar or table."""

    kind: str
    root: str
    names: tuple[str, ...]
    # Number of files in the folder that are not of this kind.
    left_out: int = 0
    # Whether the names contain the split.
    has_splits: bool = False


def list_files(patterns: str | Sequence[str], split: Split, key: str = "path") -> FileListing:
    """List the files of a folder, a path, or globs. Raises DataError if there are no images."""
    first, *others = files.as_list(patterns)
    if not others and is_folder(first):
        return _list_folder(first.rstrip("/") or "/", split, key)
    paths = files.match_files(patterns, key)
    kinds = {file_kind(path): path for path in paths}
    if len(kinds) > 1:
        examples = " and ".join(printable_path(path) for path in list(kinds.values())[:2])
        raise DataError(f"data.{key} names files of several kinds, such as {examples}")
    kind, path = next(iter(kinds.items()))
    if kind == "other":
        is_compressed = path.lower().endswith(COMPRESSED_SUFFIXES)
        hint = "unpack it, or pack it as .tar" if is_compressed else READABLE_HINT
        problem = f"{printable_path(path)} holds no images that can be read"
        raise DataError(f"data.{key}: {problem}; {hint}")
    return FileListing(kind, "", tuple(paths))


def _list_folder(folder: str, split: Split, key: str) -> FileListing:
    names = sorted(walk_files(folder))
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(file_kind(name), []).append(name)
    lists = by_kind.get("list", [])
    metadata = [name for name in lists if os.path.basename(name) in METADATA_FILES]
    kinds = [kind for kind in ("files", "table", "tar") if kind in by_kind]
    kind = "list" if metadata else next(iter(kinds), "files")
    candidates = metadata or by_kind.get(kind, [])
    if not candidates:
        raise DataError(f"data.{key} = {printable_path(folder)} holds no images; {READABLE_HINT}")
    selected, has_splits = select_split(candidates, split)
    # save_to_disk of `datasets` leaves cache files next to the rows.
    selected = [name for name in selected if not os.path.basename(name).startswith("cache-")]
    kind = "folder" if kind == "files" else kind
    return FileListing(kind, folder, tuple(selected), len(names) - len(candidates), has_splits)


def file_kind(path: str) -> str:
    """Return the kind of a file by its name."""
    ending = os.path.splitext(path)[1].lower()
    return next((kind for kind, endings in KINDS.items() if ending in endings), "other")


def is_folder(path: str) -> bool:
    """Return whether a path or a URL is a folder."""
    if not remote.is_remote(path):
        return os.path.isdir(path)
    remote.check_url("train.data.path", path)
    is_file_or_glob = files.WILDCARD.search(path) or file_kind(path) != "other"
    return not is_file_or_glob and bool(remote.list_entries(path))


def select_split(names: list[str], split: Split) -> tuple[list[str], bool]:
    """Return the names of `split`, and whether names contain splits; if not, all names.

    Only one word for a split is used: of a folder with validation and test, only validation is
    evaluated.
    """
    words = [_split_word(name) for name in names]
    if not any(word in TRAIN_NAMES for word in words):
        return names, False
    split_names = TRAIN_NAMES if split == "train" else EVAL_NAMES
    split_name = next((word for word in split_names if word in words), "")
    return [name for name, word in zip(names, words, strict=True) if word == split_name], True


def _split_word(name: str) -> str | None:
    """Return the word for the split in a name, or None.

    For an image this is its outermost folder; for another file, the beginning of any part of its
    path.
    """
    parts = name.split("/")
    if file_kind(name) == "files":
        # The other parts of the path may be any names of classes and files.
        parts = parts[:1] if len(parts) > 2 else []
    matches = map(_SPLIT_NAME.match, parts)
    return next((match[1].lower() for match in matches if match is not None), None)


def walk_files(folder: str) -> Iterator[str]:
    """Yield the relative names of all visible files below a folder, without cycles of links."""
    if remote.is_remote(folder):
        with remote.convert_errors(f"listing {folder}"):
            yield from remote.list_names(folder)
        return
    yield from _walk_folder(folder, "", frozenset())


def _walk_folder(folder: str, prefix: str, ancestors: frozenset[tuple[int, int]]) -> Iterator[str]:
    stat = os.stat(folder)
    identity = stat.st_dev, stat.st_ino
    if identity in ancestors:
        return
    for entry in _visible_entries(folder):
        if _is_kind(entry, os.DirEntry.is_file):
            yield prefix + entry.name
        elif _is_kind(entry, os.DirEntry.is_dir):
            yield from _walk_folder(entry.path, f"{prefix}{entry.name}/", ancestors | {identity})


def _visible_entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(visible, key=lambda entry: entry.name)


def fingerprint_files(patterns: Sequence[str], key: str) -> Any:
    """Return marks that change when the files of the patterns change.

    For a local folder these are the modification times of all folders, and the sizes and times of
    files that contain many images or labels; files of single images are not examined. For a folder
    in a bucket they are all names.
    """
    first, *others = patterns
    if not others and is_folder(first):
        return list(walk_files(first)) if remote.is_remote(first) else _fingerprint_folder(first)
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


def _fingerprint_folder(path: str) -> list[tuple[str, int, int]]:
    remaining, marks, visited = [path], [], set()
    while remaining:
        folder = remaining.pop()
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in visited:
            continue
        visited.add((stat.st_dev, stat.st_ino))
        marks.append((folder, 0, stat.st_mtime_ns))
        for entry in _visible_entries(folder):
            if _is_kind(entry, os.DirEntry.is_dir):
                remaining.append(entry.path)
            elif file_kind(entry.name) in ("tar", "table", "list"):
                stat = entry.stat()
                marks.append((entry.path, stat.st_size, stat.st_mtime_ns))
    return sorted(marks)


def _is_kind(entry: os.DirEntry[str], is_kind: Callable[[os.DirEntry[str]], bool]) -> bool:
    """Return `is_kind` of an entry, or False for a cycle of links."""
    try:
        return is_kind(entry)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
