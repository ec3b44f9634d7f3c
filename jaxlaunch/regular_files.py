"""Safe reads of files that others can replace: only regular files, and only up to a limit.

A run folder is on storage that others may write. A FIFO in it would never end, nor would a link to /dev/zero.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

_INNER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def opener(path: str, flags: int, at: int | None = None) -> int:
    """Return a descriptor of a regular file, as an opener for `open`.

    Raises OSError for any other kind of file, without blocking. `path` may be relative to the open folder `at`.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=at)
    except OSError as error:
        # The text of ELOOP is about too many levels of links.
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link", path) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def beneath(folder: Path) -> Callable[[str, int], int]:
    """Return an opener of paths below `folder` that follows no link.

    A link may lead to a file that its creator cannot read, but the user who shows the folder can.
    """

    def opened(path: str, flags: int) -> int:
        if os.path.dirname(path) == str(folder):
            return opener(path, flags | os.O_NOFOLLOW)
        *between, name = (name for name in path.removeprefix(f"{folder}/").split("/") if name)
        at = os.open(f"{folder}/{between[0]}", _INNER) if between else os.open(folder, _INNER & ~os.O_NOFOLLOW)
        try:
            for each in between[1:]:
                inner = os.open(each, _INNER, dir_fd=at)
                os.close(at)
                at = inner
            return opener(name, flags | os.O_NOFOLLOW, at)
        finally:
            os.close(at)

    return opened


def read(path: Path | str, most: int, at_end: bool = False, below: Path | None = None) -> bytes:
    """Return the first `most` bytes of a regular file, or the last ones.

    With `below`, no link in that folder is followed. Raises OSError, as `opener` does.
    """
    descriptor = (opener if below is None else beneath(below))(os.fspath(path), os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if at_end:
            os.lseek(descriptor, max(0, size - most), os.SEEK_SET)
        # Python allocates what it is asked for, however small the file is.
        parts, left = list[bytes](), min(most, size)
        while left and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)
