"""Decides from the records in attempts.jsonl whether to restart after an attempt, in place or at all. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action, AgentJob
from jaxlaunch.records.summary import Record, Restarted
from jaxlaunch.records.verdict import Failure, FailureKind, Verdict, verdict_for

MAX_GENERATIONS_WITHOUT_PROGRESS = 3  # in a row; then the verdict is NO_PROGRESS
# A program that ran for longer than this has made progress even if it reported none.
SILENT_PROGRESS_S = 600.0
MAX_ROWS = 50  # restarts in a summary, the newest: attempts.jsonl has all
_WAITS = ("rendezvous", "down")  # of contract.CLOCK: no process runs
_PLACE = re.compile(r'^ *File ".*", line \d+.*$', re.MULTILINE)  # of a traceback; the last is where it was raised
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")  # addresses, pids, times: not what an exception says


@dataclasses.dataclass(frozen=True)
class Next:
    """What follows an attempt: another in place, or the end with this verdict."""

    again: bool
    verdict: Verdict


def advanced(records: Sequence[Record]) -> list[bool]:
    """Return for each attempt whether it committed a step beyond those of all attempts before it."""
    best, result = -1, []
    for record in records:
        step = -1 if record.last_committed is None else record.last_committed
        result.append(step > best and record.first_committed is not None)
        best = max(best, step)
    return result


def next_move(records: Sequence[Record], in_place_limit: int, everyone_lives: bool) -> Next:
    """Decide what follows the last of `records`, all of one uid.

    The first error since the last progress is reported, unless the last one alone tells why no other attempt helps.
    """
    verdict = records[-1].verdict
    if not contract.outcome(verdict.code).in_place:
        return Next(False, verdict)
    failures = [_failure(record) for record in records[-2:]]
    if len(failures) == 2 and failures[0] is not None and failures[0] == failures[1]:
        # Both failed at once and alike, before any progress: a third would fail too.
        output = "" if verdict.failure.kind is FailureKind.EXCEPTION else _last_line(verdict)[:300]
        facts = Failure(FailureKind.REPEATED, cause=verdict.facts, detail=output)
        return Next(False, verdict_for(facts, rank=verdict.rank, host=verdict.host, traceback=verdict.traceback))
    if verdict.is_full_disk:
        # Whatever came before it: this is what to mend.
        return Next(False, verdict)
    if everyone_lives and restarts_before(records) < in_place_limit:
        return Next(True, verdict)
    first = first_error(records)
    count = generations_without_progress(records)
    if count >= MAX_GENERATIONS_WITHOUT_PROGRESS:
        facts = Failure(FailureKind.NO_PROGRESS, count=count, cause=first.facts)
        first = verdict_for(facts, rank=first.rank, host=first.host, step=first.step, traceback=first.traceback)
    return Next(False, first)


def saved(records: Sequence[Record], generation: int = 0) -> int | None:
    """Return the newest step that these attempts saved, 0 if they trained and saved none, None if none trained.

    Where new pods have no record of those before them, it is 0: what keeps a run from training leads to no new pods.
    """
    if generation and not records:
        return 0
    steps = [record.last_committed for record in records if record.last_committed is not None]
    has_trained = any(record.seconds.get(cause) for record in records for cause in ("step", "lost_work"))
    return max(steps, default=0 if has_trained else None)


def _failure(record: Record) -> tuple[Failure, str] | None:
    """Return what failed and where, whichever the rank; None after progress, or where it may pass by itself."""
    verdict, failure = record.verdict, dataclasses.replace(record.verdict.failure, rank=None)
    has_progress = record.last_committed is not None or verdict.step is not None
    is_silent_progress = record.ended - record.started > SILENT_PROGRESS_S
    if verdict.code != contract.CRASH or has_progress or is_silent_progress or failure.may_pass:
        return None
    if failure.kind is not FailureKind.EXCEPTION:
        return failure, _last_line(verdict)
    failure = failure.with_texts(lambda text: _NUMBER.sub("#", text))
    return failure, next(reversed(_PLACE.findall(verdict.traceback or "")), "")


def _last_line(verdict: Verdict) -> str:
    return (verdict.traceback or "").strip().rpartition("\n")[2]


def restarts_before(records: Sequence[Record]) -> int:
    """Count the restarts in place that led to the last record without a newly committed step."""
    return 0 if advanced(records)[-1] else restarts_used(records[:-1], records[-1].generation)


def restarts_used(records: Sequence[Record], generation: int) -> int:
    """Count the restarts in place of `generation` since the last newly committed step.

    The one after the last record is included. Those after a preemption are not charged.
    """
    return sum(record.generation == generation and not _is_uncharged(record) for record in _since_progress(records))


def is_done(records: Sequence[Record]) -> bool:
    """Return whether the run has finished: an agent that takes another's place then has nothing to do."""
    return bool(records) and records[-1].verdict.code == contract.DONE


def _is_uncharged(record: Record) -> bool:
    return contract.outcome(record.verdict.code).action is Action.RESTART_UNCHARGED


def first_error(records: Sequence[Record]) -> Verdict:
    """Return the first error since the last newly committed step."""
    faults = (record for record in _since_progress(records) if contract.outcome(record.verdict.code).in_place)
    return next(faults).verdict


def generations_without_progress(records: Sequence[Record]) -> int:
    """Count the last generations in a row that committed no new step; those that were stopped do not count."""
    with_progress = {record.generation for record, ahead in zip(records, advanced(records), strict=True) if ahead}
    last = {record.generation: record for record in records}
    fruitless = itertools.takewhile(lambda number: number not in with_progress, sorted(last, reverse=True))
    return sum(not _is_uncharged(last[number]) for number in fruitless)


def given_up(records: Sequence[Record], generation: int, preempted_limit: int | None) -> Verdict | None:
    """Return the verdict on pods of `generation` that have not started yet, or None if they may start.

    The attempts before them may have used up what may pass without progress: pods that were lost or preempted could not
    say so.
    """
    if not records:
        return None
    free = preemptions_without_progress(records)
    if preempted_limit is not None and free >= preempted_limit:
        return _too_often_preempted(free, preempted_limit, records[-1].verdict.facts)
    if records[-1].generation == generation:
        return None
    verdict = next_move(records, 0, everyone_lives=False).verdict
    return verdict if verdict.code == contract.NO_PROGRESS else None


def used_up(records: Sequence[Record], generation: int, in_place_limit: int) -> Verdict | None:
    """Return the verdict on a gang whose host 0 was lost, where its restarts in place were used up before that."""
    if not records or records[-1].generation != generation or not contract.outcome(records[-1].verdict.code).in_place:
        return None
    move = next_move(records, in_place_limit, everyone_lives=True)
    return None if move.again else move.verdict


def given_up_unseen(generation: int, crash_limit: int, preempted_limit: int | None) -> Verdict | None:
    """Return the same of a trainer that keeps no checkpoints, and so no record of earlier pods.

    The restarts that brought it to `generation` beyond `crash_limit` were free.
    """
    free = generation - crash_limit
    if preempted_limit is None or free < preempted_limit:
        return None
    return _too_often_preempted(free, preempted_limit, None)


def _too_often_preempted(count: int, limit: int, last: Failure | None) -> Verdict:
    return verdict_for(Failure(FailureKind.PREEMPTED_TOO_OFTEN, count=count, limit=limit, cause=last))


def preemptions_without_progress(records: Sequence[Record]) -> int:
    """Count the attempts since the last newly committed step that were stopped from outside and left nothing."""
    fruitless = itertools.takewhile(lambda pair: not pair[1], zip(records[::-1], advanced(records)[::-1], strict=True))
    return sum(_is_uncharged(record) and not _may_have_progress(record) for record, _ in fruitless)


def _may_have_progress(record: Record) -> bool:
    """Return whether an attempt that reports no step ran for so long that its program has done something."""
    is_silent = record.verdict.step is None and record.last_committed is None
    # Before its processes start, an attempt only waits: every other cause has seconds only after that.
    has_only_waited = bool(record.seconds) and not any(
        spent for cause, spent in record.seconds.items() if cause not in _WAITS
    )
    return is_silent and not has_only_waited and record.ended - record.started > SILENT_PROGRESS_S


def restarts_by_cause(records: Sequence[Record], attempt: int | None = None) -> dict[str, int]:
    """Count the restarts, in place or with new pods, by the cause that ended the attempt before.

    Args:
        records: Attempts that ended, oldest first.
        attempt: Number of the newest attempt, which runs or waits for its hosts. None: the last record is of it.
    """
    if attempt is None and records:
        attempt = records[-1].attempt
    return dict(Counter(record.cause for record in records if attempt is not None and record.attempt < attempt))


def restart_count(generation: int, by_cause: Mapping[str, int] | None) -> int:
    """Return the number of restarts that every command, page and record shows.

    Args:
        generation: Number of the newest set of pods, from 0.
        by_cause: Restarts on record. Sets of pods that were lost before they wrote anything are in `generation` alone.
    """
    return max(generation, sum((by_cause or {}).values()))


def _since_progress(records: Sequence[Record]) -> Sequence[Record]:
    """Return the attempts from the last one that committed something new on, itself included."""
    last = max((index for index, is_ahead in enumerate(advanced(records)) if is_ahead), default=0)
    return records[last:]


def carried(records: Sequence[Record], now: float, started: float | None = None) -> dict[str, float]:
    """Return the seconds by cause that were spent until `now`, on attempts with a record and around them.

    What lies between attempts is down. Times are in Unix time. Without `started`, when the run did, it started with the
    first of these attempts, whose own seconds may not be known.
    """
    total = dict.fromkeys(contract.CLOCK, 0.0)
    for record in records:
        for cause, spent in record.seconds.items():
            total[cause] = total.get(cause, 0.0) + spent
    if started is None and records:
        started = min(records[0].started, records[0].ended - sum(records[0].seconds.values()))
    if started is not None:
        total["down" if records else "rendezvous"] += max(0.0, now - started - sum(total.values()))
    return total


def restarts(records: Sequence[Record], number: int, present: Mapping[str, float]) -> list[Restarted]:
    """Return a row for each of the last attempts that is on record, and for the `present` one, where it is not."""
    after: dict[int, str | None] = {record.attempt + 1: record.cause for record in records}
    seconds = {record.attempt: record.restart for record in records[-MAX_ROWS:]}
    if not records or records[-1].attempt != number:
        seconds[number] = present
    return [Restarted(attempt, after.get(attempt), spent) for attempt, spent in seconds.items() if spent]


def counters(records: Sequence[Record], generation: int, job: AgentJob) -> dict[str, Any]:
    """Return for the metrics of every agent: ends by cause, restarts left by limit, and the newest verdict's code.

    The end of the run counts among the ends, unlike among the restarts: alerts are about it too.
    """
    last_codes = {record.generation: record.verdict.code for record in records if record.generation != generation}
    charged = sum(contract.outcome(code).in_place for code in last_codes.values())
    used = restarts_used(records, generation)
    left = {"crash": max(0, job.crash_limit - charged), "in_place": max(0, job.in_place_limit - used)}
    if job.preempted_limit is not None:
        left["preempted"] = max(0, job.preempted_limit - preemptions_without_progress(records))
    return {
        "ended": dict(Counter(record.cause for record in records)),
        "left": left,
        "code": records[-1].verdict.code if records else None,
    }
