"""Begins a start of a run on this machine: what the last one left is settled, and this one has a folder and a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.launcher.local import ending, orphans
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.records.summary import Start
from jaxlaunch.runs.layout import JOB
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import Starts, changed_keys, rows


def begin(folder: Path, uid: str, resolved: str, checkpoints: Path | None, say: Callable[[str], None]) -> None:
    """Begins start `uid` of the run in `folder`, of the job that is `resolved` as YAML.

    A kill at any point leaves a folder from which the next start begins: `summary.json` is replaced last.
    """
    run = RunFolder(folder, say)
    if before := rows(run.summary()):
        orphans.end(before[-1].uid)  # of agents that were killed: they would write beside this run's
    ending.close(run, checkpoints)
    starts = Starts(run, uid)
    run.replace(starts.path(JOB), resolved.encode())
    job, compared = reader.parse(resolved, JOB).data, starts.compared
    changed = {} if compared is None else dict(changed_keys("", _job(folder, compared), job))
    starts.begin(changed, ending.newest_step(checkpoints))


def standing(folder: Path) -> int | None:
    """The step at which earlier starts left the run, where the newest one trained nothing; None where it did."""
    found = rows(RunFolder(folder).summary())
    if not found or found[-1].has_trained:
        return None
    return next((row.last_step for row in reversed(found) if row.has_trained), None)


def _job(folder: Path, start: Start) -> Any:
    """The job of a start as plain data; empty where it cannot be read."""
    try:
        text = regular_files.read(folder / "starts" / str(start.start) / JOB, reader.MAX_BYTES)
    except OSError:
        return {}
    return reader.parse(text.decode(errors="replace"), JOB).data
