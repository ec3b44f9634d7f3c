"""Temporary folders of an agent, which outlive it where it is killed: the next agent of the same user removes those.

Who uses a folder holds a lock on a file in it, which the kernel releases when it dies, however it does. Versions before
November 2026 held none: their folders go a week after they last changed, unless a program was told of them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator

from jaxlaunch import regular_files

PREFIX, LOCK = "jaxlaunch-", ".in-use"
SITE = "site"  # what an agent's own folder has first
FORGOTTEN_S = 7 * 24 * 3600  # since a folder without a lock has changed


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
    except OSError:
        return  # another agent that starts now has removed it
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    try:
        lock = regular_files.opener(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # it is gone, an older version's, or of an agent that was killed while it made it
        if time.time() - found.st_mtime > FORGOTTEN_S and _is_agents(folder) and not _is_told(folder):
            shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # it is in use
    finally:
        os.close(lock)


def _is_agents(folder: str) -> bool:
    """Whether an agent made it, and nobody to keep something there."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return SITE in names or not set(names) - {f"{LOCK}.draft"}


def _is_told(folder: str) -> bool:
    """Whether an environment variable of a process names the folder, as PYTHONPATH does of an agent's programs."""
    return any(folder.encode() in environ for environ in _environs())


def _environs() -> Iterator[bytes]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                yield file.read()
        except OSError:  # it ended, or is another user's
            continue
