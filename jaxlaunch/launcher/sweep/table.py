"""The folder of a sweep: a folder for each run, and JSON lines with their states.

This module also has the rule that stops runs early. A rung is a number of steps, and the value of a
run there is the first value of its metric from that step on. When every run has a value, or has
ended, the worse half is stopped: of five runs the worst two. A run that ended without a value there
is not counted.
"""

from __future__ import annotations

import enum
import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.wording import os_error_reason
from jaxlaunch.runs import layout
from jaxlaunch.runs.layout import SWEEP

# The lock held by the launcher that leads the sweep.
LOCK = ".sweep"
_MAX_BYTES = 64 << 20


class RunState(enum.StrEnum):
    """The state of a run of a sweep. The values are in the table."""

    WAITING = "waiting"
    RUNNING = "running"
    # The run waits for the others at a rung.
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    # The same command continues the run.
    STOPPED = "stopped"
    # The run was stopped early.
    CUT = "cut"
    # The run is a job on a cluster.
    SUBMITTED = "submitted"


@dataclass
class Standing:
    """The progress of a run: its value at each rung that it has reached."""

    # Whether the run ended by itself: done, failed, or stopped by somebody else.
    is_over: bool = False
    values: dict[int, float] = field(default_factory=dict)  # by the number of the rung
    # The rung at which the run was stopped early.
    cut_rung: int | None = None


def count_decided(standings: Mapping[str, Standing], rungs: int) -> int:
    """Return the number of decided rungs, at which every remaining run has a value or is over."""
    for rung in range(rungs):
        remaining = _remaining_runs(standings, rung).values()
        if any(not standing.is_over and rung not in standing.values for standing in remaining):
            return rung
    return rungs


def find_worse_half(
    standings: Mapping[str, Standing], rung: int, *, is_higher_better: bool
) -> Collection[str]:
    """Return the runs to stop at a decided rung; of equal ones, the later."""
    remaining = _remaining_runs(standings, rung).items()
    values = {name: run.values[rung] for name, run in remaining if rung in run.values}
    order = sorted(values, key=lambda name: -values[name] if is_higher_better else values[name])
    return order[len(order) - len(order) // 2 :]


def _remaining_runs(standings: Mapping[str, Standing], rung: int) -> Mapping[str, Standing]:
    """Return the runs that no earlier rung stopped."""
    return {
        name: standing
        for name, standing in standings.items()
        if standing.cut_rung is None or standing.cut_rung >= rung
    }


@dataclass
class Member:
    """A run of a sweep."""

    name: str
    folder: Path
    # Overrides that distinguish the run from the others.
    changes: list[str]
    # The digest of its job.
    job: str
    state: RunState = RunState.WAITING
    note: str = ""
    standing: Standing = field(default_factory=Standing)


class SweepTable:
    """The states of the runs of a sweep. Changes are appended to the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Settings of all runs: the metric, its direction, the cluster.
        self.settings: Mapping[str, Any] = {}
        self.members: dict[str, Member] = {}
        try:
            text = regular_files.read_bounded(folder / SWEEP, _MAX_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(
                f"The table of the sweep in {folder} cannot be read: {os_error_reason(error)}."
            ) from None
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                self._apply_row(row)

    def record_sweep(self, settings: Mapping[str, Any], members: Mapping[str, Member]) -> None:
        """Record the settings of the sweep, and its new runs.

        Raises UserError if the folder has a sweep of other jobs, which could not be compared with
        these.
        """
        hint = "give it another name with --name, or remove the folder."
        if layout.is_run(self.folder):
            raise UserError(f"{self.folder} is the folder of a run, not of a sweep.", hint)
        for name, member in members.items():
            if name in self.members and self.members[name].job != member.job:
                old, new = (" ".join(run.changes) for run in (self.members[name], member))
                difference = (
                    f"{old}, now {new}" if old != new else f"{old}; its job has other keys now"
                )
                message = (
                    f"The sweep in {self.folder} began with other jobs: {name} has {difference}."
                )
                raise UserError(message, hint)
        if dict(self.settings) != settings:
            self._append_row(settings)
        for name, member in members.items():
            if name not in self.members:
                row = {"run": name, "set": member.changes, "job": member.job}
                self._append_row({**row, "state": member.state})

    def record_state(self, member: Member, state: RunState, note: str = "", **fields: Any) -> None:
        """Record a new state of a run."""
        note_field = {"note": note} if note else {}
        self._append_row({"run": member.name, "state": state, **note_field, **fields})

    def _append_row(self, row: Mapping[str, Any]) -> None:
        text = json.dumps({**row, "time": round(time.time(), 3)}) + "\n"
        with open(self.folder / SWEEP, "ab+", opener=regular_files.open_regular) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                # A line that a kill has cut stays on its own line.
                text = text if file.read(1) == b"\n" else "\n" + text
            file.write(text.encode())
        self._apply_row(json.loads(text))

    def _apply_row(self, row: Mapping[str, Any]) -> None:
        if "run" not in row:
            self.settings = {key: value for key, value in row.items() if key != "time"}
            return
        name = str(row["run"])
        if "set" in row:
            self.members[name] = Member(name, self.folder / name, list(row["set"]), str(row["job"]))
        if (member := self.members.get(name)) is None:
            return
        member.state = RunState(row.get("state", member.state))
        member.note = str(row.get("note", ""))
        if "rung" in row and "value" in row:
            member.standing.values[int(row["rung"])] = float(row["value"])
        if member.state is RunState.CUT:
            member.standing.cut_rung = int(row["rung"])
