"""What was read of objects in a bucket, kept on this machine's disk: blocks of text, whole files of array_record.

Blocks are read as ranges, and one that is asked for twice is read once. An object that is changed is another object:
its size, its generation or digest and its time are part of the name that a copy is kept under. The processes of a host
share the folder. It may grow until a tenth of the disk is left; what does not fit is read anew each time.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from jaxlaunch import atomic_file, user_cache
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import DataError, StorageError

BLOCK = 1 << 20  # bytes of a ranged read: a request takes as long as a few of them
FREE = 0.1  # share of the disk that is left


class Stat(NamedTuple):
    """Size of an object in bytes, and what differs when its content does."""

    size: int
    version: str


def folder() -> Path:
    """Where the copies are."""
    return user_cache.home("objects")


@functools.cache
def stat(url: str) -> Stat:
    """Size and version of an object, asked once by a process. Raises FileNotFoundError, StorageError."""
    with remote.storage(f"reading {url}"):
        found = remote.filesystem(url).info(url)
    marks = [
        str(found[key]) for key in ("generation", "ETag", "etag", "mtime", "LastModified", "updated") if key in found
    ]
    return Stat(int(found["size"]), " ".join(marks))


def read(url: str, offset: int, count: int) -> bytes:
    """Bytes of an object from `offset`, as many as there are up to `count`. Raises StorageError."""
    end = min(offset + count, stat(url).size)
    starts = range(offset - offset % BLOCK, end, BLOCK) if end > offset else ()
    return b"".join(_part(url, start, max(offset, start), min(end, start + BLOCK)) for start in starts)


def _part(url: str, start: int, low: int, high: int) -> bytes:
    """Bytes `low` to `high` of the block that begins at `start`: windows are far smaller than a block."""
    try:
        with (_place(url) / f"{start // BLOCK}").open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size == min(start + BLOCK, stat(url).size) - start:
                return os.pread(file.fileno(), high - low, low - start)
    except OSError:
        """Not kept, or the cache cannot be read: the object can."""
    return _block(url, start)[low - start : high - start]


@functools.lru_cache(maxsize=64)  # where the disk keeps none, windows in any order are mostly in one of these
def _block(url: str, start: int) -> bytes:
    data = _fetch(url, start, min(start + BLOCK, stat(url).size))
    if _fits(len(data)):
        _keep(_place(url) / f"{start // BLOCK}", [data])
    return data


def whole(url: str) -> str:
    """The path of a copy of an object. Raises StorageError where the store or the disk fails."""
    place = _place(url) / "whole"
    size = stat(url).size
    with _locked(url, place.parent) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the host copies, the others wait
        if not (place.is_file() and place.stat().st_size == size):
            if not _fits(size):
                raise StorageError(
                    f"{url} has {size} bytes, for which {folder()} has no room; set XDG_CACHE_HOME to a larger disk"
                )
            if not _keep(place, (_fetch(url, at, min(at + 16 * BLOCK, size)) for at in range(0, size, 16 * BLOCK))):
                raise StorageError(_uncopied(url))
    return str(place)


def _locked(url: str, into: Path) -> IO[str]:
    """The file whose lock the processes of a host take turns by. Raises StorageError where none can be written."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        return (into / "lock").open("a")
    except OSError as error:
        raise StorageError(f"{_uncopied(url)} ({error})") from error


def _uncopied(url: str) -> str:
    return f"{url} cannot be copied to {folder()}; set XDG_CACHE_HOME to a folder to write in"


def _fetch(url: str, start: int, end: int) -> bytes:
    try:
        with remote.storage(f"reading {url}"):
            data: bytes = remote.filesystem(url).cat_file(url, start=start, end=end)
    except FileNotFoundError:
        raise DataError(f"{url} existed when the run began, and no longer exists") from None
    if len(data) != end - start:
        raise DataError(
            f"{url} has changed: bytes {start} to {end} are {len(data)}; at the start it had {stat(url).size}"
        )
    return data


def _place(url: str) -> Path:
    name = hashlib.sha256(f"{url} {stat(url)}".encode()).hexdigest()[:24]
    return folder() / name


def _fits(size: int) -> bool:
    try:
        folder().mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(folder())
    except OSError:
        return False
    return disk.free - size > FREE * disk.total


def _keep(place: Path, parts: Iterator[bytes] | list[bytes]) -> bool:
    """Writes a copy, whole or not at all; False where the disk refuses it."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Not synced: a copy of another size than its object's is copied again, and training waits for each block.
        with atomic_file.draft(place, is_synced=False) as draft, draft.open("wb") as file:
            for part in parts:
                file.write(part)
    except OSError:
        return False
    return True
