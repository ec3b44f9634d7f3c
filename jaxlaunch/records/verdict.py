"""A verdict: how an attempt or a run ended, and where the cause was. launcher/agent/gang/verdict decides it. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxlaunch import contract
from jaxlaunch.records import checked, messages
from jaxlaunch.records.checked import Cause, ExitCode, Whole
from jaxlaunch.records.failure import Failure, FailureKind


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How it ended, as in summary.json, attempts.jsonl, log lines and messages between agents.

    `message` is `failure` as a sentence for people: no decision reads it.
    """

    cause: Cause
    code: ExitCode
    message: str
    rank: Whole | None = None
    host: Whole | None = None
    step: Whole | None = None
    traceback: str | None = None
    failure: Failure = Failure(FailureKind.OTHER)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        fields: dict[str, Any] = checked.to_json(self)
        return fields

    @property
    def is_full_disk(self) -> bool:
        """Whether storage failed for want of space, or a pod took too much: the next attempt finds it as full."""
        return self.code == contract.STORAGE and self.failure.is_storage_full

    @property
    def facts(self) -> Failure:
        """Return the failure, or one with the message as its detail for a verdict without facts."""
        if self.failure.kind is FailureKind.OTHER:
            return Failure(FailureKind.OTHER, detail=self.message)
        return self.failure

    def with_failure(self, failure: Failure) -> Verdict:
        """Return the verdict with other facts, and the sentence for them."""
        return dataclasses.replace(self, failure=failure, message=messages.render(failure))

    def cut(self, chars: int, fact_chars: int | None = None) -> Verdict:
        """Return the verdict with its message cut to `chars` characters and each text of its facts to `fact_chars`."""
        limit = chars if fact_chars is None else min(chars, fact_chars)
        failure = Failure(FailureKind.OTHER)
        if chars:
            # There may be 50 refusals, which the message has too: their sum is what would leave no space for it.
            failure = self.failure.without_refusals().with_texts(lambda text: text[:limit])
        return dataclasses.replace(self, message=self.message[:chars], failure=failure)


def verdict_for_code(
    code: int,
    reason: Failure | str,
    *,
    rank: int | None = None,
    host: int | None = None,
    step: int | None = None,
    traceback: str | None = None,
) -> Verdict:
    """Return the verdict for an exit code, whose row in contract.OUTCOMES has its cause.

    `reason` is a sentence where no decision needs more than the code.
    """
    if isinstance(reason, str):
        message, failure = reason, Failure(FailureKind.OTHER)
    else:
        message, failure = messages.render(reason), reason
    return Verdict(contract.outcome(code).cause, code, message, rank, host, step, traceback, failure)
