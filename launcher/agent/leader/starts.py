"""The starts of a run: each keeps its record in starts/K of the run folder, which no later start changes.

summary.json of the run folder is that of the newest start, with a row for every start. job.yaml beside it is the job of
the newest start that trained: the one that the checkpoints are of.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.leader.run_folder import RunFolder
from jaxlaunch.launcher.agent.leader.summary import FILE, Summary, stored

JOB, LOGS = "job.yaml", "logs"


@dataclasses.dataclass(frozen=True)
class Start:
    """A row of summary.json: what a start of the run trained."""

    start: int  # K, from 1
    uid: str
    started: float  # in Unix time, as `ended`
    ended: float | None = None
    code: int | None = None  # None while it goes on, or where it was killed before its agents began
    first_step: int | None = None  # that it trained; None: none
    last_step: int | None = None  # at which it ended
    changed: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)  # since one trained; key: then, now

    @property
    def has_trained(self) -> bool:
        """Whether it trained a step, or is a program that finished without telling of steps."""
        return self.first_step is not None or (self.code == contract.DONE and self.last_step is None)

    def after(self, summary: Summary) -> Start:
        """The row when the start has got as far as `summary` says."""
        code = None if summary.verdict is None else summary.verdict.code
        first = None if summary.of is None else summary.of.first_step
        has_stepped = first is not None and summary.step is not None and summary.step >= first
        is_known = has_stepped or self.first_step is None  # else it is restoring what it trained before
        return dataclasses.replace(
            self,
            ended=time.time() if code is not None else None,
            code=code,
            first_step=first if has_stepped and self.first_step is None else self.first_step,
            last_step=(summary.step or None) if is_known else self.last_step,
        )


class Starts:
    """The rows of a run, the last of which is that of start `uid`, and its files."""

    def __init__(self, folder: RunFolder, uid: str) -> None:
        """Begins a start where `uid` is new here; the record of the one before is in its folder then."""
        found = stored(folder)
        self._folder, self._has_job = folder, False
        self._rows = rows(found) or [_row(number, stored(folder, _path(number, FILE))) for number in folder.starts()]
        if found and "starts" not in found:  # a run folder of version 0.1: all that it did is start 1
            folder.move(LOGS, _path(1, LOGS))
            folder.copy(JOB, _path(1, JOB))
        if self._rows and self._rows[-1].uid == uid:
            return
        if found and self._rows:
            self._keep(found, self._rows[-1].start)
        last = max((row.start for row in self._rows), default=0)
        self._rows.append(Start(last + 1, uid, started=time.time()))

    @property
    def number(self) -> int:
        """K of this start."""
        return self._rows[-1].start

    @property
    def earlier(self) -> Sequence[Start]:
        """The rows of the starts before this one."""
        return self._rows[:-1]

    def begin(self, changed: Mapping[str, Sequence[Any]]) -> None:
        """Puts the row of this start on storage, before its agents begin."""
        self._rows[-1] = dataclasses.replace(self._rows[-1], changed=changed)
        if not any(row.has_trained for row in self.earlier):
            self._folder.copy(self.path(JOB), JOB)
        self.write(Summary(None, step=None, seconds={}, restarts={}))

    def write(self, summary: Summary) -> None:
        """Replaces summary.json of the run, and at its end that of the start."""
        self._rows[-1] = self._rows[-1].after(summary)
        if self._rows[-1].has_trained and not self._has_job:
            self._folder.copy(self.path(JOB), JOB)
            self._has_job = True
        fields = summary.to_json()
        if summary.verdict is not None:
            self._folder.write(self.path(FILE), fields)
        self._folder.write(FILE, {**fields, "starts": [dataclasses.asdict(row) for row in self._rows]})

    def path(self, name: str) -> str:
        """A file of this start, below the run folder."""
        return _path(self.number, name)

    def _keep(self, found: Mapping[str, Any], number: int) -> None:
        """Puts the record of the start before into its folder, where a kill or an earlier version did not."""
        record = {name: value for name, value in found.items() if name != "starts"}
        has_begun = found.get("of") or "starts" not in found  # else it was killed before its agents began
        if has_begun and self._folder.read(_path(number, FILE)) != record:
            self._folder.write(_path(number, FILE), record)


def rows(found: Mapping[str, Any]) -> list[Start]:
    """The starts of a run, given by the fields of its summary.json; none where there is none."""
    if not found:
        return []
    if "starts" not in found:
        return [_row(1, found)]
    return [Start(**{name: row[name] for name in _NAMES if name in row}) for row in found["starts"]]


def _row(number: int, record: Mapping[str, Any]) -> Start:
    """The row of a start, by the fields of its own summary; version 0.1 does not say where it began."""
    of, verdict = record.get("of") or {}, record.get("verdict")
    first, last = of.get("first_step", 1), record.get("step") or record.get("saved")
    return Start(
        number,
        of.get("uid", ""),
        of.get("started", 0.0),
        of.get("at"),
        None if verdict is None else verdict["code"],
        first_step=first if first is not None and last is not None and last >= first else None,
        last_step=last or None,
    )


def _path(number: int, name: str) -> str:
    return f"starts/{number}/{name}"


_NAMES = {field.name for field in dataclasses.fields(Start)}
