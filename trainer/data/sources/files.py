"""The files a source reads: found by glob, in one order everywhere, and what identifies them."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence

from trainer.errors import DataError

STDLIB = "stdlib://"  # the running interpreter's own library: text that is on every machine
FOREIGN = ("site-packages", "dist-packages")  # installed beside the standard library, not part of it

SAMPLES = 64  # places at which content goes into a digest, however much there is
SAMPLE_BYTES = 4096


def matched(patterns: str | Sequence[str]) -> list[str]:
    """All files that match, each once, sorted by path. Raises DataError for a pattern that matches none."""
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        files = _stdlib(pattern) if pattern.startswith(STDLIB) else _files(pattern)
        if not files:
            raise DataError(f"data.path {pattern!r} matches no file; {_hint(pattern)}")
        found.update(files)
    return sorted(found)


def _files(pattern: str) -> list[str]:
    return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]


def _stdlib(pattern: str) -> list[str]:
    root = sysconfig.get_path("stdlib")
    found = _files(os.path.join(glob.escape(root), pattern.removeprefix(STDLIB)))
    return [path for path in found if os.path.relpath(path, root).split(os.sep)[0] not in FOREIGN]


def _hint(pattern: str) -> str:
    """What the part of the path that does exist holds."""
    if pattern.startswith(STDLIB):
        pattern = os.path.join(sysconfig.get_path("stdlib"), pattern.removeprefix(STDLIB))
    elif "://" in pattern:
        return "mount remote data as a volume"
    folder = os.path.abspath(pattern)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    entries = sorted(os.listdir(folder))
    listed = ", ".join(entries[:5]) + (", …" if len(entries) > 5 else "") if entries else "nothing"
    return f"{folder} holds {listed}"


def digest(paths: Sequence[str]) -> str:
    """Names below their common folder, sizes and a bounded sample of the content, as 12 hexadecimal digits.

    The folder itself is left out: the same data may be mounted elsewhere on the next machine.
    """
    hashed = hashlib.sha256()
    root = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    for path in paths:
        hashed.update(f"{os.path.relpath(path, root)} {os.path.getsize(path)}\n".encode())
    for path in paths[:: -(-len(paths) // SAMPLES)]:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            for offset in range(0, size, max(SAMPLE_BYTES, -(-size * len(paths) // SAMPLES))):
                file.seek(offset)
                hashed.update(file.read(SAMPLE_BYTES))
    return hashed.hexdigest()[:12]
