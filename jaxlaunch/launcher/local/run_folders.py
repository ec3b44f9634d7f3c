"""Runs of this machine: find them by name, read their folders, stop them, wait for their end.

Commands about jobs on a cluster import this module too, so its imports are kept small.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import shlex
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import KeyPath, UserError
from jaxlaunch.launcher.local import slurm_job
from jaxlaunch.launcher.local.slurm_job import SlurmJob
from jaxlaunch.launcher.wording import os_error_reason
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.records import codec
from jaxlaunch.records.summary import (
    AttemptRecord,
    StartRecord,
    Summary,
    newest_effective_start,
)
from jaxlaunch.runs import layout
from jaxlaunch.runs.layout import Holder, Lock, LockError, is_run, is_sweep
from jaxlaunch.runs.run_folder import RunFolder, start_rows

if TYPE_CHECKING:
    from jaxlaunch.launcher.job.load import JobSpec

RUNS_FOLDER = Path("runs")
POLL_S = 0.1
# Keys of a job whose numbers are columns of a table.
HOSTS_KEY, MAX_HOSTS_KEY, SLICES_KEY = ("hosts",), ("hosts", "max"), ("slices",)
STEPS_KEY, MAX_CRASHES_KEY = ("train", "steps"), ("restarts", "crash")


@dataclasses.dataclass(frozen=True)
class RoleTable:
    """The content of roles.json in the run folder of a job with roles."""

    # In the order of their starts.
    names: Sequence[str]
    # The first role that ends the job.
    lead: str
    # The role whose end decided on the result.
    decisive: str | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: its folder, the records of its newest start, and the process that runs it."""

    name: str
    folder: Path
    # None if the run has not begun.
    summary: Summary | None
    # None if no process runs it.
    holder: Holder | None

    @property
    def newest_start(self) -> StartRecord | None:
        """The row of the newest start that was not refused, which determines the result."""
        return newest_effective_start(start_rows(self.summary))

    @property
    def refused_start(self) -> StartRecord | None:
        """The row of the newest start, if it was refused and did not change the result."""
        newest_row = next(reversed(start_rows(self.summary)), None)
        return None if newest_row is self.newest_start else newest_row

    @functools.cached_property
    def start_folder(self) -> Path:
        """The folder of the newest start; the run's own folder before the first start."""
        start = self.newest_start
        folder = layout.start_folder(self.folder, 1 if start is None else start.start)
        # Path.is_dir raises if the storage does not answer or the folder belongs to another user,
        # and then `launcher list` would fail.
        return folder if os.path.isdir(folder) else self.folder

    @functools.cached_property
    def job_numbers(self) -> Mapping[KeyPath, int]:
        """The numbers in the job of the newest start. Unreadable ones are left out."""
        file = self.start_folder / layout.JOB
        try:
            text = regular_files.read_bounded(file, reader.MAX_BYTES, below=self.folder)
        except OSError:
            return {}
        keys = (HOSTS_KEY, MAX_HOSTS_KEY, SLICES_KEY, STEPS_KEY, MAX_CRASHES_KEY)
        return reader.read_whole_numbers(text.decode(errors="replace"), keys)

    @functools.cached_property
    def job(self) -> JobSpec | None:
        """The validated job of the newest start, or None if it is invalid or of another version."""
        # Imported here, because commands about jobs on a cluster must not wait for pydantic.
        from jaxlaunch.launcher.job import load as jobs

        try:
            return jobs.read_run_job(self.start_folder, root=self.folder)
        except (OSError, UserError):
            return None

    @functools.cached_property
    def role_table(self) -> RoleTable | None:
        """The roles of the job, or None if it has none."""
        return read_role_table(self.folder)

    @functools.cached_property
    def roles(self) -> Mapping[str, Run]:
        """The runs of the roles that have started, by the name of the role."""
        folders = [self.folder / name for name in self.role_table.names] if self.role_table else ()
        return {folder.name: open_run(folder) for folder in folders if is_run(folder)}

    @functools.cached_property
    def slurm_job(self) -> SlurmJob | None:
        """The Slurm job of the newest start, or None if Slurm does not run it."""
        start = self.newest_start
        uid = None if start is None else start.uid
        return slurm_job.read_job(RunFolder(self.folder), uid)

    @functools.cached_property
    def is_requeued(self) -> bool:
        """Whether no process runs it, and Slurm will start it again."""
        job = None if self.holder is not None else self.slurm_job
        return job is not None and job.is_queued()

    @functools.cached_property
    def attempt_records(self) -> list[AttemptRecord]:
        """The finished attempts of the newest start, oldest first."""
        uid = "" if self.newest_start is None else self.newest_start.uid
        return RunFolder(self.folder).read_records(uid)


def find_run(run: str) -> Path | None:
    """Return the folder of a run that is given by name or folder, or None if there is none."""
    sweep_folder = RUNS_FOLDER / run.rpartition("-")[0] / run
    folders = (Path(run), RUNS_FOLDER / run, sweep_folder)
    return next((folder.absolute() for folder in folders if is_run(folder)), None)


def read_role_table(folder: Path) -> RoleTable | None:
    """Return the roles of the job in a run folder, or None if it has none."""
    try:
        table = codec.read_record(RoleTable, RunFolder(folder).read_json(layout.ROLES))
    except codec.MalformedError:
        return None
    # The names must be those of subfolders.
    is_valid = all(name not in ("", ".", "..") and os.sep not in name for name in table.names)
    return table if is_valid else None


def job_folder(folder: Path) -> Path:
    """Return the run folder of the job, which is the parent of the folder of a role."""
    table = read_role_table(folder.parent)
    return folder if table is None or folder.name not in table.names else folder.parent


def find_sweep(name: str) -> Path | None:
    """Return the folder of a sweep that is given by name or folder, or None if there is none."""
    folders = (Path(name), RUNS_FOLDER / name)
    return next((folder.absolute() for folder in folders if is_sweep(folder)), None)


def describe_search(run: str) -> str:
    """Return a clause that says where `find_run` has searched."""
    return f"neither {run} nor {RUNS_FOLDER / run} is a run folder"


def resolve_folder(run: str) -> Path:
    """Return the folder of a run, or any other existing folder. Raises UserError."""
    if (folder := find_run(run)) is not None:
        return folder
    for path in (Path(run), RUNS_FOLDER / run):
        if path.is_dir():
            return path.absolute()
    raise UserError(
        f"There is no run {run}: neither {run} nor {RUNS_FOLDER / run} is a folder.",
        "give the name of a run or its folder.",
    )


def open_run(folder: Path) -> Run:
    """Return the run in a folder. Raises UserError if this user may not read it."""
    try:
        holder = layout.find_readable_holder(folder)
    except OSError as error:
        hint = None
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.geteuid():
                hint = f"it belongs to {layout.owner_name(folder)}."
        raise UserError(
            f"The run in {folder} cannot be read: {os_error_reason(error)}.", hint
        ) from None
    return Run(folder.name, folder, RunFolder(folder).read_summary(), holder)


def list_runs(folder: Path) -> Iterator[Run]:
    """Yield the runs below a folder and in its sweeps, by name, with the summaries for a table.

    Runs that this user may not read are skipped.
    """
    for path in layout.find_runs(folder):
        with contextlib.suppress(OSError):
            holder = layout.find_readable_holder(path)
            yield Run(path.name, path, RunFolder(path).read_summary_row(), holder)


@contextlib.contextmanager
def hold_lock(folder: Path, lock_name: str = layout.LOCK) -> Iterator[Lock]:
    """Hold the lock of a run folder or a sweep. Raises UserError if another run holds it."""
    try:
        with layout.hold_lock(folder, lock_name) as lock:
            yield lock
    except LockError as error:
        raise UserError(error.message, error.hint) from None


def stop_run(run: Run, lock_name: str = layout.LOCK) -> None:
    """Make the run save and end, as Ctrl-C does, and return when it has recorded that it stops.

    A run that is already stopping gets no second signal, which would kill it. `lock_name` is the
    lock that it holds in its folder. Raises UserError if no process runs in the folder, or if it
    belongs to another user or machine.
    """
    if (job := job_folder(run.folder)) != run.folder:
        message = f"{run.name} is a role of {job.name}, whose roles are stopped together."
        raise UserError(message, f"`launcher stop {shlex.quote(os.path.relpath(job))}`")
    # Two concurrent requests would be two signals, and the second signal kills.
    descriptor = os.open(run.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        holder = layout.find_holder(run.folder, lock_name)
        if holder is None:
            raise UserError(
                f"Run {run.name} is not running: there is nothing to stop.", f"see {run.folder}."
            )
        if not holder.is_here:
            raise UserError(
                f"Run {run.name} runs on another machine, or in a container whose processes cannot "
                "be seen from here.",
                "stop it there.",
            )
        if not holder.is_stopping:
            _ask_to_stop(run, holder, lock_name)
    finally:
        os.close(descriptor)


def wait_for_end(run: Run, limit_s: float, lock_name: str = layout.LOCK) -> bool:
    """Wait until no process runs in the folder. Return False after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while layout.find_holder(run.folder, lock_name) is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _ask_to_stop(run: Run, holder: Holder, lock_name: str) -> None:
    """Send SIGTERM to the launcher, and wait until it has recorded in the lock that it stops."""
    if holder.pid is None:
        raise UserError(
            f"Run {run.name} is starting and has not written its process id yet.", "try again."
        )
    try:
        process = os.pidfd_open(holder.pid)
    except OSError:
        # The launcher has ended.
        return
    try:
        if layout.find_holder(run.folder, lock_name) != holder:
            # The launcher ended before the descriptor was opened, and its pid may belong to another
            # process.
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        owner = layout.user_name(os.stat(f"/proc/{holder.pid}").st_uid)
        raise UserError(
            f"Run {run.name} belongs to {owner}, and you may not stop it.", f"ask {owner}."
        ) from None
    except ProcessLookupError:
        return
    finally:
        os.close(process)
    while layout.find_holder(run.folder, lock_name) == holder:
        time.sleep(POLL_S)
