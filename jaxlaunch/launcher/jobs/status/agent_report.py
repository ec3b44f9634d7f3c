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
        """The end in words: "attempt 3 of generation 1: hang (82): rank 1 …"."""
        return f"attempt {self.attempt} of generation {self.generation}: {self.result}: {self.verdict.message}"

    @property
    def result(self) -> str:
        """Cause and exit code: "hang (82)"."""
        return f"{self.verdict.cause} ({self.verdict.code})"


@dataclasses.dataclass(frozen=True)
class AgentReport:
    """A field is None or empty where no agent reported it, or where its report could not be read."""

    # Newest heartbeat of these pods.
    heartbeat: Beat | None = None
    # End of the current pods, if they have ended or are about to.
    verdict: AttemptEnd | None = None
    # Earlier attempts as far as they are known, oldest first.
    earlier: tuple[AttemptEnd, ...] = ()
    # Number of restarts by the cause that ended the attempt before.
    ends_by_cause: Mapping[str, int] | None = None
    # Why earlier attempts are not known, as a clause.
    unknown: str | None = None
    # Source of the heartbeat if no leader's log has one.
    recorded: Recorded | None = None

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
    def goodput(self) -> float | None:
        """The share of all seconds that went into steps that count, from 0 to 1."""
        if self.recorded is not None:
            return self.recorded.goodput
        return None if self.heartbeat is None else ratio(self.heartbeat.seconds)


def merge(
    records: Sequence[Line], hosts: Sequence[Host], recorded: Recorded | None = None, *, is_over: bool = False
) -> AgentReport:
    """Merge the records of the leader of `hosts` and the termination messages of their pods into one report.

    Where they say nothing, as after the end of these pods, `recorded` does. `is_over`: the job is done or has failed,
    so what was recorded when it was stopped is older than its end.
    """
    report = _merge_records(sorted(records, key=lambda record: record.at), hosts)
    if recorded is None or report.heartbeat is not None:
        return report
    ends, verdict = recorded.ends, recorded.verdict
    if is_over and recorded.when == "left" and verdict is not None and ends:
        # The restart never came, because the job was over.
        counts = {**ends, verdict.cause: ends.get(verdict.cause, 0) - 1}
        ends = {cause: count for cause, count in counts.items() if count > 0}
    last = None if verdict is None else AttemptEnd(verdict, recorded.attempt, recorded.generation, recorded.at)
    is_of_last = recorded.is_end and not hosts and not (is_over and recorded.when == "stopped")
    return dataclasses.replace(
        report,
        heartbeat=Beat(
            attempt=recorded.attempt,
            generation=recorded.generation,
            step=recorded.step,
            committed=recorded.committed,
        ),
        verdict=report.verdict or (last if is_of_last else None),
        earlier=report.earlier or (() if is_of_last or last is None else (last,)),
        ends_by_cause=report.ends_by_cause or ends,
        recorded=recorded,
    )


def _merge_records(records: Sequence[Line], hosts: Sequence[Host]) -> AgentReport:
    """Merge records that are in order of time."""
    generation = hosts[0].generation if hosts else 0
    heartbeat = _newest_heartbeat([record for record in records if record.generation == generation])
    ends = []
    for record in records:
        if isinstance(record, Judged):
            ends.append(AttemptEnd(record.verdict, record.attempt, record.generation, record.at))
        elif isinstance(record, Past) and record.verdict is not None:
            at = record.at if record.ended is None else record.ended
            ends.append(AttemptEnd(record.verdict, record.attempt, record.generation, at))
    # The verdict that ends these pods: host 0's agent decided it, and an agent that lost its leader knows less.
    verdict = None
    terminations = [
        AttemptEnd(report.verdict, report.attempt, report.generation)
        for host in hosts
        if not host.left_alone and (report := host.termination_report) is not None
    ]
    current = [end for end in ends if end.generation == generation]
    if terminations:
        verdict = max(terminations, key=lambda end: (end.attempt, end.verdict.code != contract.LOST))
    elif current and hosts and hosts[0].number == 0 and hosts[0].has_ended:
        is_running = heartbeat is not None and heartbeat.attempt > current[-1].attempt
        verdict = None if is_running else current[-1]
    earlier = {end.attempt: end for end in ends if verdict is None or end.attempt < verdict.attempt}
    # Attempts that ended by cause, and why they are not known. A heartbeat counts what the first record does too.
    newest_first = records[::-1]
    past = next((record for record in newest_first if isinstance(record, Past) and record.verdict is None), None)
    beat = next((record for record in newest_first if isinstance(record, Beat)), None)
    by_cause = None if past is None else past.ends
    if beat is not None and beat.restarts is not None:
        by_cause = beat.restarts
    return AgentReport(
        heartbeat,
        verdict,
        tuple(earlier[attempt] for attempt in sorted(earlier)),
        by_cause,
        None if past is None else past.unknown,
    )


def _newest_heartbeat(records: Sequence[Line]) -> Beat | None:
    """Return the last heartbeat. A verdict after it has newer steps and commits than it."""
    newest = next((record for record in reversed(records) if isinstance(record, Beat)), None)
    for record in records:
        if newest is not None and isinstance(record, Judged) and record.at >= newest.at:
            step = newest.step if record.step is None else record.step
            committed = newest.committed if record.committed is None else record.committed
            newest = dataclasses.replace(newest, step=step, committed=committed)
    return newest
