"""Errors that a person can fix, each with the exit code of the contract that it ends a run with.

Any other exception is a bug, ours or the user's: 70 before the first step, 83 after it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxlaunch import contract


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 300 characters."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


def list_first(names: Iterable[str], max_names: int = 3) -> str:
    """Return the first names of a list, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def pydantic_message(fault: Mapping[str, Any]) -> str:
    """Return the message of a pydantic error without the prefix of a ValueError."""
    return str(fault["msg"]).removeprefix("Value error, ")


class TrainerError(Exception):
    """What you can fix in a run or a call: the message says what is wrong, where, and what to do.

    `code` is the exit code that it ends a job with: [exit codes](exit-codes.md).

    **Example:**

    ```python
    import jaxlaunch

    try:
        jaxlaunch.run(lambda state: (state, {}), lambda: {"n": 0}, steps=0)
    except jaxlaunch.TrainerError as error:
        assert error.code == 64
        print(error)  # jaxlaunch.run(steps=0): a whole number from 1 on
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
