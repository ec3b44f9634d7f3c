"""Finds, reads and hashes the files of a source, which may be objects in a bucket.

A file is a local path or a URL of an object store. The cache on the local disk, which the processes
of a host share, has copies of blocks of objects, and of whole objects if they are array_record
files. The name of a copy is a hash of the object's URL, size and version, so that a changed object
is never mixed with an old copy. The cache grows until only a tenth of the disk is free; blocks that
do not fit are fetched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlaunch import atomic_file, user_cache
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import DataError, StorageError, TrainerError

# The standard library of the interpreter, a text corpus that exists on every machine.
STDLIB_SCHEME = "stdlib://"
# These folders are installed next to the standard library and are not part of it.
SITE_FOLDERS = ("site-packages", "dist-packages")
WILDCARD = re.compile(r"[*?\[]")

# Number of samples in a digest, for any amount of data.
DIGEST_SAMPLES = 64
SAMPLE_BYTES = 4096

# A request to an object store takes as long as the transfer of a few blocks.
BLOCK_BYTES = 1 << 20
CHUNK_BYTES = 16 * BLOCK_BYTES
# Share of the disk that the copies leave free.
MIN_FREE_SHARE = 0.1
# Exceptions of the standard library and NumPy for damaged files.
DAMAGE_ERRORS = (OSError, EOFError, ValueError, KeyError, tarfile.TarError, zipfile.BadZipFile)


def match_files(patterns: str | Sequence[str], key: str = "path") -> list[str]:
    """Return all files that match, each once, sorted. Raises DataError, SpecError, StorageError."""
    paths: set[str] = set()
    for pattern in as_list(patterns):
        if pattern.startswith(STDLIB_SCHEME):
            root = sysconfig.get_path("stdlib")
            site_folders = tuple(os.path.join(root, folder, "") for folder in SITE_FOLDERS)
            matches = _glob_files(f"{glob.escape(root)}/{pattern.removeprefix(STDLIB_SCHEME)}")
            matches = [path for path in matches if not path.startswith(site_folders)]
        elif remote.is_remote(pattern):
            if WILDCARD.search(pattern.partition("://")[2].split("/")[0]):
                hint = "the name of a bucket is written in full"
                raise DataError(f"data.path {pattern!r} matches no file; {hint}")
            remote.check_url("train.data.path", pattern)
            matches = remote.match_urls(pattern)
        else:
            matches = _glob_files(pattern)
        if not matches:
            raise DataError(f"data.{key} {pattern!r} matches no file; {_describe_folder(pattern)}")
        paths.update(matches)
    return sorted(paths)


def as_list(patterns: str | Sequence[str]) -> list[str]:
    """Return the patterns as a list; a single pattern may be given as a string."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def expand_stdlib(pattern: str) -> str:
    """Replace stdlib:// by the folder of the standard library."""
    return pattern.replace(STDLIB_SCHEME, f"{sysconfig.get_path('stdlib')}/", 1)


def _glob_files(pattern: str) -> list[str]:
    if os.path.isfile(pattern):
        # The name of an existing file may contain brackets.
        return [pattern]
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def _describe_folder(pattern: str) -> str:
    if remote.is_remote(pattern) and not pattern.startswith(STDLIB_SCHEME):
        scheme, _, location = pattern.partition("://")
        bucket, *folders = WILDCARD.split(location)[0].split("/")
        folder = f"{scheme}://{'/'.join([bucket, *folders[:-1]])}"
        entries = remote.list_entries(folder)
    else:
        folder = os.path.abspath(expand_stdlib(pattern))
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        entries = sorted(os.listdir(folder))
    more = ", …" if len(entries) > 5 else ""
    return f"{folder} holds {', '.join(entries[:5]) + more or 'nothing'}"


def file_size(path: str) -> int:
    """Return the size of a file, cached for objects. Raises DataError if it does not exist."""
    try:
        return stat_object(path).size if remote.is_remote(path) else os.path.getsize(path)
    except FileNotFoundError:
        raise DataError(f"{path} existed when the run began, and no longer exists") from None


def mark_file(path: str) -> tuple[Any, ...]:
    """Return a key for caches in memory: the path, and marks that change when the file does."""
    if remote.is_remote(path):
        return path, *stat_object(path)
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DataError(f"{printable_path(path)} cannot be read: {error.strerror}") from None
    return path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def read_bytes(path: str, offset: int, count: int) -> bytes:
    """Read up to `count` bytes of a file from `offset`. Raises StorageError, OSError."""
    if remote.is_remote(path):
        return read_object(path, offset, count)
    # The file is opened for every read, so that no file descriptors stay open. A memory map of a
    # file that is truncated later would end the process with SIGBUS.
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(count) or b""


def local_path(path: str) -> str:
    """Return a local path of the file; objects are copied first. Raises StorageError."""
    return copy_object(path) if remote.is_remote(path) else path


def sample_digest(paths: Sequence[str]) -> str:
    """Hash names, sizes and a bounded sample of the content to 12 hexadecimal digits.

    The common folder is not part of the digest, because the same data may be mounted elsewhere on
    the next machine, or be in a bucket.

    trainer/text/recipe hashes every byte of the files that `prepare` and preferences read. The
    files here are read in place and may have terabytes, so every process would read all of them at
    every start. Do not change the digest: checkpoints contain it, so runs in progress could not
    resume.
    """
    digest = hashlib.sha256()
    for path, name in zip(paths, relative_names(paths), strict=True):
        digest.update(f"{name} {file_size(path)}\n".encode(errors="backslashreplace"))
    for path in paths[:: -(-len(paths) // DIGEST_SAMPLES)]:
        size = file_size(path)
        interval = max(SAMPLE_BYTES, -(-size * len(paths) // DIGEST_SAMPLES))
        for offset in range(0, size, interval):
            digest.update(read_bytes(path, offset, SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def relative_names(paths: Sequence[str]) -> list[str]:
    """Return the paths relative to their common folder.

    If files are mixed with objects of buckets, the names of files are relative to /, and those of
    objects are their URLs.
    """
    schemes = {path.partition("://")[0] if remote.is_remote(path) else "" for path in paths}
    if len(schemes) > 1:
        return [path if remote.is_remote(path) else os.path.relpath(path, os.sep) for path in paths]
    root = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    return [os.path.relpath(path, root) for path in paths]


@contextlib.contextmanager
def report_damage(path: str, problem: str = "is truncated or damaged") -> Iterator[None]:
    """Convert errors of a damaged file to DataError. Errors of the file system are unchanged."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        # pyarrow raises OSError without an errno, ValueError and its own exceptions.
        pyarrow = sys.modules.get("pyarrow")
        damage_types = (*DAMAGE_ERRORS, *([] if pyarrow is None else [pyarrow.ArrowException]))
        is_system_error = isinstance(error, OSError) and error.errno is not None
        if is_system_error or not isinstance(error, damage_types):
            raise
        raise DataError(f"{printable_path(path)} {problem}: {error}") from None


def printable_path(path: str) -> str:
    """Escape a path for printing on one line, because names need not be UTF-8."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in path
    )


# --- Arrow ----------------------------------------------------------------------------------------


def arrow_batches(memory_map: Any) -> tuple[Any, Iterator[Any]]:
    """Return the schema and batches of a file in Arrow's file or `datasets`' streaming format.

    `memory_map` is a memory map of pyarrow, so that skipped batches are not read. Raises the errors
    of pyarrow, OSError and ValueError.
    """
    import pyarrow.ipc

    memory_map.seek(0)
    is_file_format = memory_map.read(6) == b"ARROW1"
    memory_map.seek(0)
    if is_file_format:
        table = pyarrow.ipc.open_file(memory_map)
        return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))
    stream = pyarrow.ipc.open_stream(memory_map)
    return stream.schema, iter(stream)


def arrow_features(schema: Any) -> dict[str, Any]:
    """Return the features that `datasets` stores in a schema, by column."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


# --- objects of a store ---------------------------------------------------------------------------


class ObjectStat(NamedTuple):
    """Size of an object in bytes, and a version that changes with its content."""

    size: int
    version: str


@functools.cache
def stat_object(url: str) -> ObjectStat:
    """Return size and version of an object, cached. Raises FileNotFoundError, StorageError."""
    with remote.convert_errors(f"reading {url}"):
        info = remote.open_filesystem(url).info(url)
    keys = ("generation", "ETag", "etag", "mtime", "LastModified", "updated")
    return ObjectStat(int(info["size"]), " ".join(str(info[key]) for key in keys if key in info))


def cache_folder() -> Path:
    """Return the folder of the cached objects."""
    return user_cache.cache_folder("objects")


def read_object(url: str, offset: int, count: int) -> bytes:
    """Read up to `count` bytes of an object from `offset`. Raises StorageError."""
    end = min(offset + count, stat_object(url).size)
    starts = range(offset - offset % BLOCK_BYTES, end, BLOCK_BYTES) if end > offset else ()
    return b"".join(
        _read_within_block(url, start, max(offset, start), min(end, start + BLOCK_BYTES))
        for start in starts
    )


def _read_within_block(url: str, start: int, low: int, high: int) -> bytes:
    """Return bytes `low` to `high` of an object, which are in the block that begins at `start`.

    Only these bytes of the block's copy are read, because an example is far smaller than a block.
    """
    size = min(BLOCK_BYTES, stat_object(url).size - start)
    # If the copy cannot be read, the object itself is.
    path = _copy_folder(url) / f"{start // BLOCK_BYTES}"
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size == size:
            return os.pread(file.fileno(), high - low, low - start)
    return _read_block(url, start)[low - start : high - start]


# If the disk has no room for copies, most reads are from one of these blocks in memory.
@functools.lru_cache(maxsize=64)
def _read_block(url: str, start: int) -> bytes:
    data = _fetch_range(url, start, min(start + BLOCK_BYTES, stat_object(url).size))
    if _has_room(len(data)):
        _write_copy(_copy_folder(url) / f"{start // BLOCK_BYTES}", [data])
    return data


def copy_object(url: str) -> str:
    """Copy an object to the local disk and return the path. Raises StorageError."""
    copy_path, size = _copy_folder(url) / "whole", stat_object(url).size
    hint = "set XDG_CACHE_HOME to a writable folder"
    fault = f"{url} cannot be copied to {cache_folder()}; {hint}"
    try:
        copy_path.parent.mkdir(parents=True, exist_ok=True)
        lock = (copy_path.parent / "lock").open("a")
    except OSError as error:
        raise StorageError(f"{fault} ({error})") from error
    with lock:
        # One process of the host copies while the others wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (copy_path.is_file() and copy_path.stat().st_size == size):
            if not _has_room(size):
                hint = "set XDG_CACHE_HOME to a larger disk"
                raise StorageError(
                    f"{cache_folder()} has no room for the {size} bytes of {url}; {hint}"
                )
            starts = range(0, size, CHUNK_BYTES)
            ends = (min(start + CHUNK_BYTES, size) for start in starts)
            chunks = (
                _fetch_range(url, start, end) for start, end in zip(starts, ends, strict=True)
            )
            if not _write_copy(copy_path, chunks):
                raise StorageError(fault)
    return str(copy_path)


def _fetch_range(url: str, start: int, end: int) -> bytes:
    try:
        with remote.convert_errors(f"reading {url}"):
            data = remote.read_range(url, start, end)
    except FileNotFoundError:
        raise DataError(f"{url} existed when the run began, and no longer exists") from None
    if len(data) != end - start:
        raise DataError(
            f"{url} has changed since the run began, when it had {stat_object(url).size} bytes: "
            f"reading bytes {start} to {end} returned {len(data)}"
        )
    return data


def _copy_folder(url: str) -> Path:
    return cache_folder() / hashlib.sha256(f"{url} {stat_object(url)}".encode()).hexdigest()[:24]


def _has_room(size: int) -> bool:
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(cache_folder())
    except OSError:
        return False
    return disk.free - size > MIN_FREE_SHARE * disk.total


def _write_copy(path: Path, parts: Iterable[bytes]) -> bool:
    """Write a copy atomically. Return False if it cannot be written, for example to a full disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The copy is not synced, because training waits for each block. A copy with a wrong size is
        # replaced later.
        with atomic_file.open_draft(path, is_synced=False) as draft, draft.open("wb") as file:
            file.writelines(parts)
    except OSError:
        return False
    return True
