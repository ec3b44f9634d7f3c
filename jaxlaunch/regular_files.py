"""Opens and reads files that others can replace: regular ones alone, and never more than a bound.

A run folder is on storage that others may write. A FIFO in it would never end, nor would a link to /dev/zero.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def opener(path: str, flags: int) -> int:
    """For `open`: a descriptor of a regular file. Raises OSError for anything else, without waiting for anyone."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read(path: Path | str, most: int, at_end: bool = False) -> bytes:
    """The first `most` bytes of a regular file, or its last ones. Raises OSError, as `opener` does."""
    with open(path, "rb", opener=opener) as file:
        if at_end:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)
