"""The files a source reads: found by glob, in one order everywhere, and what identifies them.

A file is a path here or a URL of an object store, of which `cache` keeps on this machine what was read.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Sequence

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import cache
from jaxlaunch.trainer.errors import DataError

STDLIB = "stdlib://"  # the running interpreter's own library: text that is on every machine
FOREIGN = ("site-packages", "dist-packages")  # installed beside the standard library, not part of it
WILD = re.compile(r"[*?\[]")

SAMPLES = 64  # places at which content goes into a digest, however much there is
SAMPLE_BYTES = 4096


def matched(patterns: str | Sequence[str], key: str = "path") -> list[str]:
    """All files that match, each once, sorted by path. Raises DataError for a pattern of data.`key` that matches none.

    Raises SpecError for a URL of a store that cannot be read here, StorageError when the store fails.
    """
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        files = _finder(pattern)(pattern)
        if not files:
            raise DataError(f"data.{key} {pattern!r} matches no file; {_hint(pattern)}")
        found.update(files)
    return sorted(found)


def _finder(pattern: str) -> Callable[[str], list[str]]:
    if pattern.startswith(STDLIB):
        return _stdlib
    return _objects if remote.is_remote(pattern) else _files


def _files(pattern: str) -> list[str]:
    if os.path.isfile(pattern):  # also one whose name has brackets
        return [pattern]
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def _objects(pattern: str) -> list[str]:
    if WILD.search(pattern.partition("://")[2].split("/")[0]):
        raise DataError(f"data.path {pattern!r} matches no file; the name of a bucket is written in full")
    remote.check("train.data.path", pattern)
    return remote.matched(pattern)


def _stdlib(pattern: str) -> list[str]:
    root = sysconfig.get_path("stdlib")
    found = _files(os.path.join(glob.escape(root), pattern.removeprefix(STDLIB)))
    return [path for path in found if os.path.relpath(path, root).split(os.sep)[0] not in FOREIGN]


def _hint(pattern: str) -> str:
    """What the part of the path that does exist holds."""
    if pattern.startswith(STDLIB):
        pattern = os.path.join(sysconfig.get_path("stdlib"), pattern.removeprefix(STDLIB))
    elif remote.is_remote(pattern):
        scheme, _, place = pattern.partition("://")
        bucket, *folders = WILD.split(place)[0].split("/")
        folder = f"{scheme}://{'/'.join([bucket, *folders[:-1]])}"
        return f"{folder} holds {_listed(remote.entries(folder))}"
    folder = os.path.abspath(pattern)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return f"{folder} holds {_listed(sorted(os.listdir(folder)))}"


def _listed(entries: list[str]) -> str:
    return ", ".join(entries[:5]) + (", …" if len(entries) > 5 else "") if entries else "nothing"


def size(path: str) -> int:
    """Bytes of a file; of an object, as when it was first asked for. Raises DataError where there is none."""
    try:
        return cache.stat(path).size if remote.is_remote(path) else os.path.getsize(path)
    except FileNotFoundError:
        raise DataError(f"{path} existed when the run began, and no longer exists") from None


def read(path: str, offset: int, count: int) -> bytes:
    """Bytes of a file from `offset`, as many as there are up to `count`. Raises StorageError, OSError."""
    if remote.is_remote(path):
        return cache.read(path, offset, count)
    # Opened anew each time: no file handles are held, and a file cut short is an error where a mapping is a SIGBUS.
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(count) or b""


def here(path: str) -> str:
    """A path of this machine with the file's content: of an object, of a copy in the cache. Raises StorageError."""
    return cache.whole(path) if remote.is_remote(path) else path


def digest(paths: Sequence[str]) -> str:
    """Names below their common folder, sizes and a bounded sample of the content, as 12 hexadecimal digits.

    The folder itself is left out: the same data may be mounted elsewhere on the next machine, or be in a bucket.

    Of what `prepare` and preferences read trainer/text/digests hashes every byte. What this identifies is read in
    place, may be terabytes, and has no folder in which all hosts could keep digests: each process would read it all at
    every start. Another digest would also refuse every run in progress, whose checkpoint has this one.
    """
    hashed = hashlib.sha256()
    for path, name in zip(paths, names(paths), strict=True):
        hashed.update(f"{name} {size(path)}\n".encode(errors="backslashreplace"))
    for path in paths[:: -(-len(paths) // SAMPLES)]:
        for offset in range(0, size(path), max(SAMPLE_BYTES, -(-size(path) * len(paths) // SAMPLES))):
            hashed.update(read(path, offset, SAMPLE_BYTES))
    return hashed.hexdigest()[:12]


def names(paths: Sequence[str]) -> list[str]:
    """The paths from their common folder on."""
    root = os.path.dirname(paths[0]) if len(paths) == 1 else _common(paths)
    return [os.path.relpath(path, root) for path in paths]


def _common(paths: Sequence[str]) -> str:
    """The folder that holds them all; of files here and in buckets together there is none but the root."""
    kinds = {path.partition("://")[0] if remote.is_remote(path) else "" for path in paths}
    return os.path.commonpath(paths) if len(kinds) == 1 else os.sep
