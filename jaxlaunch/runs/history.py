"""Decision between a restart in place and the end, from the records of the attempts. Pure.

An attempt makes progress if it commits a step beyond those of all earlier attempts. Failures are
counted and compared from the last attempt that did. After a fault, `decide_next` restarts in place
as long as restarts.in_place allows it, and otherwise ends these pods with a verdict; JobSet decides
by its exit code about new pods. Three kinds of repetition end the whole run, because another
attempt would not help: two attempts that failed in the same way, several sets of pods without
progress, and too many preemptions in a row.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action, AgentJob, Limit
from jaxlaunch.records.summary import AttemptRecord, RestartRow
from jaxlaunch.records.verdict import Failure, FailureKind, Verdict, verdict_for

# After this many generations in a row without progress, the verdict is NO_PROGRESS.
MAX_GENERATIONS_WITHOUT_PROGRESS = 3
# A program that ran for longer than this counts as having made progress even if it reported none.
SILENT_PROGRESS_S = 600.0
# The number of newest restarts in a summary. attempts.jsonl has all of them.
MAX_RESTART_ROWS = 50
# The causes of contract.CLOCK_CAUSES during which no process runs.
_WAITING_CAUSES = ("rendezvous", "down")
_TRACEBACK_START = "Traceback (most recent call last)"
# The place of a frame in a traceback. The folder is omitted, because that of the site hook differs
# between pods.
_TRACEBACK_PLACE = re.compile(r'^ *File "(?:.*/)?([^/"]*", line \d+.*)$', re.MULTILINE)
# Only the last frames are compared, because the beginning of a long traceback is cut.
_COMPARED_FRAMES = 10
# Addresses, pids and times, which differ between equal exceptions.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision after an attempt: to restart in place, or to end with the verdict."""

    should_restart: bool
    verdict: Verdict


def made_progress(records: Sequence[AttemptRecord]) -> list[bool]:
    """Return a flag for each attempt: it committed a step beyond those of all earlier attempts."""
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
    """Decide between a restart in place and the end, after the last attempt of a run.

    The verdict of the decision is the first error since the last progress, unless the last attempt
    itself is the reason for the end.

    Args:
        records: Attempts of the run, oldest first, at least one.
        in_place_limit: The value of restarts.in_place.
        all_hosts_alive: Whether no host of the gang is lost. Otherwise it cannot restart in place.
        preempted_limit: The value of restarts.preempted.
    """
    verdict = records[-1].verdict
    outcome = contract.outcome_for_code(verdict.code)
    if not outcome.in_place:
        return Decision(False, verdict)
    if (first := _find_repeated_failure(records)) is not None:
        # A third attempt would fail too.
        return Decision(False, _repeated_verdict(first.verdict))
    if verdict.is_full_disk:
        # The user has to fix the full disk first, even if the earlier errors were different.
        return Decision(False, verdict)
    requeue, is_free = verdict.failure.requeue, outcome.charged_to is not Limit.CRASH
    if is_free and preempted_limit is not None:
        count = preemptions_without_progress(records)
        if count >= preempted_limit:
            return Decision(False, _preempted_verdict(count, preempted_limit, verdict.facts))
    can_stay = all_hosts_alive and (requeue is None or not requeue.needs_new_pods)
    used_restarts = 0 if is_free else restarts_before(records)
    if can_stay and used_restarts < in_place_limit:
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
    """Return whether two attempts failed in the same way, so that another one would fail, too.

    Exceptions are alike if they have the same type and were raised by the same lines of code. Other
    ends are alike if they have the same signal or exit code and, before the first step, the same
    last line of output. The steps must be equal. They may differ by one if the process ended
    without an exception, because its last report may be lost.
    """
    if verdict.failure.may_pass or other.failure.may_pass or verdict.code != other.code:
        return False
    # After other codes, such as that of failing storage, the next attempt may succeed.
    if verdict.code != contract.CRASH and verdict.failure.kind is not FailureKind.SIGNAL:
        return False
    return _failure_key(verdict) == _failure_key(other) and _are_steps_equal(verdict, other)


def _find_repeated_failure(records: Sequence[AttemptRecord]) -> AttemptRecord | None:
    """Return the earlier attempt whose failure the last attempt repeats, or None.

    There must be no newly committed step between the two. Attempts between them that failed for
    another reason are skipped if the reason may pass, such as a preemption.
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
    last_line = "" if has_type else _last_line(first)[:300]
    failure = Failure(FailureKind.REPEATED, cause=first.facts, detail=last_line)
    return _verdict_at_place(failure, first)


def _verdict_at_place(failure: Failure, verdict: Verdict) -> Verdict:
    """Return the verdict for a failure whose rank, host and traceback are those of `verdict`."""
    place = {"rank": verdict.rank, "host": verdict.host, "step": verdict.step}
    return verdict_for(failure, traceback=verdict.traceback, **place)


def newest_saved_step(records: Sequence[AttemptRecord], generation: int = 0) -> int | None:
    """Return the newest step that these attempts saved.

    Returns:
        The step, 0 if the attempts trained but saved nothing, or None if they did not train.
    """
    if generation and not records:
        # The earlier pods left no record. They have trained, because an error before the training
        # does not lead to new pods.
        return 0
    steps = [record.last_committed for record in records if record.last_committed is not None]
    has_trained = any(
        record.seconds.get("step") or record.seconds.get("lost_work") for record in records
    )
    return max(steps, default=0 if has_trained else None)


def _failure_key(verdict: Verdict) -> tuple[object, ...]:
    """Return a key that is equal for failures with the same cause, on any rank at any step."""
    failure = verdict.failure
    if failure.kind is FailureKind.EXCEPTION and failure.exception is not None:
        # The frames of the exception itself, without those of exceptions that it was chained from.
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
    if verdict.step is None or other.step is None:
        return verdict.step is other.step
    # Python sends pending reports before a process ends with an exception.
    tolerance = 0 if verdict.failure.kind is FailureKind.EXCEPTION else 1
    return abs(verdict.step - other.step) <= tolerance


def _is_silent_progress(record: AttemptRecord) -> bool:
    """Return whether an attempt that reported no step ran for longer than SILENT_PROGRESS_S."""
    is_silent = record.verdict.step is None and record.last_committed is None
    return is_silent and record.ended - record.started > SILENT_PROGRESS_S


def _last_line(verdict: Verdict) -> str:
    return (verdict.traceback or "").strip().rpartition("\n")[2]


def restarts_before(records: Sequence[AttemptRecord]) -> int:
    """Count the restarts in place between the last newly committed step and the last record."""
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
    """Return the first error since the last attempt that made progress, whose own error counts."""
    verdicts = (record.verdict for record in _since_progress(records))
    return next(verdict for verdict in verdicts if _charged_to(verdict.code) is Limit.CRASH)


def generations_without_progress(records: Sequence[AttemptRecord]) -> int:
    """Count the crashed generations since the last one that made progress."""
    flags = zip(records, made_progress(records), strict=True)
    with_progress = {record.generation for record, has_progress in flags if has_progress}
    last_codes = {record.generation: record.verdict.code for record in records}
    without_progress = itertools.takewhile(
        lambda generation: generation not in with_progress, sorted(last_codes, reverse=True)
    )
    return sum(_charged_to(last_codes[number]) is Limit.CRASH for number in without_progress)


def give_up_verdict(
    records: Sequence[AttemptRecord], generation: int, preempted_limit: int | None
) -> Verdict | None:
    """Return the verdict for pods of `generation` that must not start, or None if they may.

    Earlier attempts may have reached a limit while their pods were lost or preempted, so that these
    could not end the job themselves.
    """
    if not records:
        return None
    preemptions = preemptions_without_progress(records)
    if preempted_limit is not None and preemptions >= preempted_limit:
        return _preempted_verdict(preemptions, preempted_limit, records[-1].verdict.facts)
    if records[-1].generation == generation:
        return None
    verdict = decide_next(records, 0, all_hosts_alive=False).verdict
    return None if contract.outcome_for_code(verdict.code).restarts else verdict


def used_up_verdict(
    records: Sequence[AttemptRecord], generation: int, in_place_limit: int
) -> Verdict | None:
    """Return the verdict for a gang that lost host 0 while its restarts in place are used up."""
    if not records or records[-1].generation != generation:
        return None
    if not contract.outcome_for_code(records[-1].verdict.code).in_place:
        return None
    decision = decide_next(records, in_place_limit, all_hosts_alive=True)
    return None if decision.should_restart else decision.verdict


def give_up_verdict_unrecorded(
    generation: int, crash_limit: int, preempted_limit: int | None
) -> Verdict | None:
    """Return the verdict for new pods of a job without checkpoints and records, or None.

    Such pods know only their number. Of the restarts that led to it, those beyond `crash_limit`
    must have followed preemptions.
    """
    free_restarts = generation - crash_limit
    if preempted_limit is None or free_restarts < preempted_limit:
        return None
    return _preempted_verdict(free_restarts, preempted_limit, None)


def _preempted_verdict(count: int, limit: int, last: Failure | None) -> Verdict:
    kind = FailureKind.PREEMPTED_TOO_OFTEN
    return verdict_for(Failure(kind, count=count, limit=limit, cause=last))


def preemptions_without_progress(records: Sequence[AttemptRecord]) -> int:
    """Count the attempts since the last progress whose restarts count toward restarts.preempted."""
    without_progress = itertools.takewhile(
        lambda pair: not pair[1], zip(records[::-1], made_progress(records)[::-1], strict=True)
    )
    return sum(
        _charged_to(record.verdict.code) is Limit.PREEMPTED
        and (_has_only_waited(record) or not _is_silent_progress(record))
        for record, _ in without_progress
    )


def _has_only_waited(record: AttemptRecord) -> bool:
    """Return whether an attempt ended before its processes started."""
    return bool(record.seconds) and not any(
        spent_s for cause, spent_s in record.seconds.items() if cause not in _WAITING_CAUSES
    )


def restarts_by_cause(
    records: Sequence[AttemptRecord], attempt: int | None = None
) -> dict[str, int]:
    """Count the restarts, in place or with new pods, by the cause that ended the attempt before.

    Args:
        records: Attempts that ended, oldest first.
        attempt: Number of the newest attempt if it has not ended. Default: that of the last record.
    """
    if attempt is None:
        attempt = records[-1].attempt if records else 0
    return dict(Counter(record.cause for record in records if record.attempt < attempt))


def restart_count(
    generation: int, by_cause: Mapping[str, int] | None, attempt: int | None = None
) -> int:
    """Return the number of restarts that all commands, pages and records show.

    Args:
        generation: Number of the newest set of pods, from 0. It also counts pods that were lost
            before they wrote anything.
        by_cause: Restarts on record.
        attempt: Number of the newest attempt, from 1. It is used if no restart is on record, as in
            the termination message of a pod.
    """
    return max(generation, sum(by_cause.values()) if by_cause else (attempt or 1) - 1)


def _since_progress(records: Sequence[AttemptRecord]) -> Sequence[AttemptRecord]:
    """Return the attempts since the last one that made progress, including that one."""
    flags = enumerate(made_progress(records))
    return records[max((index for index, has_progress in flags if has_progress), default=0) :]


def sum_seconds(
    records: Sequence[AttemptRecord], now: float, started_at: float | None = None
) -> dict[str, float]:
    """Return the seconds of the run by cause until `now`, with gaps between attempts as "down".

    Args:
        records: Attempts that ended, oldest first.
        now: Unix time.
        started_at: Unix time of the start of the run. Default: that of the first attempt.
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
    records: Sequence[AttemptRecord], current_attempt: int, current_seconds: Mapping[str, float]
) -> list[RestartRow]:
    """Return the restarts that led to the last attempts and to the current one, oldest first.

    Args:
        records: Attempts that ended, oldest first.
        current_attempt: Number of the current attempt, or of the last one.
        current_seconds: Seconds by cause of the restart that led to it.
    """
    previous_cause = {record.attempt + 1: record.cause for record in records}
    seconds = {record.attempt: record.restart for record in records[-MAX_RESTART_ROWS:]}
    if not records or records[-1].attempt != current_attempt:
        seconds[current_attempt] = current_seconds
    return [
        RestartRow(attempt, previous_cause.get(attempt), by_cause)
        for attempt, by_cause in seconds.items()
        if by_cause
    ]


def charged_generations(records: Sequence[AttemptRecord], generation: int) -> int:
    """Count the sets of pods before `generation` whose end counted toward restarts.crash."""
    last_codes = {record.generation: record.verdict.code for record in records}
    last_codes.pop(generation, None)
    return sum(_charged_to(code) is Limit.CRASH for code in last_codes.values())


def fails_job(
    verdict: Verdict, records: Sequence[AttemptRecord], generation: int, crash_limit: int
) -> bool:
    """Return whether a verdict ends the job as failed, because no new pods will follow.

    Without a run folder, earlier sets of pods are not known and are not counted.
    """
    outcome = contract.outcome_for_code(verdict.code)
    if outcome.charged_to is Limit.CRASH:
        return charged_generations(records, generation) >= crash_limit
    return outcome.action is Action.FAIL


def metric_counters(
    records: Sequence[AttemptRecord], generation: int, job: AgentJob
) -> dict[str, Any]:
    """Return the counters for metrics: ends by cause, restarts left, and the last exit code.

    Unlike `restarts_by_cause`, the ends include the end of the run, for which there are alerts.
    """
    restarts_left = {
        "crash": max(0, job.crash_limit - charged_generations(records, generation)),
        "in_place": max(0, job.in_place_limit - restarts_used(records, generation)),
    }
    if job.preempted_limit is not None:
        preemptions = preemptions_without_progress(records)
        restarts_left["preempted"] = max(0, job.preempted_limit - preemptions)
    return {
        "ended": dict(Counter(record.cause for record in records)),
        "left": restarts_left,
        "code": records[-1].verdict.code if records else None,
    }
