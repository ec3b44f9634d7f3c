"""When host 0 writes a line for programs to its pod's log, and what is in it. See jaxlaunch/records/log_lines."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.records import log_lines
from jaxlaunch.records.attempt import Record, furthest
from jaxlaunch.records.log_lines import Beat, Judged, Line, Past, Tail
from jaxlaunch.records.members import Members, from_wire
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history
from jaxlaunch.runs.run_folder import RunFolder

PAST = 3  # attempts that have a line each
CHANGE_S, BEAT_S = 2.0, 15.0  # a line at most this often after changes; this often without
LOOP = frozenset({"step", "data", "eval", "save"})  # of the training loop: to go from one to another is no change


@dataclasses.dataclass(frozen=True)
class View:
    """The state of all hosts, as the leader knows it now."""

    stage: str
    attempt: int
    members: str  # which hosts hold ranks, as jaxlaunch/records/members writes them
    missing: Sequence[int]
    refused: Sequence[str]
    step: int | None
    committed: int | None
    statuses: Sequence[Status]  # of every rank
    overdue: str | None
    seconds: Mapping[str, float]
    restarts: Mapping[str, int]
    preempted: int | None  # preemptions in a row without a newly committed step; None: not known
    metrics: Mapping[str, Any] | None
    restart: Mapping[str, float]  # seconds until the first step of the attempt, by cause


class PodLog:
    """Writes the lines by `write`; None outside of a pod, where no program reads them."""

    def __init__(self, generation: int, write: Callable[[str], None] | None) -> None:
        self._generation, self._write = generation, write
        self._told = -1  # attempts whose past is written
        self._looked_at = self._beat_at = float("-inf")
        self._beat_state: Any = None  # of the last beat: a change of it is written early
        self._phase: Any = None
        self._phase_since = time.time()
        self._committed: int | None = None
        self._committed_at: float | None = None

    def begin(self, records: Sequence[Record], run_folder: RunFolder, start: int, each: int, processes: int) -> None:
        """Writes the attempts of earlier pods, and the ends of their logs, which were deleted with them.

        Each host holds `each` of at most `processes` ranks.

        A job that was suspended gets new pods of the same generation.
        """
        if self._write is None or not (self._generation or records) or self._told == len(records):
            return
        self._told = len(records)
        self._committed = furthest(*(one.last_committed for one in records))
        last, failing = (records[-1].attempt, records[-1].rank) if records else (0, None)
        before = records[-1].generation if records else self._generation - 1
        ends = history.restarts_by_cause(records, last + 1)
        self._log(Past(**self._about(last), ends=ends, attempts=len(records), unknown=run_folder.gap))
        for one in records[-PAST:]:
            fields = {name: getattr(one, name) for name in ("verdict", "seconds", "first_committed", "last_committed")}
            self._log(Past(**self._about(one.attempt, one.generation), **fields, ended=one.ended))
        held = _members(records[-1], each, processes) if records else None
        for rank, lines in run_folder.tails(start, sorted(range(processes), key=lambda rank: rank != failing)):
            host = None if held is None else held.host(rank)
            self._log(Tail(**self._about(last, before), rank=rank, lines=lines, host=host))

    def look(self, read: Callable[[], View], now: float, is_news: bool = False) -> None:
        """Writes a beat, if something changed or BEAT_S have passed; `now` in monotonic seconds."""
        is_due = is_news or now - self._beat_at >= BEAT_S
        if self._write is None or not (is_due or now - self._looked_at >= CHANGE_S):
            return
        self._looked_at, view = now, read()
        phases = _phases(view.statuses)
        phase = max(phases, key=lambda name: len(phases[name]), default=None)
        self._track(view, phase)
        of = (view.stage, view.attempt, view.members, tuple(view.missing))
        state = (*of, view.overdue, "loop" if phase in LOOP else phase)
        if state == self._beat_state and not is_due:
            return
        self._beat_state, self._beat_at = state, now
        self._log(self._beat(view, phase, phases))

    def judged(self, verdict: Verdict, attempt: int) -> None:
        """Writes the verdict on an attempt."""
        self._log(Judged(**self._about(attempt), verdict=verdict))

    def _track(self, view: View, phase: str | None) -> None:
        """Notes when the phase and the newest committed step last changed."""
        if (view.attempt, phase) != self._phase:
            self._phase, self._phase_since = (view.attempt, phase), time.time()
        if view.committed is not None and view.committed > (-1 if self._committed is None else self._committed):
            self._committed, self._committed_at = view.committed, time.time()

    def _beat(self, view: View, phase: str | None, phases: Mapping[str, Sequence[int]]) -> Beat:
        return Beat(
            **self._about(view.attempt),
            stage=view.stage,
            members=view.members,
            missing=view.missing[: log_lines.MAX_LISTED],
            missing_count=len(view.missing),
            refused=view.refused,
            step=view.step,
            phase=phase,
            since=round(self._phase_since, 1),
            phases={name: ranks[: log_lines.MAX_LISTED] for name, ranks in phases.items()},
            counts={name: len(ranks) for name, ranks in phases.items()},
            committed=self._committed,
            committed_at=self._committed_at and round(self._committed_at, 1),
            seconds={cause: round(spent, 1) for cause, spent in view.seconds.items() if spent},
            restarts=view.restarts,
            preempted=view.preempted,
            overdue=view.overdue,
            metrics=view.metrics,
            restart=view.restart,
        )

    def _about(self, attempt: int, generation: int | None = None) -> dict[str, Any]:
        of = self._generation if generation is None else generation
        return {"at": round(time.time(), 1), "attempt": attempt, "generation": of}

    def _log(self, line: Line) -> None:
        if self._write is not None:
            self._write(log_lines.line(line))


def _members(of: Record, each: int, most: int) -> Members | None:
    """Which hosts held the ranks of an attempt, where others did than their indexes say."""
    return None if of.members is None else from_wire(of.members, each, most)


def _phases(statuses: Sequence[Status]) -> dict[str, list[int]]:
    """The ranks in each phase; "unsaid" has those without a report, "ended" those whose process has ended."""
    found: dict[str, list[int]] = {}
    before = None
    for rank, status in enumerate(statuses):
        if status is not before:  # the ranks of a host mostly have the same
            ranks = found.setdefault("ended" if status.exit is not None else status.phase or "unsaid", [])
            before = status
        ranks.append(rank)
    return found
