"""What past attempts teach: whether to start again, in place or at all. Pure folds over attempts.jsonl."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.agent.verdict import Verdict, of_code
from trainer import contract
from trainer.contract import Action

FRUITLESS_GENERATIONS = 3  # in a row without a newly committed step: then no progress is the verdict


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of attempts.jsonl: an attempt that ended."""

    uid: str
    generation: int
    attempt: int
    cause: str
    rank: int | None
    first_committed: int | None  # in this attempt
    last_committed: int | None
    seconds: Mapping[str, float]  # by contract.CLOCK, this attempt only
    verdict: Mapping[str, Any]
    started: float  # Unix time
    ended: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """Raises KeyError when a field is missing; one that is not known is left out."""
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True)
class Next:
    """What follows an attempt: another in place, or the end with this verdict."""

    again: bool
    verdict: Verdict


def advanced(records: Sequence[Record]) -> list[bool]:
    """Of each attempt, whether it committed a step that none before it had."""
    best, result = -1, []
    for record in records:
        step = -1 if record.last_committed is None else record.last_committed
        result.append(step > best)
        best = max(best, step)
    return result


def next_move(records: Sequence[Record], in_place_budget: int, everyone_lives: bool) -> Next:
    """What follows the last of `records`, all of one uid. The first error since the last progress is reported."""
    last = records[-1]
    verdict = Verdict.from_json(last.verdict)
    outcome = contract.outcome(verdict.code)
    if not outcome.in_place:
        return Next(False, verdict)
    if everyone_lives and restarts_before(records) < in_place_budget:
        return Next(True, verdict)
    first = first_error(records)
    fruitless = fruitless_generations(records)
    if fruitless >= FRUITLESS_GENERATIONS:
        message = f"no newly committed step in {fruitless} generations; the first error was: {first.message}"
        where = {"rank": first.rank, "host": first.host, "step": first.step, "traceback": first.traceback}
        return Next(False, of_code(contract.NO_PROGRESS, message, **where))
    return Next(False, first)


def restarts_before(records: Sequence[Record]) -> int:
    """Restarts in place that led to the last record without a newly committed step."""
    return 0 if advanced(records)[-1] else restarts_used(records[:-1], records[-1].generation)


def restarts_used(records: Sequence[Record], generation: int) -> int:
    """Restarts in place of `generation` since the last newly committed step, the one after the last record included."""
    return sum(record.generation == generation for record in _since_progress(records))


def first_error(records: Sequence[Record]) -> Verdict:
    """The verdict that began the row of failures which the last record ends."""
    faults = [record for record in _since_progress(records) if contract.outcome(record.verdict["code"]).in_place]
    return Verdict.from_json(faults[0].verdict)


def fruitless_generations(records: Sequence[Record]) -> int:
    """Generations in a row, the last one included, that committed nothing new. Those that were stopped do not count."""
    fruitful = {record.generation for record, ahead in zip(records, advanced(records), strict=True) if ahead}
    ends = {record.generation: record.verdict["code"] for record in records}
    count = 0
    for generation in sorted(ends, reverse=True):
        if generation in fruitful:
            break
        count += contract.outcome(ends[generation]).action is not Action.RESTART_UNCHARGED
    return count


def ends_by_cause(records: Sequence[Record]) -> dict[str, int]:
    """How many attempts each cause ended."""
    return dict(Counter(record.cause for record in records))


def restarts_by_cause(records: Sequence[Record]) -> dict[str, int]:
    """How often each cause was followed by another start."""
    return ends_by_cause(records[:-1])


def _since_progress(records: Sequence[Record]) -> Sequence[Record]:
    """The attempts from the last one that committed something new on, itself included."""
    ahead = advanced(records)
    last = max((index for index, is_ahead in enumerate(ahead) if is_ahead), default=0)
    return records[last:]
