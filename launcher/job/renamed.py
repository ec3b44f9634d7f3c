"""Keys and values of job.yaml that have a new name: the old one is still read, and a sentence gives the new one.

A name stays here for one version, and then goes: what nobody knows any more is an error like any other unknown key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.wording import dotted
from jaxlaunch.launcher.yaml12.reader import Document
from jaxlaunch.trainer.spec import task_name

UNTIL = "0.3"

# The path of a block or a value: the path that it has now.
KEYS: Mapping[KeyPath, KeyPath] = {("budgets",): ("timeouts",)}

# The path of a value: what gives the value's new name, and returns any other as it is.
VALUES: Mapping[KeyPath, Callable[[Any], Any]] = {("train", "task"): task_name}

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


def rename_keys(source: Document, say: Say) -> None:
    """Moves what a document has under old keys to the new ones; a fault of the document where it has both."""
    for old, new in KEYS.items():
        above = _at(source.data, old[:-1])
        if not isinstance(above, dict) or old[-1] not in above:
            continue
        if _has(source.data, new):
            message = f"{dotted(old)} and {dotted(new)} are both given."
            hint = f"keep {dotted(new)}, which is the new name of {dotted(old)}."
            source.faults.append(Fault(old, message, hint))
        else:
            say(f"{_where(source, old)}: {sentence(dotted(old), dotted(new))}")
            _put(source.data, new, above.pop(old[-1]))
            source.move(old, new)


def rename_values(source: Document, say: Say) -> None:
    """Replaces values by their new names."""
    for where, renamed in VALUES.items():
        above = _at(source.data, where[:-1])
        old = above.get(where[-1]) if isinstance(above, dict) else None
        if (new := renamed(old)) != old:
            say(f"{_where(source, where)}: {sentence(f'{dotted(where)} = {old}', new)}")
            above[where[-1]] = new


def _where(source: Document, at: KeyPath) -> str:
    return source.locate(Fault(at, "")).where


def _at(data: Any, at: KeyPath) -> Any:
    for key in at:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _has(data: Any, at: KeyPath) -> bool:
    above = _at(data, at[:-1])
    return isinstance(above, dict) and at[-1] in above


def _put(data: Any, at: KeyPath, value: Any) -> None:
    for key in at[:-1]:
        data = data.setdefault(key, {})
    data[at[-1]] = value
