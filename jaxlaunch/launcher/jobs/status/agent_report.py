"""The report of the agents about a job, merged from all their records. Pure functions.

The leader, which is the agent of host 0, writes records to its log: heartbeats, verdicts, and at
its start the ends of earlier attempts. Every agent leaves a termination message. If the pods are
gone, the progress that was recorded on the JobSet or in the run folder takes their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.records.log_lines import BeatLine, Line, PastLine, ProgressAnnotation, VerdictLine
from jaxlaunch.records.summary import RankMemory
from jaxlaunch.records.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt.

    Attributes:
        verdict: Verdict on the attempt.
        attempt: Number of the attempt.
        generation: Generation of its pods.
        at: Unix time, if it is known.
        memory: Memory of the rank that ended it, if it is known.
    """

    verdict: Verdict
    attempt: int
    generation: int
    at: float | None = None
    memory: RankMemory | None = None

    @property
    def description(self) -> str:
        """A line such as "attempt 3 of generation 1: hang (82): rank 1 …"."""
        attempt = f"attempt {self.attempt} of generation {self.generation}"
        return f"{attempt}: {self.result}: {self.verdict.message}"

    @property
    def result(self) -> str:
        """The cause and the exit code, such as "hang (82)"."""
        return f"{self.verdict.cause} ({self.verdict.code})"


@dataclasses.dataclass(frozen=True)
class AgentReport:
    """The merged report of all agents. A field is None or empty if it is not known.

    Attributes:
        heartbeat: Newest heartbeat of the current pods.
        attempt_end: End of the attempt with which the current pods end.
        earlier_ends: Ends of earlier attempts as far as they are known, oldest first.
        ends_by_cause: Number of restarts by the cause that ended the attempt before.
        unknown_reason: Why earlier attempts are not known, as a clause.
        recorded_progress: Recorded progress, if the heartbeat is made from it.
    """

    heartbeat: BeatLine | None = None
    attempt_end: AttemptEnd | None = None
    earlier_ends: tuple[AttemptEnd, ...] = ()
    ends_by_cause: Mapping[str, int] | None = None
    unknown_reason: str | None = None
    recorded_progress: ProgressAnnotation | None = None

    @property
    def last_end(self) -> AttemptEnd | None:
        """End of the last attempt that has ended."""
        return self.attempt_end or (self.earlier_ends[-1] if self.earlier_ends else None)

    @property
    def is_attempt_over(self) -> bool:
        """Return whether the attempt of the newest heartbeat has ended."""
        last_end, heartbeat = self.last_end, self.heartbeat
        if last_end is None or heartbeat is None or heartbeat.stage == "gather":
            return False
        return heartbeat.generation == last_end.generation and last_end.attempt >= heartbeat.attempt

    @property
    def stage(self) -> str | None:
        """Stage of the current attempt, one of jaxlaunch.records.log_lines.STAGES."""
        if self.heartbeat is None or self.attempt_end is not None:
            return None
        return self.heartbeat.stage

    @property
    def missing_hosts(self) -> list[int]:
        """The first of the hosts that the leader waits for."""
        if self.heartbeat is None or self.stage != "gather":
            return []
        return list(self.heartbeat.missing)

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of the run, by the names of RunNumbers."""
        numbers = (self.heartbeat or BeatLine()).run_numbers() | {"restarts": self.ends_by_cause}
        if self.attempt_end is not None and self.attempt_end.verdict.step is not None:
            numbers["step"] = self.attempt_end.verdict.step
        return numbers

    @property
    def committed_step(self) -> int | None:
        """Newest step with a complete checkpoint on storage."""
        return None if self.heartbeat is None else self.heartbeat.committed


def merge_reports(
    records: Sequence[Line],
    hosts: Sequence[Host],
    recorded: ProgressAnnotation | None = None,
    *,
    is_over: bool = False,
) -> AgentReport:
    """Merge the leader's records and the termination messages of all pods into one report.

    Args:
        records: Records of the leader's log.
        hosts: Hosts of the newest generation.
        recorded: Recorded progress, used if the pods report nothing because they are gone.
        is_over: Whether the job is done or has failed. Progress that was recorded at a stop or
            before a restart is then not about its end.
    """
    report = _merge_records(sorted(records, key=lambda record: record.at), hosts)
    if recorded is None or report.heartbeat is not None:
        return report
    restarts, verdict = recorded.restarts, recorded.verdict
    if is_over and recorded.when == "left" and verdict is not None and restarts:
        # The record counts a restart that was about to happen. It did not, since the job has ended.
        counts = {**restarts, verdict.cause: restarts.get(verdict.cause, 0) - 1}
        restarts = {cause: count for cause, count in counts.items() if count > 0}
    last_end = None
    if verdict is not None:
        last_end = AttemptEnd(verdict, recorded.attempt, recorded.generation, recorded.at)
    is_final = recorded.is_end and not hosts and not (is_over and recorded.when == "stopped")
    return dataclasses.replace(
        report,
        heartbeat=BeatLine(
            attempt=recorded.attempt, generation=recorded.generation, **recorded.run_numbers()
        ),
        attempt_end=report.attempt_end or (last_end if is_final else None),
        earlier_ends=report.earlier_ends or (() if is_final or last_end is None else (last_end,)),
        ends_by_cause=report.ends_by_cause or restarts,
        recorded_progress=recorded,
    )


def _merge_records(records: Sequence[Line], hosts: Sequence[Host]) -> AgentReport:
    """Merge records that are sorted by time."""
    generation = hosts[0].generation if hosts else 0
    heartbeat = _newest_heartbeat([record for record in records if record.generation == generation])
    ends = []
    for record in records:
        if isinstance(record, VerdictLine):
            place = record.attempt, record.generation
            ends.append(AttemptEnd(record.verdict, *place, record.at, record.memory))
        elif isinstance(record, PastLine) and record.verdict is not None:
            at = record.at if record.ended is None else record.ended
            ends.append(AttemptEnd(record.verdict, record.attempt, record.generation, at))
    # The verdict of the leader is preferred. An agent that has lost the leader reports only LOST.
    attempt_end = None
    termination_ends = [
        AttemptEnd(report.verdict, report.attempt, report.generation)
        for host in hosts
        if not host.has_left_gang and (report := host.termination_report) is not None
    ]
    generation_ends = [end for end in ends if end.generation == generation]
    if termination_ends:
        termination_ends.sort(key=lambda end: (end.attempt, end.verdict.code == contract.LOST))
        last_attempt = termination_ends[-1].attempt
        attempt_end = next(end for end in termination_ends if end.attempt == last_attempt)
        # Only the leader's log has the memory.
        memory = next((end.memory for end in generation_ends if end.attempt == last_attempt), None)
        attempt_end = dataclasses.replace(attempt_end, memory=memory)
    elif generation_ends and hosts and hosts[0].number == 0 and hosts[0].has_ended:
        is_running = heartbeat is not None and heartbeat.attempt > generation_ends[-1].attempt
        attempt_end = None if is_running else generation_ends[-1]
    earlier_ends = {
        end.attempt: end for end in ends if attempt_end is None or end.attempt < attempt_end.attempt
    }
    # A record without a verdict has the numbers of earlier ends by cause, or why they are unknown.
    # The numbers in a heartbeat include them.
    total_records = [
        record for record in records if isinstance(record, PastLine) and record.verdict is None
    ]
    totals = total_records[-1] if total_records else None
    last_heartbeat = next(
        (record for record in records[::-1] if isinstance(record, BeatLine)), None
    )
    ends_by_cause = None if totals is None else totals.ends
    if last_heartbeat is not None and last_heartbeat.restarts is not None:
        ends_by_cause = last_heartbeat.restarts
    return AgentReport(
        heartbeat=heartbeat,
        attempt_end=attempt_end,
        earlier_ends=tuple(earlier_ends[attempt] for attempt in sorted(earlier_ends)),
        ends_by_cause=ends_by_cause,
        unknown_reason=None if totals is None else totals.unknown,
    )


def _newest_heartbeat(records: Sequence[Line]) -> BeatLine | None:
    """Return the last heartbeat, with the step and the committed step of later verdicts."""
    newest = next((record for record in reversed(records) if isinstance(record, BeatLine)), None)
    for record in records:
        if newest is not None and isinstance(record, VerdictLine) and record.at >= newest.at:
            step = newest.step if record.step is None else record.step
            committed = newest.committed if record.committed is None else record.committed
            newest = dataclasses.replace(newest, step=step, committed=committed)
    return newest
