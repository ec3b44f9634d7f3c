"""Safe reads of files that others can replace: only regular files, and only up to a limit.

A run folder may be on storage to which other users can write. Reading a FIFO there would block, and
reading a link to /dev/zero would never end.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_regular(path: str, flags: int, dir_fd: int | None = None) -> int:
    """Open a regular file and return its descriptor; can be the `opener` of `open`.

    Args:
        path: Path of the file. It may be relative to `dir_fd`.
        flags: Flags of os.open.
        dir_fd: Descriptor of an open folder.

    Raises:
        OSError: The file cannot be opened, or it is of another kind. The call never blocks.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=dir_fd)
    except OSError as error:
        # The usual text of ELOOP, on too many levels of links, would be misleading for O_NOFOLLOW.
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


def make_opener(folder: Path) -> Callable[[str, int], int]:
    """Return an opener for paths below `folder` that follows no links.

    Otherwise someone who can only write to the folder could show a file of another user by a link.
    """

    def open_beneath(path: str, flags: int) -> int:
        if os.path.dirname(path) == str(folder):
            return open_regular(path, flags | os.O_NOFOLLOW)
        *parents, name = (name for name in path.removeprefix(f"{folder}/").split("/") if name)
        dir_fd = (
            os.open(f"{folder}/{parents[0]}", _FOLDER_FLAGS)
            if parents
            else os.open(folder, _FOLDER_FLAGS & ~os.O_NOFOLLOW)
        )
        try:
            for parent in parents[1:]:
                inner_fd = os.open(parent, _FOLDER_FLAGS, dir_fd=dir_fd)
                os.close(dir_fd)
                dir_fd = inner_fd
            return open_regular(name, flags | os.O_NOFOLLOW, dir_fd)
        finally:
            os.close(dir_fd)

    return open_beneath


def read_bounded(
    path: Path | str, max_bytes: int, from_end: bool = False, below: Path | None = None
) -> bytes:
    """Return the first `max_bytes` bytes of a regular file, or the last ones.

    Args:
        path: Path of the file.
        max_bytes: The limit.
        from_end: Whether to return the end of the file.
        below: A folder above the file. Links in it are not followed.

    Raises:
        OSError: The file cannot be read, or it is not a regular file.
    """
    descriptor = (open_regular if below is None else make_opener(below))(
        os.fspath(path), os.O_RDONLY
    )
    try:
        size = os.fstat(descriptor).st_size
        if from_end:
            os.lseek(descriptor, max(0, size - max_bytes), os.SEEK_SET)
        # os.read allocates a buffer of the requested size, even for a small file.
        parts, remaining = list[bytes](), min(max_bytes, size)
        while remaining and (part := os.read(descriptor, remaining)):
            parts.append(part)
            remaining -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)
