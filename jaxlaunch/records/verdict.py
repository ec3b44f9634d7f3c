"""A verdict: how an attempt or a run ended, and where the cause was. launcher/agent/gang/verdict decides it. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.records.checked import Cause, ExitCode, Whole

FULL_DISK = re.compile(
    r"no space left on device|disk quota exceeded|of ephemeral storage|\b(ENOSPC|EDQUOT)\b", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How it ended, as in summary.json, attempts.jsonl, log lines and messages between agents."""

    cause: Cause
    code: ExitCode
    message: str
    rank: Whole | None = None
    host: Whole | None = None
    step: Whole | None = None
    traceback: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return dict(vars(self))


def of_code(code: int, message: str, **where: Any) -> Verdict:
    """A verdict whose cause is its code's."""
    return Verdict(contract.outcome(code).cause, code, message, **where)


def is_full_disk(verdict: Verdict) -> bool:
    """Whether storage failed for want of space, or a pod took too much: it will be as full at the next attempt."""
    return verdict.code == contract.STORAGE and FULL_DISK.search(verdict.message) is not None


def names(numbers: Sequence[int], noun: str = "host") -> str:
    """ "host 3" or "hosts 2, 5"; after 20 the list is cut."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown = ", ".join(map(str, numbers[:20]))
    return f"{noun}s {shown}" + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
