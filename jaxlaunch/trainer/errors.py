"""Errors that a user can fix, each with the exit code with which it ends a run.

Any other exception is a bug in this package or in user code: exit code 70 before the first step, 83
after it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxlaunch import contract


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 300 characters."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


def list_first(names: Iterable[str], max_names: int = 3) -> str:
    """Return the first names and the number of the others: `a, b, c and 2 more`."""
    names = list(names)
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def pydantic_message(error: Mapping[str, Any]) -> str:
    """Return the message of a pydantic error without its prefix `Value error, `."""
    return str(error["msg"]).removeprefix("Value error, ")


class TrainerError(Exception):
    """An error that you can fix: the message says what is wrong, where, and what to do.

    `code` is the exit code of a job that it ends: [exit codes](exit-codes.md).

    **Example:**

    ```python
    import jaxlaunch

    try:
        jaxlaunch.run(lambda state: (state, {}), lambda: {"n": 0}, steps=0)
    except jaxlaunch.TrainerError as error:
        assert error.code == 64
        print(error)  # jaxlaunch.run(steps=0): must be a whole number, at least 1
    ```
    """

    code = contract.CRASH


class SpecError(TrainerError):
    """The specification is wrong: exit code 64, no restart."""

    code = contract.BAD_SPEC


class DataError(TrainerError):
    """The data is missing, changed or unreadable: exit code 65, no restart."""

    code = contract.BAD_DATA


class NotFiniteError(TrainerError):
    """Loss or gradients are not finite: exit code 76, no restart."""

    code = contract.NOT_FINITE


class CheckpointError(TrainerError):
    """No checkpoint is usable, or another run owns the folder: exit code 78, no restart."""

    code = contract.NO_CHECKPOINT


class Stopped(TrainerError):  # noqa: N818  # public API
    """The run was stopped from outside: exit code 80, a restart without charge."""

    code = contract.PREEMPTED


class StorageError(TrainerError):
    """Storage failed while writing or reading: exit code 84, a restart."""

    code = contract.STORAGE
