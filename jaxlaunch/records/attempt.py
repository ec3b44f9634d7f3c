"""The record of an attempt that ended: one line of attempts.jsonl. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlaunch.records import checked
from jaxlaunch.records.checked import Cause, Seconds, Time, Whole
from jaxlaunch.records.members import Wire
from jaxlaunch.records.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class Record:
    """An attempt that ended. What it restored is not among what it committed."""

    uid: str
    generation: Whole
    attempt: Whole
    cause: Cause
    rank: Whole | None
    first_committed: Whole | None  # in this attempt
    last_committed: Whole | None
    seconds: Mapping[str, Seconds]  # by contract.CLOCK, this attempt only
    verdict: Verdict
    started: Time
    ended: Time
    restart: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)  # that led to it, by contract.RESTART
    members: Wire | None = None  # which hosts held its ranks; None: each its own, or not known

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        fields: dict[str, Any] = checked.to_json(self)
        return fields


def furthest(*steps: int | None) -> int | None:
    """The highest of the steps that are known."""
    return max((step for step in steps if step is not None), default=None)
