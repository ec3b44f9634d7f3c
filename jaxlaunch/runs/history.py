"""Decides from the recorded attempts what follows: a restart in place, or the end. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob, Limit
from jaxlaunch.records.summary import AttemptRecord, RestartRow
from jaxlaunch.records.verdict import Failure, FailureKind, Verdict, verdict_for

# After this many generations in a row without progress, the verdict is NO_PROGRESS.
MAX_GENERATIONS_WITHOUT_PROGRESS = 3
# A program that ran for longer than this has made progress even if it reported none.
SILENT_PROGRESS_S = 600.0
# A summary has the newest restarts, and attempts.jsonl has all.
MAX_RESTART_ROWS = 50
# The causes of contract.CLOCK_CAUSES during which no process runs.
_WAITING_CAUSES = ("rendezvous", "down")
_TRACEBACK_START = "Traceback (most recent call last)"
# A line of a traceback. The last one is where the exception was raised. The folder is left out,
# because that of the site hook differs between pods.
_TRACEBACK_PLACE = re.compile(r'^ *File "(?:.*/)?([^/"]*", line \d+.*)$', re.MULTILINE)
# A traceback is cut at its beginning, so only the last frames are compared.
_COMPARED_FRAMES = 10
# Addresses, pids and times differ between equal exceptions.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclasses.dataclass(frozen=True)
class Decision:
    """Decision after an attempt: another one in place, or the end with a verdict."""

    should_restart: bool
    verdict: Verdict


def made_progress(records: Sequence[AttemptRecord]) -> list[bool]:
    """Return for each attempt whether it committed a step beyond those of all earlier attempts."""
    best_step, result = -1, []
    for record in records:
        step = -1 if record.last_committed is None else record.last_committed
        result.append(step > best_step and record.first_committed is not None)
        best_step = max(best_step, step)
    return result


def decide_next(
    records: Sequence[AttemptRecord],
    in_place_limit: int,
    all_hosts_alive: bool,
    preempted_limit: int | None = None,
) -> Decision:
    """Decide what follows the last of `records`, which are all of one run.

    The first error since the last progress is reported, unless the last error is the reason for
    giving up.
    """
    verdict = records[-1].verdict
    outcome = contract.outcome_for_code(verdict.code)
    if not outcome.in_place:
        return Decision(False, verdict)
    if (first := _first_of_repeated(records)) is not None:
        # A third attempt would fail too.
        return Decision(False, _repeated_verdict(first.verdict))
    if verdict.is_full_disk:
        # The full disk is what the user has to fix, whatever the earlier errors were.
        return Decision(False, verdict)
    requeue, is_free = verdict.failure.requeue, outcome.charged_to is not Limit.CRASH
    if is_free and preempted_limit is not None:
        count = preemptions_without_progress(records)
        if count >= preempted_limit:
            return Decision(False, _too_often_preempted(count, preempted_limit, verdict.facts))
    may_stay = all_hosts_alive and (requeue is None or not requeue.needs_new_pods)
    if may_stay and (in_place_limit > 0 if is_free else restarts_before(records) < in_place_limit):
        return Decision(True, verdict)
    if is_free:
        return Decision(False, verdict)
    first_verdict = first_error(records)
    count = generations_without_progress(records)
    if count >= MAX_GENERATIONS_WITHOUT_PROGRESS:
        facts = Failure(FailureKind.NO_PROGRESS, count=count, cause=first_verdict.facts)
        first_verdict = _verdict_at_place(facts, first_verdict)
    return Decision(False, first_verdict)


def are_alike(verdict: Verdict, other: Verdict) -> bool:
    """Return whether two attempts failed in the same way, which the next one would do as well.

    Exceptions are alike if they have the same type and were raised by the same lines. Other ends
    are alike if they have the same signal or exit code; before the first step, the last line of
    output must be the same, too. The steps must be equal; those of a process that ended without
    Python's help may differ by one, because its last report is lost.
    """
    if verdict.failure.may_pass or other.failure.may_pass or verdict.code != other.code:
        return False
    # Other codes, such as that of failing storage, say that the next attempt may succeed.
    if verdict.code != contract.CRASH and verdict.failure.kind is not FailureKind.SIGNAL:
        return False
    return _failure_key(verdict) == _failure_key(other) and _are_steps_equal(verdict, other)


def _first_of_repeated(records: Sequence[AttemptRecord]) -> AttemptRecord | None:
    """Return the earlier failure that the last attempt repeats without a newly committed step.

    Attempts between the two that may pass, such as a preemption, tell nothing about the program.
    """
    if made_progress(records)[-1] or _is_silent_progress(records[-1]):
        return None
    for record in reversed(_since_progress(records[:-1])):
        if _is_silent_progress(record):
            return None
        if are_alike(record.verdict, records[-1].verdict):
            return record
        if not record.verdict.failure.may_pass:
            return None
    return None


def _repeated_verdict(first: Verdict) -> Verdict:
    has_type = first.failure.kind is FailureKind.EXCEPTION or first.failure.step is not None
    output = "" if has_type else _last_line(first)[:300]
    failure = Failure(FailureKind.REPEATED, cause=first.facts, detail=output)
    return _verdict_at_place(failure, first)


def _verdict_at_place(failure: Failure, verdict: Verdict) -> Verdict:
    """Return the verdict for a failure whose rank, host and traceback are those of `verdict`."""
    place = {"rank": verdict.rank, "host": verdict.host, "step": verdict.step}
    return verdict_for(failure, traceback=verdict.traceback, **place)


def newest_saved_step(records: Sequence[AttemptRecord], generation: int = 0) -> int | None:
    """Return the newest step that these attempts saved: 0 without any, None without training.

    If new pods have no record of earlier ones, the result is 0: an error before training does not
    lead to new pods, so the earlier ones have trained.
    """
    if generation and not records:
        return 0
    steps = [record.last_committed for record in records if record.last_committed is not None]
    has_trained = any(
        record.seconds.get("step") or record.seconds.get("lost_work") for record in records
    )
    return max(steps, default=0 if has_trained else None)


def _failure_key(verdict: Verdict) -> tuple[object, ...]:
    """Return what is equal for failures with the same cause, without rank and step."""
    failure = verdict.failure
    if failure.kind is FailureKind.EXCEPTION and failure.exception is not None:
        # The frames of the exception itself, without those that it was chained from.
        text = (verdict.traceback or "").rpartition(_TRACEBACK_START)[2]
        places = _TRACEBACK_PLACE.findall(text)[-_COMPARED_FRAMES:]
        message = "" if places else _NUMBER.sub("#", failure.exception.message)
        return failure.exception.type, message, *places
    if failure.kind in (FailureKind.SIGNAL, FailureKind.EXIT_CODE) and failure.step is not None:
        return failure.kind, failure.signal, failure.exit_code
    facts = dataclasses.replace(failure, rank=None, step=None)
    last_line = _NUMBER.sub("#", _last_line(verdict))
    return facts.with_texts(lambda text: _NUMBER.sub("#", text)), last_line


def _are_steps_equal(verdict: Verdict, other: Verdict) -> bool:
    steps = [end.step for end in (verdict, other) if end.step is not None]
    if len(steps) < 2:
        return not steps
    is_flushed = verdict.failure.kind is FailureKind.EXCEPTION
    return abs(steps[0] - steps[1]) <= (0 if is_flushed else 1)


def _is_silent_progress(record: AttemptRecord) -> bool:
    """Return whether an attempt ran for so long that it has made progress without reporting it."""
    is_silent = record.verdict.step is None and record.last_committed is None
    return is_silent and record.ended - record.started > SILENT_PROGRESS_S


def _last_line(verdict: Verdict) -> str:
    return (verdict.traceback or "").strip().rpartition("\n")[2]


def restarts_before(records: Sequence[AttemptRecord]) -> int:
    """Count the restarts in place that led to the last record without a newly committed step."""
    return 0 if made_progress(records)[-1] else restarts_used(records[:-1], records[-1].generation)


def restarts_used(records: Sequence[AttemptRecord], generation: int) -> int:
    """Count the restarts in place of `generation` since the last newly committed step.

    The restart after the last record is included. Restarts after a preemption are not counted.
    """
    recent = [record for record in _since_progress(records) if record.generation == generation]
    return sum(_charged_to(record.verdict.code) is Limit.CRASH for record in recent)


def is_done(records: Sequence[AttemptRecord]) -> bool:
    """Return whether the run has finished."""
    return bool(records) and records[-1].verdict.code == contract.DONE


def _charged_to(code: int) -> Limit | None:
    return contract.outcome_for_code(code).charged_to


def first_error(records: Sequence[AttemptRecord]) -> Verdict:
    """Return the first error since the last newly committed step, which counts as one."""
    verdicts = (record.verdict for record in _since_progress(records))
    return next(verdict for verdict in verdicts if _charged_to(verdict.code) is Limit.CRASH)


def generations_without_progress(records: Sequence[AttemptRecord]) -> int:
    """Count the last generations in a row without progress that are charged to crashes."""
    progress = zip(records, made_progress(records), strict=True)
    with_progress = {record.generation for record, is_ahead in progress if is_ahead}
    last_records = {record.generation: record for record in records}
    fruitless = itertools.takewhile(
        lambda number: number not in with_progress, sorted(last_records, reverse=True)
    )
    codes = [last_records[number].verdict.code for number in fruitless]
    return sum(_charged_to(code) is Limit.CRASH for code in codes)


def give_up_verdict(
    records: Sequence[AttemptRecord], generation: int, preempted_limit: int | None
) -> Verdict | None:
    """Return the verdict on pods of `generation` that may not start, or None.

    Earlier attempts may have reached the limits without progress, which pods that were lost or
    preempted could not report.
    """
    if not records:
        return None
    preemptions = preemptions_without_progress(records)
    if preempted_limit is not None and preemptions >= preempted_limit:
        return _too_often_preempted(preemptions, preempted_limit, records[-1].verdict.facts)
    if records[-1].generation == generation:
        return None
    verdict = decide_next(records, 0, all_hosts_alive=False).verdict
    return None if contract.outcome_for_code(verdict.code).restarts else verdict


def used_up_verdict(
    records: Sequence[AttemptRecord], generation: int, in_place_limit: int
) -> Verdict | None:
    """Return the verdict on a gang that lost host 0 after its restarts in place, else None."""
    if not records or records[-1].generation != generation:
        return None
    if not contract.outcome_for_code(records[-1].verdict.code).in_place:
        return None
    decision = decide_next(records, in_place_limit, all_hosts_alive=True)
    return None if decision.should_restart else decision.verdict


def give_up_verdict_unrecorded(
    generation: int, crash_limit: int, preempted_limit: int | None
) -> Verdict | None:
    """Return the verdict on new pods of a job without checkpoints and records, or None.

    Restarts beyond `crash_limit` that led to `generation` were not charged, so they followed
    preemptions.
    """
    free_restarts = generation - crash_limit
    if preempted_limit is None or free_restarts < preempted_limit:
        return None
    return _too_often_preempted(free_restarts, preempted_limit, None)


def _too_often_preempted(count: int, limit: int, last: Failure | None) -> Verdict:
    kind = FailureKind.PREEMPTED_TOO_OFTEN
    return verdict_for(Failure(kind, count=count, limit=limit, cause=last))


def preemptions_without_progress(records: Sequence[AttemptRecord]) -> int:
    """Count the attempts since the last new commit that were stopped and left nothing."""
    fruitless = itertools.takewhile(
        lambda pair: not pair[1], zip(records[::-1], made_progress(records)[::-1], strict=True)
    )
    return sum(
        _charged_to(record.verdict.code) is Limit.PREEMPTED and not _may_have_progress(record)
        for record, _ in fruitless
    )


def _may_have_progress(record: AttemptRecord) -> bool:
    """Return whether a silent attempt ran for so long that it has made progress."""
    is_silent = record.verdict.step is None and record.last_committed is None
    # Causes other than waiting have seconds only after the processes have started.
    has_only_waited = bool(record.seconds) and not any(
        spent for cause, spent in record.seconds.items() if cause not in _WAITING_CAUSES
    )
    return is_silent and not has_only_waited and record.ended - record.started > SILENT_PROGRESS_S


def restarts_by_cause(
    records: Sequence[AttemptRecord], attempt: int | None = None
) -> dict[str, int]:
    """Count the restarts, in place or with new pods, by the cause that ended the attempt before.

    Args:
        records: Attempts that ended, oldest first.
        attempt: Number of the newest attempt, which runs or waits for its hosts. None: the last
            record is of it.
    """
    if attempt is None:
        attempt = records[-1].attempt if records else 0
    return dict(Counter(record.cause for record in records if record.attempt < attempt))


def restart_count(
    generation: int, by_cause: Mapping[str, int] | None, attempt: int | None = None
) -> int:
    """Return the number of restarts that every command, page and record shows.

    Args:
        generation: Number of the newest set of pods, from 0.
        by_cause: Restarts on record. Sets of pods that were lost before they wrote anything are in
            `generation` alone.
        attempt: Number of the newest attempt, from 1. It counts if no restart is on record: a pod
            tells no more at its end.
    """
    return max(generation, sum(by_cause.values()) if by_cause else (attempt or 1) - 1)


def _since_progress(records: Sequence[AttemptRecord]) -> Sequence[AttemptRecord]:
    """Return the attempts since the last one that committed a new step, including that one."""
    last = max(
        (index for index, is_ahead in enumerate(made_progress(records)) if is_ahead), default=0
    )
    return records[last:]


def sum_seconds(
    records: Sequence[AttemptRecord], now: float, started_at: float | None = None
) -> dict[str, float]:
    """Return the seconds of the run by cause until `now`, with gaps between attempts as "down".

    Args:
        records: Attempts that ended, oldest first.
        now: Unix time.
        started_at: Unix time of the start of the run. None: the run started with the first of these
            attempts, whose own seconds may not be known.
    """
    total = dict.fromkeys(contract.CLOCK_CAUSES, 0.0)
    for record in records:
        for cause, spent_s in record.seconds.items():
            total[cause] = total.get(cause, 0.0) + spent_s
    if started_at is None and records:
        started_at = min(records[0].started, records[0].ended - sum(records[0].seconds.values()))
    if started_at is not None:
        gap_s = max(0.0, now - started_at - sum(total.values()))
        total["down" if records else "rendezvous"] += gap_s
    return total


def restart_rows(
    records: Sequence[AttemptRecord], present_attempt: int, present_seconds: Mapping[str, float]
) -> list[RestartRow]:
    """Return a row for each of the last attempts and the present one."""
    after: dict[int, str | None] = {record.attempt + 1: record.cause for record in records}
    seconds = {record.attempt: record.restart for record in records[-MAX_RESTART_ROWS:]}
    if not records or records[-1].attempt != present_attempt:
        seconds[present_attempt] = present_seconds
    return [
        RestartRow(number, after.get(number), spent) for number, spent in seconds.items() if spent
    ]


def charged_generations(records: Sequence[AttemptRecord], generation: int) -> int:
    """Count the sets of pods before `generation` whose end counted toward restarts.crash."""
    last_codes = {record.generation: record.verdict.code for record in records}
    last_codes.pop(generation, None)
    return sum(_charged_to(code) is Limit.CRASH for code in last_codes.values())


def metric_counters(
    records: Sequence[AttemptRecord], generation: int, job: AgentJob
) -> dict[str, Any]:
    """Return the counters for metrics: ends by cause, restarts left, and the last exit code.

    Unlike the restarts, the ends include the end of the run, because there are alerts for it.
    """
    charged = charged_generations(records, generation)
    used_in_place = restarts_used(records, generation)
    used = (("crash", job.crash_limit, charged), ("in_place", job.in_place_limit, used_in_place))
    restarts_left = {name: max(0, limit - count) for name, limit, count in used}
    if job.preempted_limit is not None:
        preemptions = preemptions_without_progress(records)
        restarts_left["preempted"] = max(0, job.preempted_limit - preemptions)
    return {
        "ended": dict(Counter(record.cause for record in records)),
        "left": restarts_left,
        "code": records[-1].verdict.code if records else None,
    }
