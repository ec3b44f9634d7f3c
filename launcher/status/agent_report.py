"""What the agents said of a run: the words of host 0's log and the last words of every pod, folded. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from launcher.agent.clock import ratio
from launcher.agent.verdict import Verdict
from launcher.hosts import Host
from trainer import contract

Word = tuple[str, Mapping[str, Any]]  # a kind of launcher.agent.words, and what it says


@dataclasses.dataclass(frozen=True)
class Ended:
    """An attempt that ended: how, which it was, and when."""

    verdict: Verdict
    attempt: int
    generation: int
    at: float | None = None  # Unix time

    @property
    def title(self) -> str:
        """ "attempt 3 of generation 1: hang (82): rank 1 …"."""
        code = f"{self.verdict.cause} ({self.verdict.code})"
        return f"attempt {self.attempt} of generation {self.generation}: {code}: {self.verdict.message}"


@dataclasses.dataclass(frozen=True)
class Testimony:
    """All of it is None or empty where nothing was said, or where it could not be read."""

    beat: Mapping[str, Any] | None = None  # the newest, of these pods
    verdict: Ended | None = None  # on the pods that are here, if they have ended or are about to
    before: tuple[Ended, ...] = ()  # earlier attempts that are known, the last one last
    ends: Mapping[str, int] | None = None  # attempts that ended, by cause
    attempts: int = 0
    unknown: str | None = None  # what no one can know, in a sentence

    @property
    def last(self) -> Ended | None:
        """The newest verdict there is."""
        return self.verdict or (self.before[-1] if self.before else None)

    @property
    def stage(self) -> str | None:
        return None if self.beat is None or self.verdict is not None else self.beat.get("stage")

    @property
    def missing(self) -> list[int]:
        """Hosts that the leader waits for, the first of them."""
        return list(self.beat.get("missing", ())) if self.beat is not None and self.stage == "gather" else []

    @property
    def step(self) -> int | None:
        """Steps that are complete."""
        for said in (self.verdict and self.verdict.verdict.step, self.beat and self.beat.get("step")):
            if isinstance(said, int):
                return said
        return None

    @property
    def committed(self) -> int | None:
        """The newest step that is safe on storage."""
        return None if self.beat is None else self.beat.get("committed")

    @property
    def committed_at(self) -> datetime | None:
        at = None if self.beat is None else self.beat.get("committed_at")
        return None if at is None else datetime.fromtimestamp(at, UTC)

    @property
    def goodput(self) -> float | None:
        """The share of all seconds that went into steps that count."""
        seconds = None if self.beat is None else self.beat.get("seconds")
        return None if not seconds else ratio({"step": 0.0, **seconds})


def fold(words: Sequence[Word], hosts: Sequence[Host]) -> Testimony:
    """What is known by the words of the leader of `hosts` and by their pods' last words."""
    spoken = sorted(words, key=lambda word: word[1].get("at", 0.0))
    generation = hosts[0].generation if hosts else 0
    beats = [said for kind, said in spoken if kind == "beat" and said.get("generation") == generation]
    judged = [_ended(said) for kind, said in spoken if kind == "verdict" or (kind == "past" and said.get("verdict"))]
    beat = _newest_beat(beats, spoken, generation)
    farewells = [_ended(said) for host in hosts if (said := host.farewell) is not None]
    verdict = _verdict(farewells, judged, beat, hosts)
    before = {one.attempt: one for one in judged if verdict is None or one.attempt < verdict.attempt}
    ends, attempts, unknown = _counts(spoken, judged)
    return Testimony(beat, verdict, tuple(before[number] for number in sorted(before)), ends, attempts, unknown)


def _newest_beat(
    beats: Sequence[Mapping[str, Any]], spoken: Sequence[Word], generation: int
) -> Mapping[str, Any] | None:
    """The last beat; what a verdict says of steps and commits is newer than what the beat before it said."""
    if not beats:
        return None
    newest = dict(beats[-1])
    for kind, said in spoken:
        if kind == "verdict" and said.get("generation") == generation and said.get("at", 0.0) >= newest.get("at", 0.0):
            newest |= {name: said[name] for name in ("step", "committed") if said.get(name) is not None}
    return newest


def _ended(said: Mapping[str, Any]) -> Ended:
    at = said.get("ended", said.get("at"))
    return Ended(Verdict.from_json(said["verdict"]), said.get("attempt", 0), said.get("generation", 0), at)


def _verdict(
    farewells: Sequence[Ended], judged: Sequence[Ended], beat: Mapping[str, Any] | None, hosts: Sequence[Host]
) -> Ended | None:
    """The verdict that ends these pods. Host 0's agent decided it; one that lost its leader says less."""
    if farewells:
        return max(farewells, key=lambda one: (one.attempt, one.verdict.code != contract.LOST))
    generation = hosts[0].generation if hosts else 0
    of_these = [one for one in judged if one.generation == generation]
    running = beat is not None and of_these and beat.get("attempt", 0) > of_these[-1].attempt
    leader_ended = bool(hosts) and hosts[0].number == 0 and hosts[0].has_ended
    return of_these[-1] if of_these and leader_ended and not running else None


def _counts(spoken: Sequence[Word], judged: Sequence[Ended]) -> tuple[Mapping[str, int] | None, int, str | None]:
    """Attempts that ended by cause, how many, and what is not known of them. A beat counts what the first words do."""
    summary = next((said for kind, said in reversed(spoken) if kind == "past" and not said.get("verdict")), None)
    beat = next((said for kind, said in reversed(spoken) if kind == "beat"), None)
    unknown = None if summary is None else summary.get("unknown")
    if beat is not None and "restarts" in beat:
        return beat["restarts"], sum(beat["restarts"].values()), unknown
    if summary is not None:
        return summary.get("ends", {}), int(summary.get("attempts", 0)), unknown
    return None, len(judged), unknown
