"""The agents' report about a run, from host 0's log and the termination messages. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.records.log_lines import BeatLine, Line, PastLine, ProgressAnnotation, VerdictLine
from jaxlaunch.records.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class AttemptEnd:
    """End of an attempt: its verdict, number and time."""

    verdict: Verdict
    attempt: int
    generation: int
    at: float | None = None  # Unix time

    @property
    def description(self) -> str:
        """Description of the end: "attempt 3 of generation 1: hang (82): rank 1 …"."""
        attempt = f"attempt {self.attempt} of generation {self.generation}"
        return f"{attempt}: {self.result}: {self.verdict.message}"

    @property
    def result(self) -> str:
        """Cause and exit code: "hang (82)"."""
        return f"{self.verdict.cause} ({self.verdict.code})"


@dataclasses.dataclass(frozen=True)
class AgentReport:
    """Merged report of all agents. A field is None or empty if it is not known."""

    # Newest heartbeat of these pods.
    heartbeat: BeatLine | None = None
    # End of the current pods, if they have ended or are about to.
    attempt_end: AttemptEnd | None = None
    # Earlier attempts as far as they are known, oldest first.
    earlier_ends: tuple[AttemptEnd, ...] = ()
    # Number of restarts by the cause that ended the attempt before.
    ends_by_cause: Mapping[str, int] | None = None
    # Why earlier attempts are not known, as a clause.
    unknown_reason: str | None = None
    # Source of the heartbeat if no leader's log has one.
    recorded: ProgressAnnotation | None = None

    @property
    def last_end(self) -> AttemptEnd | None:
        """End of the last attempt that has ended."""
        return self.attempt_end or (self.earlier_ends[-1] if self.earlier_ends else None)

    @property
    def is_judged(self) -> bool:
        """Return whether the attempt of the newest heartbeat has ended."""
        last, beat = self.last_end, self.heartbeat
        if last is None or beat is None or beat.stage == "gather":
            return False
        return beat.generation == last.generation and last.attempt >= beat.attempt

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
        recorded: Progress on the JobSet, used if the pods report nothing because they are gone.
        is_over: Whether the job is done or has failed, so that progress from a stop is older than
            its end.
    """
    report = _merge_records(sorted(records, key=lambda record: record.at), hosts)
    if recorded is None or report.heartbeat is not None:
        return report
    ends, verdict = recorded.restarts, recorded.verdict
    if is_over and recorded.when == "left" and verdict is not None and ends:
        # The announced restart did not happen, because the job had ended.
        counts = {**ends, verdict.cause: ends.get(verdict.cause, 0) - 1}
        ends = {cause: count for cause, count in counts.items() if count > 0}
    last = None
    if verdict is not None:
        last = AttemptEnd(verdict, recorded.attempt, recorded.generation, recorded.at)
    is_of_last = recorded.is_end and not hosts and not (is_over and recorded.when == "stopped")
    return dataclasses.replace(
        report,
        heartbeat=BeatLine(
            attempt=recorded.attempt, generation=recorded.generation, **recorded.run_numbers()
        ),
        attempt_end=report.attempt_end or (last if is_of_last else None),
        earlier_ends=report.earlier_ends or (() if is_of_last or last is None else (last,)),
        ends_by_cause=report.ends_by_cause or ends,
        recorded=recorded,
    )


def _merge_records(records: Sequence[Line], hosts: Sequence[Host]) -> AgentReport:
    """Merge records that are sorted by time."""
    generation = hosts[0].generation if hosts else 0
    heartbeat = _newest_heartbeat([record for record in records if record.generation == generation])
    ends = []
    for record in records:
        if isinstance(record, VerdictLine):
            ends.append(AttemptEnd(record.verdict, record.attempt, record.generation, record.at))
        elif isinstance(record, PastLine) and record.verdict is not None:
            at = record.at if record.ended is None else record.ended
            ends.append(AttemptEnd(record.verdict, record.attempt, record.generation, at))
    # Host 0's agent decides the verdict that ends these pods. An agent that lost its leader knows
    # less.
    verdict = None
    terminations = [
        AttemptEnd(report.verdict, report.attempt, report.generation)
        for host in hosts
        if not host.has_left_gang and (report := host.termination_report) is not None
    ]
    current = [end for end in ends if end.generation == generation]
    if terminations:
        terminations.sort(key=lambda end: (end.attempt, end.verdict.code == contract.LOST))
        last_attempt = terminations[-1].attempt
        verdict = next(end for end in terminations if end.attempt == last_attempt)
    elif current and hosts and hosts[0].number == 0 and hosts[0].has_ended:
        is_running = heartbeat is not None and heartbeat.attempt > current[-1].attempt
        verdict = None if is_running else current[-1]
    earlier = {end.attempt: end for end in ends if verdict is None or end.attempt < verdict.attempt}
    # Number of ended attempts by cause, or why it is unknown. A heartbeat includes the counts of
    # the first record.
    totals = [item for item in records if isinstance(item, PastLine) and item.verdict is None]
    past = totals[-1] if totals else None
    beat = next((record for record in records[::-1] if isinstance(record, BeatLine)), None)
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


def _newest_heartbeat(records: Sequence[Line]) -> BeatLine | None:
    """Return the last heartbeat, updated with the step and the commit of a later verdict."""
    newest = next((record for record in reversed(records) if isinstance(record, BeatLine)), None)
    for record in records:
        if newest is not None and isinstance(record, VerdictLine) and record.at >= newest.at:
            step = newest.step if record.step is None else record.step
            committed = newest.committed if record.committed is None else record.committed
            newest = dataclasses.replace(newest, step=step, committed=committed)
    return newest
