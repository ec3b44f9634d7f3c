"""Temporary folders of an agent, which outlive it where it is killed: the next agent of the same user removes those.

Who uses a folder holds a lock on a file in it, which the kernel releases when it dies, however it does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile

from jaxlaunch import regular_files

PREFIX, LOCK = "jaxlaunch-", ".in-use"


def make(infix: str = "", folder: str | None = None) -> tuple[str, int]:
    """A new folder in `folder`, by default that for temporary files, and the descriptor that holds its lock."""
    made = tempfile.mkdtemp(prefix=PREFIX + infix, dir=folder)
    draft = os.path.join(made, f"{LOCK}.draft")
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(draft, os.path.join(made, LOCK))  # only now: else another could take the lock first
    return made, lock


def sweep() -> None:
    """Removes the folders of this user that nobody uses any more."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        try:
            names = [name for name in os.listdir(place) if name.startswith(PREFIX)]
        except OSError:
            continue
        for name in names:
            _remove(os.path.join(place, name))


def _remove(folder: str) -> None:
    """Removes a folder if it is this user's, and its lock is there and can be taken."""
    try:
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        lock = regular_files.opener(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # it is gone, or another version's: without a lock nobody knows whether it is used
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # it is in use
    finally:
        os.close(lock)
