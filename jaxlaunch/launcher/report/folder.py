"""The runs below a folder, each in one row: what a table of them shows. No more than two files of a run are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxlaunch import regular_files
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.records import summary
from jaxlaunch.runs import catalog, history
from jaxlaunch.runs.layout import JOB
from jaxlaunch.runs.lock import find_holder
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


def brief(folder: Path) -> Brief:
    """The row of a run. What its files do not say, or say wrongly, is left out."""
    found, owner = RunFolder(folder).row(), catalog.owner_name(folder) or ""
    if found is None:
        state = "running" if _is_held(folder) else "unknown"
        return Brief(folder.name, folder, state, "", None, None, None, None, 0, None, None, owner)
    state, of, verdict = found.status, found.of, found.verdict
    if verdict is None and not _is_held(folder):
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
        owner,
    )


def _steps(folder: Path) -> int | None:
    try:
        text = regular_files.read(folder / JOB, reader.MAX_BYTES, below=folder)
    except OSError:
        return None
    return reader.whole_numbers(text.decode(errors="replace"), [_STEPS]).get(_STEPS)


def _is_held(folder: Path) -> bool:
    try:
        return find_holder(folder) is not None
    except OSError:
        return False
