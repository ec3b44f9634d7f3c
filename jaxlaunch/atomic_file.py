"""Atomic replacement of files, for agents, launcher and trainer.

The new content is written to a draft in the same folder. The draft is synced and renamed to the
name of the file, and the folder is synced. A reader sees either the old or the new content, never a
part of it, and one of the two also survives a loss of power.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Code that copies or lists a folder skips names with this suffix.
DRAFT_SUFFIX = ".tmp"


@contextlib.contextmanager
def open_draft(path: Path, *, is_synced: bool = True) -> Iterator[Path]:
    """Yield the path of a draft that replaces `path` when the block ends without an error.

    Args:
        path: The file.
        is_synced: Whether draft and folder are synced, which takes milliseconds each. Without it a
            loss of power may leave the file empty: use False only for files that are written very
            often and may be lost.

    Raises:
        OSError: If the draft cannot be written, synced or renamed. The file is then unchanged.
    """
    # A random name, because hosts that share the storage may have equal process ids: every agent in
    # a pod is process 1.
    draft_path = path.with_name(f"{path.name}.{os.urandom(8).hex()}{DRAFT_SUFFIX}")
    try:
        yield draft_path
        # Without this sync the rename can reach the disk before the data: the file would be empty
        # after a power cut.
        if is_synced:
            _sync_path(draft_path)
        draft_path.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft_path.unlink()
        raise
    # Some network file systems refuse to sync a folder. The file is complete in any case.
    if is_synced:
        with contextlib.suppress(OSError):
            _sync_path(path.parent)


def write_file(path: Path, data: bytes, *, is_synced: bool = True) -> None:
    """Replace the content of a file with `data`. An OSError leaves the file unchanged."""
    with open_draft(path, is_synced=is_synced) as draft_path:
        draft_path.write_bytes(data)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
