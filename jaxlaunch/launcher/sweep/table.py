"""The folder of a sweep: its runs are folders in it, and a file of JSON lines says what became of each.

It also has the rule that stops runs early. At a rung, a number of steps, each run has its metric's first value from
there on. When every run has one, or has ended, the worse half is stopped: of five the worst two. A run that ended
without a value there is not counted.
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
from jaxlaunch.launcher.wording import os_reason
from jaxlaunch.runs import layout
from jaxlaunch.runs.layout import SWEEP

LOCK = ".sweep"  # held by the launcher that leads the sweep
_MAX_BYTES = 64 << 20


class RunState(enum.StrEnum):
    """What a run of a sweep does; the table has the values."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"  # it waits for the others at a rung
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"  # the same command continues it
    CUT = "cut"  # stopped early
    SUBMITTED = "submitted"  # as a job on a cluster


@dataclass
class Standing:
    """How far a run is: its value at each rung that it has reached."""

    is_over: bool = False  # it ended by itself: done, failed or stopped by somebody
    values: dict[int, float] = field(default_factory=dict)  # by the number of the rung
    cut: int | None = None  # the rung at which it was stopped early


def count_decided(standings: Mapping[str, Standing], rungs: int) -> int:
    """Return how many rungs are decided: at each of them every run that got there has a value or is over."""
    for rung in range(rungs):
        remaining = _remaining(standings, rung).values()
        if any(not standing.is_over and rung not in standing.values for standing in remaining):
            return rung
    return rungs


def worse_half(standings: Mapping[str, Standing], rung: int, *, is_higher_better: bool) -> Collection[str]:
    """Return the runs to stop at a rung where every value is known; of equal ones the later."""
    remaining = _remaining(standings, rung)
    values = {name: standing.values[rung] for name, standing in remaining.items() if rung in standing.values}
    order = sorted(values, key=lambda name: -values[name] if is_higher_better else values[name])
    return order[len(order) - len(order) // 2 :]


def _remaining(standings: Mapping[str, Standing], rung: int) -> Mapping[str, Standing]:
    """Return the runs that no earlier rung stopped."""
    return {name: standing for name, standing in standings.items() if standing.cut is None or standing.cut >= rung}


@dataclass
class Member:
    """A run of a sweep."""

    name: str
    folder: Path
    changes: list[str]  # overrides that make it differ from the others
    job: str  # a digest of its job
    state: RunState = RunState.WAITING
    note: str = ""
    standing: Standing = field(default_factory=Standing)


class Table:
    """What is known of the runs of a sweep; changes are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of: Mapping[str, Any] = {}  # what holds for all of them: the metric, its direction, the cluster
        self.members: dict[str, Member] = {}
        try:
            text = regular_files.read(folder / SWEEP, _MAX_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"The table of the sweep in {folder} cannot be read: {os_reason(error)}.") from None
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                self._take(row)

    def begin(self, of: Mapping[str, Any], members: Mapping[str, Member]) -> None:
        """Note the sweep and those of its runs that are new.

        Raises:
            UserError: The folder has a sweep of other jobs, which could not be compared with these.
        """
        hint = "give it another name with --name, or remove the folder."
        if layout.is_run(self.folder):
            raise UserError(f"{self.folder} is the folder of a run, not of a sweep.", hint)
        for name, member in members.items():
            if name in self.members and self.members[name].job != member.job:
                before, now = " ".join(self.members[name].changes), " ".join(member.changes)
                what = f"{before}, now {now}" if before != now else f"{before}; its job has other keys now"
                raise UserError(f"The sweep in {self.folder} began with other jobs: {name} has {what}.", hint)
        if dict(self.of) != of:
            self._append(of)
        for name, member in members.items():
            if name not in self.members:
                self._append({"run": name, "set": member.changes, "job": member.job, "state": member.state})

    def note(self, member: Member, state: RunState, note: str = "", **more: Any) -> None:
        """Note that a run is in another state."""
        self._append({"run": member.name, "state": state, **({"note": note} if note else {}), **more})

    def _append(self, row: Mapping[str, Any]) -> None:
        text = json.dumps({**row, "time": round(time.time(), 3)}) + "\n"
        with open(self.folder / SWEEP, "ab+", opener=regular_files.opener) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else "\n" + text  # a line that was cut by a kill stays alone
            file.write(text.encode())
        self._take(json.loads(text))

    def _take(self, row: Mapping[str, Any]) -> None:
        if "run" not in row:
            self.of = {key: value for key, value in row.items() if key != "time"}
            return
        name = str(row["run"])
        if "set" in row:
            self.members[name] = Member(name, self.folder / name, list(row["set"]), str(row["job"]))
        if (member := self.members.get(name)) is None:
            return
        member.state, member.note = RunState(row.get("state", member.state)), str(row.get("note", ""))
        if "rung" in row and "value" in row:
            member.standing.values[int(row["rung"])] = float(row["value"])
        if member.state is RunState.CUT:
            member.standing.cut = int(row["rung"])
