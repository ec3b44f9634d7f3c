"""The lock of a run folder: one run at a time writes into it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import UserError

LONGEST = 64  # characters of the file that are read: it holds a pid
DYING_S = 2.0  # agents that were killed with their launcher are gone after less


class Lock:
    """The lock of a run folder, while it is held."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.descriptor = descriptor  # who inherits it holds the lock too, until the last of them has ended

    @property
    def is_gone(self) -> bool:
        """Whether the folder was deleted since."""
        return os.fstat(self.descriptor).st_nlink == 0


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Holds the lock of a run folder. Raises UserError when another run holds it: both would write the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder / ".lock") as file:
        until = time.monotonic() + DYING_S
        while not _taken(file):
            file.seek(0)
            holder = file.read(LONGEST).strip()
            if _lives(holder) or time.monotonic() > until:
                raise _in_use(folder, holder)
            time.sleep(0.05)
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield Lock(folder, file.fileno())
        file.truncate(0)


def _opened(path: Path) -> TextIO:
    try:
        return open(path, "a+", errors="replace", opener=regular_files.opener)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(
            f"The lock of the run folder, {path}, cannot be used: {why}.", "name another folder with --run-dir."
        ) from None


def _taken(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(folder: Path, pid: str) -> UserError:
    """The refusal of a folder that the launcher with this pid holds, or agents that outlived it."""
    if not _lives(pid):
        return UserError(
            f"{folder} is in use: `launcher run` with pid {pid} was killed, and its agents are still ending.",
            hint="wait until they have saved, for the job's `grace` at most, or name another folder with --run-dir.",
        )
    return UserError(
        f"{folder} is in use by the run with pid {pid or 'unknown'}.",
        hint="wait for it, stop it with Ctrl-C, or name another folder with --run-dir.",
    )


def _lives(pid: str) -> bool:
    """Whether a process has this pid; True where none is said."""
    if not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
