"""Errors that a user or an administrator can fix. Any other exception is our bug.

UserError            2  a file, an argument or a value of the user's
├── JobFaultsError   2  all that is wrong with one job.yaml, at once
└── ClusterError     3  the cluster cannot be reached, or refuses
    ├── ApiError          3  the API server refused: its own message
    └── UnreachableError  3  no answer came
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Path of a key, such as ("volumes", 0, "path").
KeyPath = tuple[str | int, ...]

# A file of another kind has a fault on every line, which would fill screens.
MAX_SHOWN_FAULTS = 50


def keys_overlap(first: KeyPath, second: KeyPath) -> bool:
    """Return whether two keys are the same, or one is below the other."""
    length = min(len(first), len(second))
    return first[:length] == second[:length]


class UserError(Exception):
    """What you can fix: `message` says what is wrong, and `hint` what to do.

    `exit_code` is that of the command which it ends: 2, or 3 where the cluster must be fixed.

    **Example:**

    ```python
    import jaxlaunch

    try:
        jaxlaunch.load("runs/nowhere")
    except jaxlaunch.UserError as error:
        print(error.message, error.hint)
    ```
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class ClusterError(UserError):
    """Ends the command with exit code 3: the cluster, not the job's file, must be fixed."""

    exit_code = 3


class ApiError(ClusterError):
    """The API server answered with an error: its own message is kept whole."""

    def __init__(
        self,
        message: str,
        hint: str | None,
        status: int,
        reason: str = "",
        details: Mapping[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint)
        # HTTP status, such as 403, 409 or 422.
        self.status = status
        # The reason in the answer, such as AlreadyExists, Forbidden or Invalid.
        self.reason = reason
        self.details = dict(details or {})
        # The header Retry-After of the response, if it has one.
        self.retry_after_s = retry_after_s


class UnreachableError(ClusterError):
    """No answer came. A request that was `sent` may have been carried out all the same."""

    def __init__(self, message: str, hint: str | None = None, *, sent: bool = False) -> None:
        super().__init__(message, hint)
        self.was_sent = sent


def exceeds_quota(fault: ClusterError) -> bool:
    """Return whether a ResourceQuota is used up.

    The server checks quotas first, also for objects that exist and in dry runs.
    """
    return isinstance(fault, ApiError) and fault.status == 403 and "exceeded quota" in fault.message


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a job: a message, and a hint."""

    path: KeyPath
    message: str
    hint: str | None = None
    # A place such as "job.yaml:14", or "train.steps=abc (override)".
    location: str = ""
    # The line by which faults are sorted.
    line: int = 0
    # All keys that the fault is about.
    related_paths: tuple[KeyPath, ...] = dataclasses.field(default=(), compare=False)
    # The .inf or .nan that is the value.
    not_finite: str | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        text = f"{self.location}: {self.message}"
        return text if self.hint is None else f"{text}\n  hint: {self.hint}"


class JobFaultsError(UserError):
    """All faults of a job, in the order of its lines."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: fault.line))
        shown = [str(fault) for fault in self.faults[:MAX_SHOWN_FAULTS]]
        super().__init__(
            "\n".join([*shown, "… and more."] if len(self.faults) > MAX_SHOWN_FAULTS else shown)
        )
