"""The lock of a run folder: one run at a time writes into it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxlaunch import regular_files
from jaxlaunch.runs.layout import LOCK

LONGEST = 256  # characters of the file that are read: who holds it, and whether that is stopping
DYING_S = 2.0  # agents that were killed with their launcher are gone after less
LOOK_S = 0.2  # for which nobody's name may be in the file of a taken lock: a look at it takes it for an instant
_STOPPING = "stopping"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # a machine's, between two starts of it
_AT_TICKS = 19  # in /proc/PID/stat after the name: when the process was started, in ticks since boot


class LockError(Exception):
    """The lock of a run folder cannot be taken: `message` says why, and `hint` what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Lock:
    """The lock of a run folder, while it is held."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self.descriptor = descriptor  # who inherits it holds the lock too, until the last of them has ended

    @property
    def is_gone(self) -> bool:
        """Whether the folder was deleted since."""
        return os.fstat(self.descriptor).st_nlink == 0

    def note_stopping(self) -> None:
        """Tells who looks that the run has been asked to stop. Safe in a handler of signals."""
        os.write(self.descriptor, f"{_STOPPING}\n".encode())


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds the lock of a run folder.

    `pid`: of the launcher, where it lives on this machine; a number that another process has by now is none.
    """

    pid: int | None
    is_stopping: bool  # it was asked to, or was killed, and its agents are ending
    is_here: bool = True  # False: on another machine, or in a container whose processes cannot be seen from here


def find_holder(folder: Path, name: str = LOCK) -> Holder | None:
    """Who runs in a folder now; None where nobody does, whatever its files say. Raises OSError."""
    try:  # a descriptor and no file object: `launcher list` looks at ten thousand of them
        descriptor = regular_files.opener(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if _taken(descriptor, fcntl.LOCK_SH):
            return None
        who, _, more = os.read(descriptor, LONGEST).decode(errors="replace").partition("\n")
    finally:
        os.close(descriptor)
    pid, _, born = who.partition(" ")
    if not pid.isdecimal():  # it is about to write who it is
        return Holder(None, is_stopping=False)
    if _lives(who):
        return Holder(int(pid), is_stopping=_STOPPING in more)
    is_here = not born or not _BOOT.exists() or born.endswith(_BOOT.read_text().strip())
    return Holder(None, is_stopping=is_here, is_here=is_here)


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[Lock]:
    """Holds the lock of a run folder, `name`. Raises LockError when another run holds it: both would write the same
    files."""
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder / name) as file:
        began = time.monotonic()
        while not _taken(file, fcntl.LOCK_EX):
            file.seek(0)
            who = file.readline(LONGEST).strip()
            patience_s = LOOK_S if not who else 0.0 if _lives(who) else DYING_S
            if time.monotonic() - began > patience_s:
                raise _in_use(folder, who)
            time.sleep(0.05)
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} {_born(os.getpid())}\n")
        file.flush()
        yield Lock(folder, file.fileno())
        file.truncate(0)


def _opened(path: Path) -> TextIO:
    try:
        return open(path, "a+", errors="replace", opener=regular_files.beneath(path.parent))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise LockError(
            f"The lock of the run folder, {path}, cannot be used: {why}.", "name another folder with --run-dir."
        ) from None


def _taken(file: TextIO | int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(folder: Path, name: str) -> LockError:
    """The refusal of a folder that the launcher of this name holds, or agents that outlived it."""
    pid = name.partition(" ")[0]
    if name and not _lives(name):
        return LockError(
            f"{folder} is in use: `launcher run` with pid {pid} was killed, and its agents are still ending.",
            hint="wait until they have saved, for the job's `grace` at most, or name another folder with --run-dir.",
        )
    return LockError(
        f"{folder} is in use by the run with pid {pid or 'unknown'}.",
        hint=f"wait for it, stop it with Ctrl-C or `launcher stop {folder}`, or name another folder with --run-dir.",
    )


def _lives(name: str) -> bool:
    """Whether the process of this name lives: its pid, and when it was born, where that is known."""
    pid, _, born = name.partition(" ")
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return not born or born == _born(int(pid))


def _born(pid: int) -> str:
    """When a process was started: its ticks since boot, and which boot that was; empty where nobody says."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_AT_TICKS]
        return f"{ticks} {_BOOT.read_text().strip()}"
    except (OSError, IndexError):
        return ""
