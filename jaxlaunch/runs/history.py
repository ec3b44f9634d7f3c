"""Whether to restart after an attempt, in place or at all. Pure functions of the records in attempts.jsonl."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action, AgentJob
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.failure import Failure, FailureKind
from jaxlaunch.records.summary import Restarted
from jaxlaunch.records.verdict import Verdict, verdict_for_code

MAX_GENERATIONS_WITHOUT_PROGRESS = 3  # in a row; then the verdict is NO_PROGRESS
AT_ONCE_S = 600.0  # a program that ran longer has done something, although it reported nothing
_WAITS = ("rendezvous", "down")  # of contract.CLOCK: no process runs
_PLACE = re.compile(r'^ *File ".*", line \d+.*$', re.MULTILINE)  # of a traceback; the last is where it was raised
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")  # addresses, pids, times: not what an exception says


@dataclasses.dataclass(frozen=True)
class Next:
    """What follows an attempt: another in place, or the end with this verdict."""

    again: bool
    verdict: Verdict


def advanced(records: Sequence[Record]) -> list[bool]:
    """Of each attempt, whether it committed a step beyond those of all attempts before it."""
    best, result = -1, []
    for record in records:
        step = -1 if record.last_committed is None else record.last_committed
        result.append(step > best and record.first_committed is not None)
        best = max(best, step)
    return result


def next_move(records: Sequence[Record], in_place_limit: int, everyone_lives: bool) -> Next:
    """What follows the last of `records`, all of one uid. The first error since the last progress is reported, unless
    the last one alone tells why no other attempt helps."""
    last = records[-1]
    verdict = last.verdict
    outcome = contract.outcome(verdict.code)
    if not outcome.in_place:
        return Next(False, verdict)
    if _has_repeated(records):
        last_line = "" if verdict.failure.kind is FailureKind.EXCEPTION else _last_line(verdict)[:300]
        facts = Failure(FailureKind.REPEATED, cause=verdict.facts, detail=last_line)
        repeated = verdict_for_code(
            contract.STARTUP, facts, rank=verdict.rank, host=verdict.host, traceback=verdict.traceback
        )
        return Next(False, repeated)
    if verdict.is_full_disk:
        return Next(False, verdict)  # whatever came before it: this is what to mend
    if everyone_lives and restarts_before(records) < in_place_limit:
        return Next(True, verdict)
    first = first_error(records)
    count = generations_without_progress(records)
    if count >= MAX_GENERATIONS_WITHOUT_PROGRESS:
        facts = Failure(FailureKind.NO_PROGRESS, count=count, cause=first.facts)
        given_up = verdict_for_code(
            contract.NO_PROGRESS, facts, rank=first.rank, host=first.host, step=first.step, traceback=first.traceback
        )
        return Next(False, given_up)
    return Next(False, first)


def saved(records: Sequence[Record], generation: int = 0) -> int | None:
    """The newest step that these attempts saved, 0 where they trained and saved none; None: none of them trained.

    Where new pods have no record of those before them, 0: what keeps a run from training leads to no new pods.
    """
    if generation and not records:
        return 0
    steps = [record.last_committed for record in records if record.last_committed is not None]
    has_trained = any(record.seconds.get(cause) for record in records for cause in ("step", "lost_work"))
    return max(steps, default=0 if has_trained else None)


def _has_repeated(records: Sequence[Record]) -> bool:
    """Whether the last two attempts failed at once and alike, before any progress: a third would fail too."""
    failures = [_failure(record) for record in records[-2:]]
    return len(failures) == 2 and failures[0] is not None and failures[0] == failures[1]


def _failure(record: Record) -> tuple[Failure, str] | None:
    """What failed and where, whichever the rank was; None where there was progress, or where it may pass by itself."""
    verdict, failure = record.verdict, dataclasses.replace(record.verdict.failure, rank=None)
    has_progress = record.last_committed is not None or verdict.step is not None
    is_silent_progress = record.ended - record.started > AT_ONCE_S
    if verdict.code != contract.CRASH or has_progress or is_silent_progress or failure.may_pass:
        return None
    if failure.kind is not FailureKind.EXCEPTION:
        return failure, _last_line(verdict)
    failure = failure.with_texts(lambda text: _NUMBER.sub("#", text))
    return failure, next(reversed(_PLACE.findall(verdict.traceback or "")), "")


def _last_line(verdict: Verdict) -> str:
    """What the program printed last."""
    return (verdict.traceback or "").strip().rpartition("\n")[2]


def restarts_before(records: Sequence[Record]) -> int:
    """Restarts in place that led to the last record without a newly committed step."""
    return 0 if advanced(records)[-1] else restarts_used(records[:-1], records[-1].generation)


def restarts_used(records: Sequence[Record], generation: int) -> int:
    """Restarts in place of `generation` since the last newly committed step, the one after the last record included.
    Those after a preemption are not charged."""
    return sum(record.generation == generation and not _is_uncharged(record) for record in _since_progress(records))


def is_done(records: Sequence[Record]) -> bool:
    """Whether the run has finished: an agent that takes another's place then has nothing to do."""
    return bool(records) and records[-1].verdict.code == contract.DONE


def _is_uncharged(record: Record) -> bool:
    return contract.outcome(record.verdict.code).action is Action.RESTART_UNCHARGED


def first_error(records: Sequence[Record]) -> Verdict:
    """The first error since the last newly committed step."""
    faults = [record for record in _since_progress(records) if contract.outcome(record.verdict.code).in_place]
    return faults[0].verdict


def generations_without_progress(records: Sequence[Record]) -> int:
    """Generations in a row, the last one included, that committed no new step; those that were stopped do not count."""
    with_progress = {record.generation for record, ahead in zip(records, advanced(records), strict=True) if ahead}
    ends = {record.generation: record.verdict.code for record in records}
    count = 0
    for generation in sorted(ends, reverse=True):
        if generation in with_progress:
            break
        count += contract.outcome(ends[generation]).action is not Action.RESTART_UNCHARGED
    return count


def given_up(records: Sequence[Record], generation: int, preempted_limit: int | None) -> Verdict | None:
    """The verdict on pods of `generation` that have not started yet, where the attempts before them used up what may
    pass without progress: pods that were lost or preempted could not say so. None: they may start."""
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
    """The verdict on a gang whose host 0 was lost, where its restarts in place were used up before that."""
    if not records or records[-1].generation != generation or not contract.outcome(records[-1].verdict.code).in_place:
        return None
    move = next_move(records, in_place_limit, everyone_lives=True)
    return None if move.again else move.verdict


def given_up_unseen(generation: int, crash_limit: int, preempted_limit: int | None) -> Verdict | None:
    """The same of a trainer that keeps no checkpoints, and so no record of earlier pods: the restarts that brought it
    to `generation` beyond `crash_limit` were free."""
    free = generation - crash_limit
    if preempted_limit is None or free < preempted_limit:
        return None
    return _too_often_preempted(free, preempted_limit, None)


def _too_often_preempted(count: int, limit: int, last: Failure | None) -> Verdict:
    facts = Failure(FailureKind.PREEMPTED_TOO_OFTEN, count=count, limit=limit, cause=last)
    return verdict_for_code(contract.NO_PROGRESS, facts)


def preemptions_without_progress(records: Sequence[Record]) -> int:
    """Attempts since the last newly committed step that were stopped from outside."""
    fruitless = itertools.takewhile(lambda pair: not pair[1], zip(records[::-1], advanced(records)[::-1], strict=True))
    return sum(_is_fruitless_preemption(record) for record, _ in fruitless)


def _is_fruitless_preemption(record: Record) -> bool:
    """Whether an attempt was stopped and left nothing. A program that reports no step has, once it ran for long."""
    verdict = record.verdict
    is_silent = verdict.step is None and record.last_committed is None
    has_run = is_silent and not _has_only_waited(record) and record.ended - record.started > AT_ONCE_S
    return _is_uncharged(record) and not has_run


def _has_only_waited(record: Record) -> bool:
    """Whether an attempt ended before its processes started: every other cause has seconds only after that."""
    return bool(record.seconds) and not any(spent for cause, spent in record.seconds.items() if cause not in _WAITS)


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
    """The attempts from the last one that committed something new on, itself included."""
    ahead = advanced(records)
    last = max((index for index, is_ahead in enumerate(ahead) if is_ahead), default=0)
    return records[last:]


MAX_ROWS = 50  # restarts in a summary, the newest: attempts.jsonl has all


def carried(records: Sequence[Record], now: float, started: float | None = None) -> dict[str, float]:
    """Seconds by cause that were spent until `now`, on attempts with a record and around them; in Unix time.

    What lies between attempts is down. Without `started`, when the run did, it started with the first of these
    attempts, whose own seconds may not be known.
    """
    total = dict.fromkeys(contract.CLOCK, 0.0)
    for each in records:
        for cause, spent in each.seconds.items():
            total[cause] = total.get(cause, 0.0) + spent
    if started is None and records:
        started = min(records[0].started, records[0].ended - sum(records[0].seconds.values()))
    if started is not None:
        total["down" if records else "rendezvous"] += max(0.0, now - started - sum(total.values()))
    return total


def restarts(records: Sequence[Record], number: int, present: Mapping[str, float]) -> list[Restarted]:
    """A row for each of the last attempts that is on record, and for the `present` one, where it is not."""
    after: dict[int, str | None] = {each.attempt + 1: each.cause for each in records}
    rows = [Restarted(each.attempt, after.get(each.attempt), each.restart) for each in records[-MAX_ROWS:]]
    has_ended = bool(records) and records[-1].attempt == number
    rows += [] if has_ended else [Restarted(number, after.get(number), present)]
    return [row for row in rows if row.seconds]


def counters(records: Sequence[Record], generation: int, job: AgentJob) -> dict[str, Any]:
    """For the metrics of every agent: ends by cause, restarts left by limit, and the newest verdict's code.

    The end of the run counts among the ends, unlike among the restarts: alerts are about it too.
    """
    last_codes = {each.generation: each.verdict.code for each in records if each.generation != generation}
    charged = sum(contract.outcome(code).action is Action.RESTART for code in last_codes.values())
    used = restarts_used(records, generation)
    left = {"crash": max(0, job.crash_limit - charged), "in_place": max(0, job.in_place_limit - used)}
    if job.preempted_limit is not None:
        left["preempted"] = max(0, job.preempted_limit - preemptions_without_progress(records))
    return {
        "ended": dict(Counter(record.cause for record in records)),
        "left": left,
        "code": records[-1].verdict.code if records else None,
    }
