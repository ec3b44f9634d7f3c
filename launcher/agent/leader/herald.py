"""What host 0 says in its pod's log, for readers of the Kubernetes API, and when. See launcher.agent.words."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.agent import history, words
from launcher.agent.history import Record
from launcher.agent.memory import Memory
from launcher.agent.progress import Status
from launcher.agent.verdict import Verdict

PAST = 3  # attempts that are told of one by one
CHANGE_S, BEAT_S = 2.0, 15.0  # a change is told at most this often; nothing new, this often
LOOP = frozenset({"step", "data", "eval", "save"})  # phases of a run that goes well: news only by the clock


@dataclasses.dataclass(frozen=True)
class View:
    """How the gang stands, as the leader knows it now."""

    stage: str
    attempt: int
    missing: Sequence[int]
    refused: Sequence[str]
    step: int | None
    committed: int | None
    statuses: Mapping[int, Status]
    overdue: str | None
    seconds: Mapping[str, float]
    restarts: Mapping[str, int]
    metrics: Mapping[str, Any] | None


class Herald:
    """`speak` takes a line; None where nobody reads our words: outside of a pod."""

    def __init__(self, generation: int, speak: Callable[[str], None] | None) -> None:
        self._generation, self._speak = generation, speak
        self._looked_at = self._told_at = float("-inf")
        self._told: Any = None  # what of the last beat would be news
        self._phase: Any = None
        self._phase_since = time.time()
        self._committed: int | None = None
        self._committed_at: float | None = None

    def begin(self, records: Sequence[Record], memory: Memory, processes: int) -> None:
        """Tells of the pods before, and gives the ends of their logs, which nobody else can read any more.

        A job that was suspended comes again in new pods of the same generation.
        """
        if self._speak is None or not (self._generation or records):
            return
        self._committed = max((one.last_committed for one in records if one.last_committed is not None), default=None)
        last, failing = (records[-1].attempt, records[-1].rank) if records else (0, None)
        before = records[-1].generation if records else self._generation - 1
        self._say("past", last, ends=history.ends_by_cause(records), attempts=len(records), unknown=memory.gap)
        for one in records[-PAST:]:
            told = {name: getattr(one, name) for name in ("verdict", "seconds", "first_committed", "last_committed")}
            self._say("past", one.attempt, one.generation, **told, ended=one.ended)
        for rank, lines in memory.tails(sorted(range(processes), key=lambda rank: rank != failing)):
            self._say("tail", last, before, rank=rank, lines=lines)

    def look(self, view: Callable[[], View], now: float, is_news: bool = False) -> None:
        """Tells how the gang stands, if something changed or nothing was told for long; `now` in monotonic seconds."""
        is_due = is_news or now - self._told_at >= BEAT_S
        if self._speak is None or not (is_due or now - self._looked_at >= CHANGE_S):
            return
        self._looked_at, seen = now, view()
        phases = _phases(seen.statuses)
        phase = max(phases, key=lambda name: len(phases[name]), default=None)
        self._note(seen, phase)
        stand = (seen.stage, seen.attempt, tuple(seen.missing), seen.overdue, "loop" if phase in LOOP else phase)
        if stand == self._told and not is_due:
            return
        self._told, self._told_at = stand, now
        self._say("beat", seen.attempt, **self._beat(seen, phase, phases))

    def judged(self, verdict: Verdict, attempt: int) -> None:
        self._say("verdict", attempt, verdict=verdict.to_json())

    def _note(self, seen: View, phase: str | None) -> None:
        """Remembers since when things are as they are."""
        if (seen.attempt, phase) != self._phase:
            self._phase, self._phase_since = (seen.attempt, phase), time.time()
        if seen.committed is not None and seen.committed > (-1 if self._committed is None else self._committed):
            self._committed, self._committed_at = seen.committed, time.time()

    def _beat(self, seen: View, phase: str | None, phases: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        return {
            "stage": seen.stage,
            "missing": list(seen.missing[: words.MAX_LISTED]),
            "missing_count": len(seen.missing),
            "refused": list(seen.refused),
            "step": seen.step,
            "phase": phase,
            "since": round(self._phase_since, 1),
            "phases": {name: list(ranks[: words.MAX_LISTED]) for name, ranks in phases.items()},
            "counts": {name: len(ranks) for name, ranks in phases.items()},
            "committed": self._committed,
            "committed_at": self._committed_at and round(self._committed_at, 1),
            "seconds": {cause: round(spent, 1) for cause, spent in seen.seconds.items() if spent},
            "restarts": dict(seen.restarts),
            "overdue": seen.overdue,
            "metrics": seen.metrics,
        }

    def _say(self, kind: str, attempt: int, generation: int | None = None, **said: Any) -> None:
        if self._speak is not None:
            of = self._generation if generation is None else generation
            self._speak(words.word(kind, {"at": round(time.time(), 1), "attempt": attempt, "generation": of, **said}))


def _phases(statuses: Mapping[int, Status]) -> dict[str, list[int]]:
    """The ranks in each phase; those that never said one are in "unsaid", those that ended in "ended"."""
    found: dict[str, list[int]] = {}
    for rank in sorted(statuses):
        status = statuses[rank]
        found.setdefault("ended" if status.exit is not None else status.phase or "unsaid", []).append(rank)
    return found
