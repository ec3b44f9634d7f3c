"""Reads files that others can replace: regular ones alone, and never more than a bound."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read(path: Path | str, most: int, at_end: bool = False) -> bytes:
    """The first `most` bytes of a file, or its last ones. Raises OSError; also for what is no regular file: a FIFO
    would never end, nor would /dev/zero."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with open(descriptor, "rb") as file:
        if at_end:
            file.seek(max(0, found.st_size - most))
        return file.read(most)
