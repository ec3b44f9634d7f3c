"""The runs below a folder, each in one row: what a table of them shows. No more than two files of a run are read."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch import regular_files
from jaxlaunch.launcher.yaml import numbers, reader
from jaxlaunch.records import summary
from jaxlaunch.records.summary import Summary
from jaxlaunch.runs import history
from jaxlaunch.runs.layout import JOB, LOCK, SUMMARY
from jaxlaunch.runs.run_folder import RunFolder

_STEPS = ("train", "steps")
KILLED = "killed"  # of a run that says it goes on, while no launcher holds its folder


@dataclasses.dataclass(frozen=True)
class Brief:
    """A run in a table."""

    name: str
    folder: Path
    state: str  # of Summary.status, or KILLED
    why: str  # the message of its verdict; empty while it runs
    code: int | None
    step: int | None
    steps: int | None  # of the job; None: not known without computing it
    goodput: float | None
    restarts: int
    began: float | None  # Unix time of its first start
    at: float | None  # when this was true
    owner: str


def folders(below: Path) -> Iterator[Path]:
    """The run folders in `below`, by name; links are not followed, so that nothing elsewhere is read."""
    try:
        with os.scandir(below) as found:
            names = sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names:
        if is_run(below / name):
            yield below / name


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's."""
    return os.path.lexists(folder / SUMMARY) or os.path.lexists(folder / LOCK)


def brief(folder: Path) -> Brief:
    """The row of a run. What its files do not say, or say wrongly, is left out."""
    found = RunFolder(folder, _quiet).row()
    if found is None:
        state = "running" if is_held(folder) else "unknown"
        return Brief(folder.name, folder, state, "", None, None, None, None, 0, None, None, _owner(folder))
    state, of, verdict = found.status, found.of, found.verdict
    if verdict is None and not is_held(folder):
        state = KILLED
    return Brief(
        folder.name,
        folder,
        state,
        "" if verdict is None else verdict.message,
        None if verdict is None else verdict.code,
        found.step,
        _steps(folder),
        summary.ratio(found.seconds),
        history.restart_count(0 if of is None else of.generation, found.restarts),
        found.starts[0].started if found.starts else None if of is None else of.started,
        None if of is None else of.at,
        _owner(folder),
    )


def read_summary(folder: Path) -> Summary | None:
    """What summary.json of a run says; None where it is not there, or none of ours."""
    return RunFolder(folder, _quiet).summary()


def _quiet(message: str) -> None:
    """What cannot be read is shown as not known."""


def is_held(folder: Path) -> bool:
    """Whether a launcher, or agents that outlived it, hold the run's lock."""
    try:
        with open(folder / LOCK, "rb", opener=regular_files.beneath(folder)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _steps(folder: Path) -> int | None:
    try:
        text = regular_files.read(folder / JOB, reader.MAX_BYTES, below=folder)
    except OSError:
        return None
    return numbers.of(text.decode(errors="replace"), [_STEPS]).get(_STEPS)


def _owner(folder: Path) -> str:
    try:
        return _user(folder.stat().st_uid)
    except (OSError, KeyError):
        return ""


@functools.cache
def _user(uid: int) -> str:
    """The name of a user. Raises KeyError where there is none."""
    return pwd.getpwuid(uid).pw_name
