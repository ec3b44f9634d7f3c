"""What the agents reported of a run: records of host 0's log and every pod's termination message, merged. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.clock import ratio
from jaxlaunch.launcher.agent.gang.progress_annotation import Recorded
from jaxlaunch.launcher.agent.gang.verdict import Verdict
from jaxlaunch.launcher.status.hosts import Host

Record = tuple[str, Mapping[str, Any]]  # a kind of launcher/agent/gang/log_lines, and its fields


@dataclasses.dataclass(frozen=True)
class AttemptEnd:
    """An attempt that ended: its verdict, which attempt it was, and when it ended."""

    verdict: Verdict
    attempt: int
    generation: int
    at: float | None = None  # Unix time

    @property
    def title(self) -> str:
        """ "attempt 3 of generation 1: hang (82): rank 1 …"."""
        return f"attempt {self.attempt} of generation {self.generation}: {self.result}: {self.verdict.message}"

    @property
    def result(self) -> str:
        """Cause and exit code: "hang (82)"."""
        return f"{self.verdict.cause} ({self.verdict.code})"


@dataclasses.dataclass(frozen=True)
class AgentReport:
    """A field is None or empty where no agent reported it, or where its report could not be read."""

    heartbeat: Mapping[str, Any] | None = None  # the newest, of these pods
    verdict: AttemptEnd | None = None  # of the pods that are here, if they have ended or are about to
    earlier: tuple[AttemptEnd, ...] = ()  # attempts before, as far as they are known, the last one last
    ends_by_cause: Mapping[str, int] | None = None  # how many attempts ended
    unknown: str | None = None  # why earlier attempts are not known, as a clause
    recorded: Recorded | None = None  # whence the heartbeat is, where no log of a leader has one

    @property
    def last(self) -> AttemptEnd | None:
        """The newest verdict there is."""
        return self.verdict or (self.earlier[-1] if self.earlier else None)

    @property
    def is_judged(self) -> bool:
        """Whether the attempt that the newest heartbeat is of has ended: its phase is no longer true."""
        last, beat = self.last, self.heartbeat or {}
        if last is None or beat.get("stage") == "gather" or beat.get("generation") != last.generation:
            return False
        return last.attempt >= int(beat.get("attempt", 0))

    @property
    def stage(self) -> str | None:
        """One of jaxlaunch.launcher.agent.gang.log_lines.STAGES while the attempt has not ended."""
        return None if self.heartbeat is None or self.verdict is not None else self.heartbeat.get("stage")

    @property
    def missing(self) -> list[int]:
        """Hosts that the leader waits for, the first of them."""
        waits = self.heartbeat is not None and self.stage == "gather"
        return list((self.heartbeat or {}).get("missing", ())) if waits else []

    @property
    def step(self) -> int | None:
        """Steps that are complete on every rank."""
        for step in (self.verdict and self.verdict.verdict.step, self.heartbeat and self.heartbeat.get("step")):
            if isinstance(step, int):
                return step
        return None

    @property
    def committed(self) -> int | None:
        """The newest step whose checkpoint is complete on storage."""
        return None if self.heartbeat is None else self.heartbeat.get("committed")

    @property
    def committed_at(self) -> datetime | None:
        """When that checkpoint was completed; None if it was before these pods started."""
        at = None if self.heartbeat is None else self.heartbeat.get("committed_at")
        return None if at is None else datetime.fromtimestamp(at, UTC)

    @property
    def preempted(self) -> int | None:
        """Preemptions in a row without a newly committed step."""
        return None if self.heartbeat is None else self.heartbeat.get("preempted")

    @property
    def goodput(self) -> float | None:
        """The share of all seconds that went into steps that count, from 0 to 1."""
        if self.recorded is not None:
            return self.recorded.goodput
        seconds = None if self.heartbeat is None else self.heartbeat.get("seconds")
        return None if not seconds else ratio({"step": 0.0, **seconds})


def merge(
    records: Sequence[Record], hosts: Sequence[Host], recorded: Recorded | None = None, *, is_over: bool = False
) -> AgentReport:
    """One report from the records of the leader of `hosts` and the termination messages of their pods.

    Where they say nothing, as after the end of these pods, `recorded` does. `is_over`: the job is done or has failed,
    so what was recorded when it was stopped is older than its end.
    """
    found = _merged(records, hosts)
    if recorded is None or found.heartbeat is not None:
        return found
    ended = [] if recorded.verdict is None else [_recorded_end(recorded, recorded.verdict)]
    is_of_last = recorded.is_end and not hosts and not (is_over and recorded.when == "stopped")
    return dataclasses.replace(
        found,
        heartbeat={
            "attempt": recorded.attempt,
            "generation": recorded.generation,
            "step": recorded.step,
            "committed": recorded.committed,
        },
        verdict=found.verdict or (ended[0] if ended and is_of_last else None),
        earlier=found.earlier or (() if is_of_last else tuple(ended)),
        ends_by_cause=found.ends_by_cause or recorded.ends,
        recorded=recorded,
    )


def _recorded_end(recorded: Recorded, verdict: Verdict) -> AttemptEnd:
    return AttemptEnd(verdict, recorded.attempt, recorded.generation, recorded.at)


def _merged(records: Sequence[Record], hosts: Sequence[Host]) -> AgentReport:
    ordered = sorted(records, key=lambda record: record[1].get("at", 0.0))
    generation = hosts[0].generation if hosts else 0
    heartbeat = _newest_heartbeat(ordered, generation)
    ends = [_end(one) for kind, one in ordered if kind == "verdict" or (kind == "past" and one.get("verdict"))]
    terminations = [_end(one) for host in hosts if (one := host.termination_report) is not None]
    verdict = _verdict(terminations, ends, heartbeat, hosts)
    earlier = {one.attempt: one for one in ends if verdict is None or one.attempt < verdict.attempt}
    by_cause, unknown = _counts(ordered)
    return AgentReport(heartbeat, verdict, tuple(earlier[number] for number in sorted(earlier)), by_cause, unknown)


def _newest_heartbeat(ordered: Sequence[Record], generation: int) -> Mapping[str, Any] | None:
    """The last heartbeat of a generation. A verdict after it has newer steps and commits than it."""
    beats = [one for kind, one in ordered if kind == "beat" and one.get("generation") == generation]
    if not beats:
        return None
    newest = dict(beats[-1])
    for kind, one in ordered:
        if kind == "verdict" and one.get("generation") == generation and one.get("at", 0.0) >= newest.get("at", 0.0):
            newest |= {name: one[name] for name in ("step", "committed") if one.get(name) is not None}
    return newest


def _end(fields: Mapping[str, Any]) -> AttemptEnd:
    at = fields.get("ended", fields.get("at"))
    verdict = Verdict.from_json(fields["verdict"])
    return AttemptEnd(verdict, fields.get("attempt", 0), fields.get("generation", 0), at)


def _verdict(
    terminations: Sequence[AttemptEnd],
    ends: Sequence[AttemptEnd],
    heartbeat: Mapping[str, Any] | None,
    hosts: Sequence[Host],
) -> AttemptEnd | None:
    """The verdict that ends these pods. Host 0's agent decided it; an agent that lost its leader knows less."""
    if terminations:
        return max(terminations, key=lambda one: (one.attempt, one.verdict.code != contract.LOST))
    generation = hosts[0].generation if hosts else 0
    of_these = [one for one in ends if one.generation == generation]
    running = heartbeat is not None and of_these and heartbeat.get("attempt", 0) > of_these[-1].attempt
    leader_ended = bool(hosts) and hosts[0].number == 0 and hosts[0].has_ended
    return of_these[-1] if of_these and leader_ended and not running else None


def _counts(ordered: Sequence[Record]) -> tuple[Mapping[str, int] | None, str | None]:
    """Attempts that ended by cause, and why they are not known. A heartbeat counts what the first record does too."""
    newest_first = ordered[::-1]
    summary = next((one for kind, one in newest_first if kind == "past" and not one.get("verdict")), None)
    beat = next((one for kind, one in newest_first if kind == "beat"), None)
    unknown = None if summary is None else summary.get("unknown")
    if beat is not None and "restarts" in beat:
        return beat["restarts"], unknown
    return (None if summary is None else summary.get("ends", {})), unknown
