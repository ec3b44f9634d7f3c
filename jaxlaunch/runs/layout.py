"""Layout of the run folder: names of files, the search for runs, and the lock.

The lock shows whether a run uses the folder. `launcher run` holds an flock on the lock file, which
contains its pid, its start time and the id of the machine's boot. Its agents inherit the
descriptor, so that the lock is held until the last of them has ended, even if the launcher is
killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pwd
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jaxlaunch import regular_files

# The state of the run (records/summary.py), written by the leader.
SUMMARY = "summary.json"
# A line for each attempt that ended (records/summary.py), written by the leader.
ATTEMPTS = "attempts.jsonl"
# The progress of each rank over time (records/rank_history.py), written by the leader.
RANKS = "ranks.json"
# The address of each host's agent.
AGENTS = "agents.json"
# The resolved job, in the run folder and in the folder of each start.
JOB = "job.yaml"
# The working folder and the arguments of `launcher run`, in the folder of a start.
COMMAND = "command.json"
# The Slurm job of the run, written by its batch script (launcher/local/slurm_job.py).
SLURM = "slurm.json"
# The lock that the launcher and its agents hold while they use the folder.
LOCK = ".lock"
# The beginning of the name of a folder that is being deleted. It is not shown as a run.
DELETED_PREFIX = ".deleted-"
# The folder with a folder for each start, which has its number as name.
STARTS = "starts"
LOGS = "logs"
# The log of a rank, in the run folder or in that of a start. Older lines are in a file with ".1"
# after this name.
LOG = LOGS + "/rank-{rank}.log"
# The path of a log below the run folder: the number of its start, its rank, and ".1" for older
# lines.
LOG_NAME = re.compile(rf"(?:{STARTS}/([0-9]+)/)?{LOGS}/rank-([0-9]+)\.log(\.1)?")
# Names for launcher/jobs/status/read_run.py, which reads the folder in a pod. It cannot import this
# module, so the launcher sends them with its request.
READ_NAMES = {"summary": SUMMARY, "attempts": ATTEMPTS, "starts": STARTS, "log": LOG}
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
EVALS = "eval.jsonl"
SAMPLES = "samples.jsonl"
# The journals that contain numbers.
JOURNALS = {"metrics": METRICS, "eval": EVALS}
# The prefixes of the numbers of each journal in TensorBoard and at a tracker.
JOURNAL_PREFIXES = {"metrics": "train", "eval": "eval"}
# The folder of TensorBoard's events. The folder of reported pictures and texts is samples.FOLDER.
TENSORBOARD = "tensorboard"
# The id of the run at its tracker, the place where the tracker shows it, and the steps that were
# sent.
TRACKER = "tracker.json"
MAX_TRACKER_BYTES = 1 << 16
# The file with the names of the roles in the run folder of a job with roles, whose runs are in
# subfolders with these names.
ROLES = "roles.json"
# The file in the folder of a sweep, which contains the folders of its runs.
SWEEP = "sweep.jsonl"


def start_file(number: int, name: str) -> str:
    """Return the path of a file of one start, relative to the run folder."""
    return f"{STARTS}/{number}/{name}"


def start_folder(run: Path, number: int) -> Path:
    """Return the folder of a start."""
    return run / STARTS / str(number)


def log_path(start: Path, rank: int) -> Path:
    """Return the log of a rank in the folder of a start."""
    return start / LOG.format(rank=rank)


# --- search for runs ------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder. A folder that cannot be read counts as one."""
    try:
        return stat.S_ISREG(os.stat(f"{folder}/{LOCK}").st_mode)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    try:
        return (folder / SWEEP).is_file()
    except OSError:
        return False


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders in a folder and in its sweeps, in the order of their names."""
    for inner in _list_folder(folder):
        if is_run(inner):
            yield inner
        # Folders in a sweep are not searched, because a link there may lead back to the sweep.
        elif is_sweep(inner):
            yield from filter(is_run, _list_folder(inner))


def find_own_runs(folder: Path) -> Iterator[Path]:
    """Yield the run folders that a server may show, in the order of their names.

    Links are omitted, because they may lead to folders of other users.
    """
    for inner in _list_folder(folder):
        has_files = os.path.lexists(inner / SUMMARY) or os.path.lexists(inner / LOCK)
        if has_files and not inner.is_symlink():
            yield inner


def find_own_roles(run: Path) -> Iterator[Path]:
    """Yield the run folders of the roles of a job that a server may show, by their names."""
    if os.path.isfile(run / ROLES):
        yield from find_own_runs(run)


def find_own_sweeps(folder: Path) -> Iterator[Path]:
    """Yield the folders of sweeps that a server may show, in the order of their names."""
    for inner in _list_folder(folder):
        if not inner.is_symlink() and is_sweep(inner):
            yield inner


def _list_folder(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [folder / name for name in names if not name.startswith(DELETED_PREFIX)]


def read_tracker_place(folder: Path, feed_id: str | None = None) -> tuple[str, str] | None:
    """Return where the tracker shows a run: "url" or "command", and the text of either.

    The result is None until the tracker is open. With `feed_id`, the place that an earlier start
    has recorded does not count.
    """
    try:
        data = regular_files.read_bounded(folder / TRACKER, MAX_TRACKER_BYTES, below=folder)
        state = json.loads(data)
        place = state["place"]
        kind, text = place["kind"], place["text"]
        is_of_feed = feed_id is None or state.get("feed_id") == feed_id
    except (OSError, ValueError, TypeError, LookupError):
        return None
    is_valid = kind in ("url", "command") and isinstance(text, str)
    return (kind, text) if is_valid and is_of_feed else None


def owner_name(folder: Path) -> str | None:
    """Return the name of the owner of a folder, or None if the folder cannot be read."""
    try:
        return user_name(folder.stat().st_uid)
    except OSError:
        return None


def user_name(uid: int) -> str:
    """Return the name of a user, or "user UID" if the user has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# --- the lock -------------------------------------------------------------------------------------

# The bytes of the lock file that are read. It has a line with the holder, and may have one that the
# holder is stopping.
MAX_HOLDER_BYTES = 256
# Agents that were killed together with their launcher have ended after this time.
AGENTS_EXIT_S = 2.0
# For this time a locked file may be empty, because `find_holder` also takes the lock for a moment.
EMPTY_LOCK_S = 0.2
_STOPPING = "stopping"
# The id changes at every boot of the machine.
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
# The index of the start time, in ticks since boot, among the fields after the name in
# /proc/PID/stat.
_START_TICKS_INDEX = 19


class LockError(Exception):
    """The lock of a run folder cannot be taken. `hint` is the advice for the user."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Lock:
    """A held lock of a run folder."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        # Processes that inherit the descriptor hold the lock, too.
        self.descriptor = descriptor

    @property
    def is_gone(self) -> bool:
        """Return whether the lock file was deleted, with the folder, since the lock was taken."""
        return os.fstat(self.descriptor).st_nlink == 0

    def note_stopping(self) -> None:
        """Record in the lock file that the run is stopping. Safe in a signal handler."""
        os.write(self.descriptor, f"{_STOPPING}\n".encode())


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds the lock of a run folder.

    Attributes:
        pid: Process id of the launcher, or None if no such process is alive on this machine.
        is_stopping: Whether the launcher was asked to stop, or was killed so that its agents are
            ending.
        is_here: False if the launcher is on another machine, or in a container whose processes are
            not visible.
    """

    pid: int | None
    is_stopping: bool
    is_here: bool = True


def find_readable_holder(folder: Path) -> Holder | None:
    """Return the holder of the lock of a folder, or raise OSError if the folder cannot be read."""
    if not os.access(folder, os.R_OK):
        # It raises the error with the reason.
        os.listdir(folder)
    return find_holder(folder)


def find_holder(folder: Path, name: str = LOCK) -> Holder | None:
    """Return the holder of the lock of a folder, or None if nobody holds it."""
    try:
        # A descriptor is faster than a file object: `launcher list` may read ten thousand locks.
        descriptor = regular_files.open_regular(f"{folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if _try_lock(descriptor, fcntl.LOCK_SH):
            return None
        text = os.read(descriptor, MAX_HOLDER_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)
    owner, _, notes = text.partition("\n")
    pid, _, started = owner.partition(" ")
    if not pid.isdecimal():
        # The holder has not written its pid yet.
        return Holder(None, is_stopping=False)
    if _is_alive(owner):
        return Holder(int(pid), is_stopping=_STOPPING in notes)
    # The launcher was killed and its agents are ending, unless it is from another boot, which means
    # that it is on another machine.
    is_here = True
    if started and _BOOT_ID_FILE.exists():
        is_here = started.endswith(_BOOT_ID_FILE.read_text().strip())
    return Holder(None, is_stopping=is_here, is_here=is_here)


@contextlib.contextmanager
def hold_lock(folder: Path, name: str = LOCK) -> Iterator[Lock]:
    """Hold the lock of a run folder, which is created if it does not exist.

    Raises:
        LockError: Another run holds the lock, or the file of the lock cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    try:
        file = open(path, "a+", errors="replace", opener=regular_files.make_opener(folder))  # noqa: SIM115
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        message = f"The lock of the run folder, {path}, cannot be used: {reason}."
        raise LockError(message, "name another folder with --run-dir.") from None
    with file:
        _wait_for_lock(folder, file)
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()} {_read_start_time(os.getpid())}\n")
        file.flush()
        yield Lock(folder, file.fileno())
        file.truncate(0)


def _wait_for_lock(folder: Path, file: TextIO) -> None:
    started_at = time.monotonic()
    while not _try_lock(file, fcntl.LOCK_EX):
        file.seek(0)
        owner = file.readline(MAX_HOLDER_BYTES).strip()
        pid, is_alive = owner.partition(" ")[0], _is_alive(owner)
        patience_s = EMPTY_LOCK_S
        if owner:
            patience_s = 0.0 if is_alive else AGENTS_EXIT_S
        if time.monotonic() - started_at <= patience_s:
            time.sleep(0.05)
        elif owner and not is_alive:
            raise LockError(
                f"{folder} is in use: `launcher run` with pid {pid} was killed, and its agents are "
                "still ending.",
                "wait until they have saved, for the job's `grace` at most, or name another folder "
                "with --run-dir.",
            )
        else:
            raise LockError(
                f"{folder} is in use by the run with pid {pid or 'unknown'}.",
                f"wait for it, stop it with Ctrl-C or `launcher stop {folder}`, or name another "
                "folder with --run-dir.",
            )


def _try_lock(file: TextIO | int, operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(owner: str) -> bool:
    """Return whether a process with this pid and start time is alive.

    Args:
        owner: First line of a lock file. It may have no start time.
    """
    pid, _, started = owner.partition(" ")
    if not pid.isdecimal():
        return False
    # A process of another user is alive, although it cannot be sent a signal.
    with contextlib.suppress(PermissionError):
        try:
            os.kill(int(pid), 0)
        except (ProcessLookupError, OverflowError):
            return False
    return not started or started == _read_start_time(int(pid))


def _read_start_time(pid: int) -> str:
    """Return the start time of a process, as ticks and the id of the boot, or "" without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return f"{fields[_START_TICKS_INDEX]} {_BOOT_ID_FILE.read_text().strip()}"
    except (OSError, IndexError):
        return ""
