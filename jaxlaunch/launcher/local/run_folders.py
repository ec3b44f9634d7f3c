"""The runs of this machine: found by their names, and read from their folders. Nothing is written here.

What jobs are on a cluster must not wait for more to be imported than this module needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import KeyPath, UserError
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.summary import Start, Summary
from jaxlaunch.runs import catalog, layout, lock
from jaxlaunch.runs.catalog import is_run, is_sweep
from jaxlaunch.runs.lock import Holder, Lock, LockError
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import rows

if TYPE_CHECKING:
    from jaxlaunch.launcher.job.load import JobSpec

HOME = Path("runs")
HOSTS, MOST_HOSTS, SLICES, STEPS, CRASHES = (
    ("hosts",),
    ("hosts", "max"),
    ("slices",),
    ("train", "steps"),
    ("restarts", "crash"),
)
NUMBERS = (HOSTS, MOST_HOSTS, SLICES, STEPS, CRASHES)  # of a job, for a table


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of this machine: its folder, what its newest start has written, and who runs in it now."""

    name: str
    folder: Path
    summary: Summary | None  # None: it has not begun, or was never begun
    holder: Holder | None  # None: nobody runs in it

    @property
    def start(self) -> Start | None:
        """The row of the newest start."""
        return next(reversed(rows(self.summary)), None)

    @functools.cached_property
    def start_folder(self) -> Path:
        """The folder of the newest start; the run's own folder where there is none."""
        folder = layout.start_folder(self.folder, 1 if self.start is None else self.start.start)
        # Path.is_dir raises where storage does not answer or a folder is another user's: `launcher list` goes on.
        return folder if os.path.isdir(folder) else self.folder

    @functools.cached_property
    def numbers(self) -> Mapping[KeyPath, int]:
        """NUMBERS of the job of the newest start; those that cannot be read are left out."""
        try:
            text = regular_files.read(self.start_folder / layout.JOB, reader.MAX_BYTES, below=self.folder)
        except OSError:
            return {}
        return reader.whole_numbers(text.decode(errors="replace"), NUMBERS)

    @functools.cached_property
    def job(self) -> JobSpec | None:
        """The same, checked; None where it is none, or another version's."""
        from jaxlaunch.launcher.job import load as jobs  # who asks for a cluster's job must not wait for pydantic

        try:
            return jobs.kept(self.start_folder, below=self.folder)
        except (OSError, UserError):
            return None

    @functools.cached_property
    def records(self) -> list[Record]:
        """The attempts of the newest start that ended, oldest first."""
        uid = "" if self.start is None else self.start.uid
        return RunFolder(self.folder).records(uid)


def find(run: str) -> Path | None:
    """Return the folder of a run, given by its name or by its folder, or None if there is none."""
    in_sweep = HOME / run.rpartition("-")[0] / run
    return next((folder.absolute() for folder in (Path(run), HOME / run, in_sweep) if is_run(folder)), None)


def find_sweep(name: str) -> Path | None:
    """Return the folder of a sweep, given by its name or by its folder, or None if there is none."""
    return next((folder.absolute() for folder in (Path(name), HOME / name) if is_sweep(folder)), None)


def looked_for(run: str) -> str:
    """Return where `find` has looked, as a clause."""
    return f"neither {run} nor {HOME / run} is a run folder"


def folder(run: str) -> Path:
    """Return the folder of a run, or any other folder of this path. Raises UserError when there is none."""
    if (own := find(run)) is not None:
        return own
    for path in (Path(run), HOME / run):
        if path.is_dir():
            return path.absolute()
    raise UserError(
        f"There is no run {run}: neither {run} nor {HOME / run} is a folder.", "give the name of a run or its folder."
    )


def open_run(folder: Path) -> Run:
    """Return the run in a folder. Raises UserError where this user may not read it."""
    try:
        holder = catalog.find_holder(folder)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.geteuid():
                raise UserError(
                    f"The run in {folder} cannot be read: {why}.", f"it is {catalog.owner_name(folder)}'s."
                ) from None
        raise UserError(f"The run in {folder} cannot be read: {why}.") from None
    return Run(folder.name, folder, RunFolder(folder).summary(), holder)


def runs_in(folder: Path) -> Iterator[Run]:
    """Yield the runs below a folder and in its sweeps, by name, with as much of their summaries as a table shows.

    Those that this user may not read are left out.
    """
    for path in catalog.find_runs(folder):
        with contextlib.suppress(OSError):
            holder = catalog.find_holder(path)
            yield Run(path.name, path, RunFolder(path).row(), holder)


@contextlib.contextmanager
def locked(folder: Path, name: str = layout.LOCK) -> Iterator[Lock]:
    """Hold the lock of a run folder or a sweep. Raises UserError when another run holds it."""
    try:
        with lock.locked(folder, name) as held:
            yield held
    except LockError as error:
        raise UserError(error.message, error.hint) from None
