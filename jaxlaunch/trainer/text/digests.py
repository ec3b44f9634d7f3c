"""What identifies the files of a corpus: names, and SHA-256 of every byte, each file hashed once.

A digest is used again while a file's path, size and time of change (in nanoseconds) are those it was computed at: kept
in the folder of prepared rows, for all hosts that share it. A file that changed a moment ago is hashed again, since its
next change may bear the same time. An object of a bucket is what its store says it is, its generation or ETag.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxlaunch import atomic_file
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError, Stopped

CHUNK = 1 << 20
SETTLED_S = 2.0  # file systems keep times to two seconds at worst, as FAT does
STOPPED = "stopped while the files of the text were hashed"

Known = dict[str, tuple[int, int, str]]  # path -> size, time of change in ns, digest
_hashed: Known = {}  # by this process, where nothing can be kept


def of(paths: Sequence[str], folder: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Names below their common folder and what is in them, as 12 hexadecimal digits; digests are kept in `folder`.

    The common folder itself is left out: the same data may be mounted elsewhere on the next machine. Raises DataError
    for a file that cannot be read, StorageError, Stopped.
    """
    content = _contents([path for path in paths if not remote.is_remote(path)], folder, is_stopped)
    content |= {path: " ".join(map(str, files.stat_object(path))) for path in paths if remote.is_remote(path)}
    hashed = hashlib.sha256()
    for path, name in zip(paths, files.relative_names(paths), strict=True):
        hashed.update(f"{name} {content[path]}\n".encode(errors="backslashreplace"))
    return hashed.hexdigest()[:12]


def _contents(paths: Sequence[str], folder: Path, is_stopped: Callable[[], bool]) -> dict[str, str]:
    if not paths:
        return {}
    whole = [os.path.abspath(path) for path in paths]
    kept = folder / "digests" / f"{hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]}.json"
    known = _kept(kept) | _hashed
    now = {path: _mark(path) for path in whole}
    lacking = [path for path in whole if known.get(path, (0, 0, ""))[:2] != now[path]]
    for path, digest in zip(lacking, _hashes(lacking, is_stopped), strict=True):
        known[path] = (*now[path], digest)
    found = {path: known[path] for path in whole}
    if lacking:
        _keep(kept, found)
    return {path: found[each][2] for path, each in zip(paths, whole, strict=True)}


def _mark(path: str) -> tuple[int, int]:
    try:
        about = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return about.st_size, about.st_mtime_ns


def _hashes(paths: Sequence[str], is_stopped: Callable[[], bool]) -> list[str]:
    """Digests, computed by as many threads as there are cores: hashing holds no lock of the interpreter's."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = [pool.submit(_hash, path, is_stopped) for path in paths]
        return [each.result() for each in running]


def _hash(path: str, is_stopped: Callable[[], bool]) -> str:
    hashed = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(CHUNK):
                hashed.update(block)
                if is_stopped():
                    raise Stopped(STOPPED)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return hashed.hexdigest()


def _kept(path: Path) -> Known:
    try:
        return {name: (int(size), int(at), str(digest)) for name, (size, at, digest) in json.loads(path.read_text())}
    except (OSError, ValueError, TypeError):  # none yet, or cut short: all are hashed again
        return {}


def _keep(path: Path, found: Known) -> None:
    """Keeps what is settled; where nothing can be written, this process knows it."""
    latest = time.time_ns() - int(SETTLED_S * 1e9)
    settled = {name: each for name, each in found.items() if each[1] < latest}
    _hashed.update(settled)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file.draft(path) as draft:
            draft.write_text(json.dumps(list(settled.items())))
