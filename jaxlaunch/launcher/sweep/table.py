"""The folder of a sweep: a folder for each run, and a file of JSON lines with their states.

This module also has the rule that stops runs early (successive halving). A rung is a number of
steps, and the value of a run at a rung is the first value of its metric at or after that step. A
rung is decided when every remaining run has a value or has ended. Then the worse half of the runs
with a value is stopped, rounded down: of five runs the worst two.
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

# The lock of the launcher that runs the sweep.
LOCK = ".sweep"
_MAX_BYTES = 64 << 20


class RunState(enum.StrEnum):
    """State of a run of a sweep, as the file has it."""

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
    """Progress of a run through the rungs."""

    # Whether the run ended by itself: done, failed, or stopped by somebody else.
    is_over: bool = False
    # The value at each rung, by the number of the rung.
    values: dict[int, float] = field(default_factory=dict)
    # The rung at which the run was stopped early.
    cut_rung: int | None = None


def count_decided(standings: Mapping[str, Standing], rung_count: int) -> int:
    """Return the number of decided rungs, at which every remaining run has a value or is over."""
    for rung in range(rung_count):
        remaining = _remaining_runs(standings, rung).values()
        if any(not standing.is_over and rung not in standing.values for standing in remaining):
            return rung
    return rung_count


def find_worse_half(
    standings: Mapping[str, Standing], rung: int, *, is_higher_better: bool
) -> Collection[str]:
    """Return the names of the runs to stop at a decided rung. Of equal runs, the later is worse."""
    remaining = _remaining_runs(standings, rung).items()
    values = {
        name: standing.values[rung] for name, standing in remaining if rung in standing.values
    }
    ranked = sorted(values, key=lambda name: -values[name] if is_higher_better else values[name])
    return ranked[len(ranked) - len(ranked) // 2 :]


def _remaining_runs(standings: Mapping[str, Standing], rung: int) -> Mapping[str, Standing]:
    """Return the runs that were not stopped at an earlier rung."""
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
    job_digest: str
    state: RunState = RunState.WAITING
    note: str = ""
    standing: Standing = field(default_factory=Standing)


class SweepTable:
    """Settings and runs of a sweep, read from its file. Changes are appended to the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The name of the sweep, its metric and mode, and the cluster.
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

        Raises UserError if the folder has a sweep of other jobs, because their runs could not be
        compared.
        """
        hint = "give it another name with --name, or remove the folder."
        if layout.is_run(self.folder):
            raise UserError(f"{self.folder} is the folder of a run, not of a sweep.", hint)
        for name, member in members.items():
            if name in self.members and self.members[name].job_digest != member.job_digest:
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
                row = {"run": name, "set": member.changes, "job": member.job_digest}
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
                # A line that was cut off by a kill stays on its own line.
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
