"""Keys and values of job.yaml that have a new name: the old one is still read, and a sentence gives the new one. Pure.

A name stays here for one version, and then goes: what nobody knows any more is an error like any other unknown key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch.launcher.errors import KeyPath

UNTIL = "0.3"

# The path of a block or a value: the path that it has now.
KEYS: Mapping[KeyPath, KeyPath] = {("budgets",): ("timeouts",)}


def _task_name(given: Any) -> Any:
    from jaxlaunch.trainer.spec import task_name  # most commands read no job, and pydantic is half of a start

    return task_name(given)


# The path of a value: what gives the value's new name, and returns any other as it is.
VALUES: Mapping[KeyPath, Callable[[Any], Any]] = {("train", "task"): _task_name}

Say = Callable[[str], None]


def sentence(old: str, new: str) -> str:
    """What tells a user of an old name."""
    return f"{old} is now {new}; the old name is read until version {UNTIL}."


def path(given: KeyPath) -> KeyPath:
    """The path of a key now, which may be below one that was renamed."""
    for old, new in KEYS.items():
        if given[: len(old)] == old:
            return (*new, *given[len(old) :])
    return given
