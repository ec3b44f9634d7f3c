"""The runs of this machine, as their folders tell of them: nothing is written here, and nobody is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import KeyPath, UserError
from jaxlaunch.launcher.local import lock, run_folders
from jaxlaunch.launcher.local.lock import Holder
from jaxlaunch.launcher.yaml import numbers, reader
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.summary import Start, Summary
from jaxlaunch.runs.layout import JOB
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import rows

if TYPE_CHECKING:
    from jaxlaunch.launcher.job.load import JobSpec

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
        """What the newest start keeps; the run's own folder where it keeps none, as in version 0.1."""
        own = f"{self.folder}/starts/{1 if (start := self.start) is None else start.start}"
        return Path(own) if os.path.isdir(own) else self.folder

    @functools.cached_property
    def numbers(self) -> Mapping[KeyPath, int]:
        """NUMBERS of the job of the newest start; those that cannot be read are left out."""
        try:
            text = regular_files.read(f"{self.start_folder}/{JOB}", reader.MAX_BYTES, below=self.folder)
        except OSError:
            return {}
        return numbers.of(text.decode(errors="replace"), NUMBERS)

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
        return RunFolder(self.folder, _quiet).records(uid)


def open_run(folder: Path) -> Run:
    """The run in a folder. Raises UserError where this user may not read it."""
    try:
        held = holder(folder)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        owner = _owner(folder)
        raise UserError(f"The run in {folder} cannot be read: {why}.", owner and f"it is {owner}'s.") from None
    return Run(folder.name, folder, RunFolder(folder, _quiet).summary(), held)


def holder(folder: Path) -> Holder | None:
    """Who runs in a folder. Raises OSError where this user may not read it."""
    if not os.access(folder, os.R_OK):
        os.listdir(folder)  # which says why
    return lock.holder(folder)


def row(folder: Path, held: Holder | None) -> Run:
    """A run with only as much of its summary as a table shows."""
    return Run(folder.name, folder, RunFolder(folder, _quiet).row(), held)


def runs_in(folder: Path) -> Iterator[Run]:
    """The runs below a folder and in its sweeps as `row` has them, by name; those that this user may not read are left
    out."""
    for inner in folders_in(folder):
        with contextlib.suppress(OSError):
            yield row(inner, holder(inner))


def folders_in(folder: Path) -> Iterator[Path]:
    """The run folders below a folder and in its sweeps, by name."""
    for inner in _inside(folder):
        if run_folders.is_run(inner):
            yield inner
        elif run_folders.is_sweep(inner):  # a link in it may lead back to where it is, and is no run
            yield from filter(run_folders.is_run, _inside(inner))


def _inside(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _owner(folder: Path) -> str | None:
    """The name of the user whose folder it is; None where that is this user, or not known."""
    try:
        uid = folder.stat().st_uid
    except OSError:
        return None
    return None if uid == os.geteuid() else user(uid)


def user(uid: int) -> str:
    """The name of a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _quiet(message: str) -> None:
    """What cannot be read is shown as not known."""
