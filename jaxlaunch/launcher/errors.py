"""Errors that a user or an administrator can fix. Any other exception is our bug.

The number is the exit code of the command that the error ends.

UserError                2  a file, an argument or a value of the user is wrong
├── JobFaultsError       2  all faults of one job.yaml
├── JobFailedError          the exit code of the job
├── WaitTimeoutError   124  a job has not ended in time
└── ClusterError         3  the cluster cannot be reached, or rejects a request
    ├── ApiError         3  the API server answered with an error
    └── UnreachableError 3  the API server did not answer
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# Path of a key, such as ("volumes", 0, "path").
KeyPath = tuple[str | int, ...]

# A file that is not a job has a fault on nearly every line.
MAX_SHOWN_FAULTS = 50


def keys_overlap(first: KeyPath, second: KeyPath) -> bool:
    """Return whether two keys are the same, or one is below the other."""
    length = min(len(first), len(second))
    return first[:length] == second[:length]


class UserError(Exception):
    """An error that you can fix: `message` says what is wrong, and `hint` what to do.

    `exit_code` is the exit code of a command that fails with it: 2, or 3 if the cluster must be
    fixed.

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


class JobFailedError(UserError):
    """A job has failed, or was stopped. `exit_code` is its [exit code](exit-codes.md).

    `verdict` has the cause, the code, the message, the rank and the traceback, as in `launcher
    status -o json`; None if it is not known.

    **Example:**

    ```python
    import jaxlaunch

    job = jaxlaunch.Job(
        name="fails",
        accelerator="cpu",
        restarts={"crash": 0, "in_place": 0},
        command=["python", "-c", "raise OSError"],
    )
    try:
        job.run()
    except jaxlaunch.JobFailedError as error:
        print(error.exit_code, error.verdict["rank"])
    ```
    """

    def __init__(
        self, message: str, exit_code: int, verdict: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.verdict = verdict


class WaitTimeoutError(UserError):
    """A job has not ended in time, and continues. `exit_code` is 124.

    **Example:**

    ```python
    import jaxlaunch

    assert jaxlaunch.WaitTimeoutError.exit_code == 124
    ```
    """

    exit_code = 124


class ClusterError(UserError):
    """The cluster must be fixed, and not the job's file. The command ends with exit code 3."""

    exit_code = 3


class ApiError(ClusterError):
    """The API server answered with an error, whose message is shown unchanged."""

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
        # The HTTP status, such as 403, 409 or 422.
        self.status = status
        # The reason of the status, such as AlreadyExists, Forbidden or Invalid.
        self.reason = reason
        self.details = dict(details or {})
        # The header Retry-After of the response, if it has one.
        self.retry_after_s = retry_after_s


class UnreachableError(ClusterError):
    """The server did not answer. If `was_sent`, it may still have processed the request."""

    def __init__(self, message: str, hint: str | None = None, *, sent: bool = False) -> None:
        super().__init__(message, hint)
        self.was_sent = sent


def exceeds_quota(error: ClusterError) -> bool:
    """Return whether a ResourceQuota rejected the request.

    The server checks quotas before anything else, even for objects that exist and in dry runs.
    """
    return isinstance(error, ApiError) and error.status == 403 and "exceeded quota" in error.message


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a job: a message, and a hint.

    Attributes:
        path: Path of the key that is wrong.
        message: Sentence that says what is wrong.
        hint: Advice on how to fix it.
        location: Place such as "job.yaml:14", or "train.steps=abc (override)".
        line: Line by which faults are sorted.
        related_paths: All keys that the check compared.
        not_finite: The value as written if it is .inf or .nan.
    """

    path: KeyPath
    message: str
    hint: str | None = None
    location: str = ""
    line: int = 0
    related_paths: tuple[KeyPath, ...] = dataclasses.field(default=(), compare=False)
    not_finite: str | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        text = f"{self.location}: {self.message}"
        return text if self.hint is None else f"{text}\n  hint: {self.hint}"


class JobFaultsError(UserError):
    """The faults of a job, sorted by line."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: fault.line))
        texts = [str(fault) for fault in self.faults[:MAX_SHOWN_FAULTS]]
        super().__init__(
            "\n".join([*texts, "… and more."] if len(self.faults) > MAX_SHOWN_FAULTS else texts)
        )
