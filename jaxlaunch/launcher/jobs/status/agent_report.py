"""What the agents reported of a run: records of host 0's log and every pod's termination message, merged. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.records.log_lines import Beat, Judged, Line, Past, Recorded
from jaxlaunch.records.summary import ratio
from jaxlaunch.records.verdict import Verdict


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

    heartbeat: Beat | None = None  # the newest, of these pods
    verdict: AttemptEnd | None = None  # of the pods that are here, if they have ended or are about to
    earlier: tuple[AttemptEnd, ...] = ()  # attempts before, as far as they are known, the last one last
    ends_by_cause: Mapping[str, int] | None = None  # restarts, by what ended the attempt before
    unknown: str | None = None  # why earlier attempts are not known, as a clause
    recorded: Recorded | None = None  # whence the heartbeat is, where no log of a leader has one

    @property
    def last(self) -> AttemptEnd | None:
        """The newest verdict there is."""
        return self.verdict or (self.earlier[-1] if self.earlier else None)

    @property
    def is_judged(self) -> bool:
        """Whether the attempt that the newest heartbeat is of has ended: its phase is no longer true."""
        last, beat = self.last, self.heartbeat
        if last is None or beat is None or beat.stage == "gather" or beat.generation != last.generation:
            return False
        return last.attempt >= beat.attempt

    @property
    def stage(self) -> str | None:
        """One of jaxlaunch.records.log_lines.STAGES while the attempt has not ended."""
        return None if self.heartbeat is None or self.verdict is not None else self.heartbeat.stage

    @property
    def missing(self) -> list[int]:
        """Hosts that the leader waits for, the first of them."""
        return list(self.heartbeat.missing) if self.heartbeat is not None and self.stage == "gather" else []

    @property
    def step(self) -> int | None:
        """Steps that are complete on every rank."""
        if self.verdict is not None and self.verdict.verdict.step is not None:
            return self.verdict.verdict.step
        return None if self.heartbeat is None else self.heartbeat.step

    @property
    def committed(self) -> int | None:
        """The newest step whose checkpoint is complete on storage."""
        return None if self.heartbeat is None else self.heartbeat.committed

    @property
    def committed_at(self) -> datetime | None:
        """When that checkpoint was completed; None if it was before these pods started."""
        at = None if self.heartbeat is None else self.heartbeat.committed_at
        return None if at is None else datetime.fromtimestamp(at, UTC)

    @property
    def preempted(self) -> int | None:
        """Preemptions in a row without a newly committed step."""
        return None if self.heartbeat is None else self.heartbeat.preempted

    @property
    def goodput(self) -> float | None:
        """The share of all seconds that went into steps that count, from 0 to 1."""
        if self.recorded is not None:
            return self.recorded.goodput
        return None if self.heartbeat is None else ratio(self.heartbeat.seconds)


def merge(
    records: Sequence[Line], hosts: Sequence[Host], recorded: Recorded | None = None, *, is_over: bool = False
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
        heartbeat=Beat(
            attempt=recorded.attempt,
            generation=recorded.generation,
            step=recorded.step,
            committed=recorded.committed,
        ),
        verdict=found.verdict or (ended[0] if ended and is_of_last else None),
        earlier=found.earlier or (() if is_of_last else tuple(ended)),
        ends_by_cause=found.ends_by_cause or _recorded_restarts(recorded, is_over),
        recorded=recorded,
    )


def _recorded_restarts(recorded: Recorded, is_over: bool) -> Mapping[str, int] | None:
    """Return the restarts by cause, without the one that never came because the job was over."""
    if not (is_over and recorded.when == "left" and recorded.verdict is not None and recorded.ends):
        return recorded.ends
    cause = recorded.verdict.cause
    restarts = {**recorded.ends, cause: recorded.ends.get(cause, 0) - 1}
    return {cause: count for cause, count in restarts.items() if count > 0}


def _recorded_end(recorded: Recorded, verdict: Verdict) -> AttemptEnd:
    return AttemptEnd(verdict, recorded.attempt, recorded.generation, recorded.at)


def _merged(records: Sequence[Line], hosts: Sequence[Host]) -> AgentReport:
    ordered = sorted(records, key=lambda record: record.at)
    generation = hosts[0].generation if hosts else 0
    heartbeat = _newest_heartbeat(ordered, generation)
    ends = [end for one in ordered if (end := _end(one)) is not None]
    told = [one for host in hosts if not host.left_alone and (one := host.termination_report) is not None]
    terminations = [AttemptEnd(one.verdict, one.attempt, one.generation) for one in told]
    verdict = _verdict(terminations, ends, heartbeat, hosts)
    earlier = {one.attempt: one for one in ends if verdict is None or one.attempt < verdict.attempt}
    by_cause, unknown = _counts(ordered)
    return AgentReport(heartbeat, verdict, tuple(earlier[number] for number in sorted(earlier)), by_cause, unknown)


def _newest_heartbeat(ordered: Sequence[Line], generation: int) -> Beat | None:
    """The last heartbeat of a generation. A verdict after it has newer steps and commits than it."""
    of_these = [one for one in ordered if one.generation == generation]
    newest = next((one for one in reversed(of_these) if isinstance(one, Beat)), None)
    for one in of_these:
        if newest is not None and isinstance(one, Judged) and one.at >= newest.at:
            step = newest.step if one.step is None else one.step
            committed = newest.committed if one.committed is None else one.committed
            newest = dataclasses.replace(newest, step=step, committed=committed)
    return newest


def _end(one: Line) -> AttemptEnd | None:
    """The attempt whose end a record tells of."""
    if isinstance(one, Judged):
        return AttemptEnd(one.verdict, one.attempt, one.generation, one.at)
    if isinstance(one, Past) and one.verdict is not None:
        return AttemptEnd(one.verdict, one.attempt, one.generation, one.at if one.ended is None else one.ended)
    return None


def _verdict(
    terminations: Sequence[AttemptEnd],
    ends: Sequence[AttemptEnd],
    heartbeat: Beat | None,
    hosts: Sequence[Host],
) -> AttemptEnd | None:
    """The verdict that ends these pods. Host 0's agent decided it; an agent that lost its leader knows less."""
    if terminations:
        return max(terminations, key=lambda one: (one.attempt, one.verdict.code != contract.LOST))
    generation = hosts[0].generation if hosts else 0
    of_these = [one for one in ends if one.generation == generation]
    running = heartbeat is not None and of_these and heartbeat.attempt > of_these[-1].attempt
    leader_ended = bool(hosts) and hosts[0].number == 0 and hosts[0].has_ended
    return of_these[-1] if of_these and leader_ended and not running else None


def _counts(ordered: Sequence[Line]) -> tuple[Mapping[str, int] | None, str | None]:
    """Attempts that ended by cause, and why they are not known. A heartbeat counts what the first record does too."""
    newest_first = ordered[::-1]
    summary = next((one for one in newest_first if isinstance(one, Past) and one.verdict is None), None)
    beat = next((one for one in newest_first if isinstance(one, Beat)), None)
    unknown = None if summary is None else summary.unknown
    if beat is not None and beat.restarts is not None:
        return beat.restarts, unknown
    return (None if summary is None else summary.ends), unknown
