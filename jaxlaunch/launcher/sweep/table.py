"""The folder of a sweep: its runs are folders in it, and a file of JSON lines says what became of each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.sweep.halving import Standing
from jaxlaunch.runs import catalog
from jaxlaunch.runs.layout import SWEEP

LOCK = ".sweep"  # held by the launcher that leads the sweep
_MAX_BYTES = 64 << 20


@dataclass
class Member:
    """A run of a sweep."""

    name: str
    folder: Path
    changes: list[str]  # overrides that make it differ from the others
    job: str  # a digest of its job
    state: str = "waiting"
    note: str = ""
    standing: Standing = field(default_factory=Standing)


class Table:
    """What is known of the runs of a sweep; what changes is appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of: Mapping[str, Any] = {}  # what holds for all of them: the metric, its direction, the cluster
        self.members: dict[str, Member] = {}
        for row in self._rows():
            self._take(row)

    def begin(self, of: Mapping[str, Any], members: Mapping[str, Member]) -> None:
        """Notes the sweep and those of its runs that are new.

        Raises UserError where the folder has a sweep of other jobs, which could not be compared with these.
        """
        hint = "give it another name with --name, or remove the folder."
        if catalog.is_run(self.folder):
            raise UserError(f"{self.folder} is the folder of a run, not of a sweep.", hint)
        for name, member in members.items():
            if name in self.members and self.members[name].job != member.job:
                was, now = (" ".join(one.changes) for one in (self.members[name], member))
                what = f"{was}, now {now}" if was != now else f"{was}; its job has other keys now"
                raise UserError(f"The sweep in {self.folder} began with other jobs: {name} has {what}.", hint)
        if dict(self.of) != of:
            self._append(of)
        for name, member in members.items():
            if name not in self.members:
                self._append({"run": name, "set": member.changes, "job": member.job, "state": member.state})

    def note(self, member: Member, state: str, note: str = "", **more: Any) -> None:
        """Notes that a run is in another state."""
        self._append({"run": member.name, "state": state, **({"note": note} if note else {}), **more})

    def _append(self, row: Mapping[str, Any]) -> None:
        text = json.dumps({**row, "time": round(time.time(), 3)}) + "\n"
        with open(self.folder / SWEEP, "ab+", opener=regular_files.opener) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else "\n" + text  # a line that was cut by a kill stays alone
            file.write(text.encode())
        self._take(json.loads(text))

    def _rows(self) -> list[Any]:
        try:
            text = regular_files.read(self.folder / SWEEP, _MAX_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UserError(f"The table of the sweep in {self.folder} cannot be read: {why}.") from None
        return [row for line in text.splitlines() if isinstance(row := _parsed(line), dict)]

    def _take(self, row: Mapping[str, Any]) -> None:
        if "run" not in row:
            self.of = {key: value for key, value in row.items() if key != "time"}
            return
        name = str(row["run"])
        if "set" in row:
            self.members[name] = Member(name, self.folder / name, list(row["set"]), str(row["job"]))
        if (member := self.members.get(name)) is None:
            return
        member.state, member.note = str(row.get("state", member.state)), str(row.get("note", ""))
        if "rung" in row and "value" in row:
            member.standing.values[int(row["rung"])] = float(row["value"])
        if member.state == "cut":
            member.standing.cut = int(row["rung"])


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
