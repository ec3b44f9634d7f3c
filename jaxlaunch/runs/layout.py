"""The run folder: the names of its files, which folders are runs, and the lock that lets one run at a time write.

The program that reads the folder in a pod (launcher/jobs/status/read_run.py) imports nothing of ours and repeats those
names that it needs. Its tests write folders by this package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pwd
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxlaunch import regular_files

# State of the run, and a line for each attempt that ended, written by the leader: records/summary.py.
SUMMARY = "summary.json"
ATTEMPTS = "attempts.jsonl"
# Where each rank stood over time, written by the leader: records/rank_history.py.
RANKS = "ranks.json"
# Where the agent of each host answers.
AGENTS = "agents.json"
# The job as it was resolved, of the run and in the folder of each start.
JOB = "job.yaml"
# Held by the launcher and by its agents while they run in the folder.
LOCK = ".lock"
# One folder for each start, named by its number, with its summary, its job and its logs.
STARTS = "starts"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
EVALS = "eval.jsonl"
SAMPLES = "samples.jsonl"
# jaxlaunch/reporting.py, which works in images without this package, names its own folder "reported".
TENSORBOARD = "tensorboard"
# In the folder of a sweep, whose runs are folders in it.
SWEEP = "sweep.jsonl"


def start_file(number: int, name: str) -> str:
    """Return the path of a file that belongs to one start of the run, relative to the run folder."""
    return f"{STARTS}/{number}/{name}"


def start_folder(run: Path, number: int) -> Path:
    """Return the folder of a start. A later start of the same run has another one."""
    return run / STARTS / str(number)


def log_path(start: Path, rank: int) -> Path:
    """Return the log of a rank in the folder of a start; older lines are in the same name with .1 at its end."""
    return start / LOGS / f"rank-{rank}.log"


# --- which folders are runs -------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's. One that this user may not look into may be: who reads it says that."""
    try:
        return stat.S_ISREG(os.stat(f"{folder}/{LOCK}").st_mode)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep, whose runs are folders in it."""
    try:
        return (folder / SWEEP).is_file()
    except OSError:
        return False


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders below a folder and in its sweeps, by name."""
    for inner in _list(folder):
        if is_run(inner):
            yield inner
        # A link in a sweep may lead back to where it is, and is no run.
        elif is_sweep(inner):
            yield from filter(is_run, _list(inner))


def find_own_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders below a folder that a server may show, by name: no link leads it elsewhere."""
    for inner in _list(folder):
        has_files = os.path.lexists(inner / SUMMARY) or os.path.lexists(inner / LOCK)
        if has_files and not inner.is_symlink():
            yield inner


def _list(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def owner_name(folder: Path) -> str | None:
    """Return the name of the user whose folder it is, or None if that is not known."""
    try:
        return user_name(folder.stat().st_uid)
    except OSError:
        return None


def user_name(uid: int) -> str:
    """Return the name of a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# --- the lock ---------------------------------------------------------------------------------------------------------

MAX_HOLDER_BYTES = 256  # of the lock's file that are read: who holds it, and whether that is stopping
DYING_S = 2.0  # agents that were killed with their launcher are gone after less
LOOK_S = 0.2  # for which nobody's name may be in the file of a taken lock: a look at it takes it for an instant
_STOPPING = "stopping"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # a machine's, between two starts of it
_START_TICKS = 19  # in /proc/PID/stat after the name: when the process was started, in ticks since boot


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
        """Tell who looks that the run has been asked to stop. Safe in a handler of signals."""
        os.write(self.descriptor, f"{_STOPPING}\n".encode())


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds the lock of a run folder.

    `pid`: of the launcher, where it lives on this machine; a number that another process has by now is none.
    """

    pid: int | None
    is_stopping: bool  # it was asked to, or was killed, and its agents are ending
    is_here: bool = True  # False: on another machine, or in a container whose processes cannot be seen from here


def find_readable_holder(folder: Path) -> Holder | None:
    """Return who runs in a folder. Raises OSError where this user may not read it."""
    if not os.access(folder, os.R_OK):
        # The error says why.
        os.listdir(folder)
    return find_holder(folder)


def find_holder(folder: Path, name: str = LOCK) -> Holder | None:
    """Return who runs in a folder now; None where nobody does, whatever its files say. Raises OSError."""
    try:
        # A descriptor and no file object: `launcher list` looks at ten thousand of them.
        descriptor = regular_files.opener(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if _take(descriptor, fcntl.LOCK_SH):
            return None
        who, _, more = os.read(descriptor, MAX_HOLDER_BYTES).decode(errors="replace").partition("\n")
    finally:
        os.close(descriptor)
    pid, _, born = who.partition(" ")
    # It is about to write who it is.
    if not pid.isdecimal():
        return Holder(None, is_stopping=False)
    if _lives(who):
        return Holder(int(pid), is_stopping=_STOPPING in more)
    is_here = not born or not _BOOT.exists() or born.endswith(_BOOT.read_text().strip())
    return Holder(None, is_stopping=is_here, is_here=is_here)


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK) -> Iterator[Lock]:
    """Hold the lock of a run folder. Raises LockError when another run holds it: both would write the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    try:
        file = open(path, "a+", errors="replace", opener=regular_files.beneath(folder))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        message = f"The lock of the run folder, {path}, cannot be used: {why}."
        raise LockError(message, "name another folder with --run-dir.") from None
    with file:
        _wait_for_lock(folder, file)
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} {_born(os.getpid())}\n")
        file.flush()
        yield Lock(folder, file.fileno())
        file.truncate(0)


def _wait_for_lock(folder: Path, file: TextIO) -> None:
    began = time.monotonic()
    while not _take(file, fcntl.LOCK_EX):
        file.seek(0)
        who = file.readline(MAX_HOLDER_BYTES).strip()
        pid, lives = who.partition(" ")[0], _lives(who)
        patience_s = LOOK_S if not who else 0.0 if lives else DYING_S
        if time.monotonic() - began <= patience_s:
            time.sleep(0.05)
        elif who and not lives:
            raise LockError(
                f"{folder} is in use: `launcher run` with pid {pid} was killed, and its agents are still ending.",
                "wait until they have saved, for the job's `grace` at most, or name another folder with --run-dir.",
            )
        else:
            raise LockError(
                f"{folder} is in use by the run with pid {pid or 'unknown'}.",
                f"wait for it, stop it with Ctrl-C or `launcher stop {folder}`, or name another folder with --run-dir.",
            )


def _take(file: TextIO | int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lives(who: str) -> bool:
    """Return whether a process lives, by its pid and when it was born, where that is known."""
    pid, _, born = who.partition(" ")
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
    """Return when a process was started: its ticks since boot, and which boot that was; empty where nobody says."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_START_TICKS]
        return f"{ticks} {_BOOT.read_text().strip()}"
    except (OSError, IndexError):
        return ""
