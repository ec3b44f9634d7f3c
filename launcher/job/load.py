"""Dotted overrides from the command line: `train.steps=100` sets one value of a document, read as YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher import credentials, document
from launcher.document import AFTER_THE_FILE, Document
from launcher.errors import Fault, KeyPath
from launcher.wording import cut


def apply(to: Document, arguments: Sequence[str]) -> None:
    """Sets each argument in turn; one that cannot be set is a fault of the document."""
    for argument in arguments:
        message, hint = _set_argument(to, argument)
        if message:
            to.faults.append(Fault((), message, hint, where=f"{_shown(argument)} (override)", line=AFTER_THE_FILE))


def _set_argument(to: Document, argument: str) -> tuple[str, str | None]:
    """What is wrong with the argument and what to do, both empty when it is set."""
    key, equals, text = argument.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        return "is not of the form key=value.", "for example train.steps=100"
    value = document.parse(text, "override")
    if value.faults:
        return value.faults[0].message, f"""quote the value, and the whole for the shell: '{key}="…"'."""
    path = _path(key)
    if to.data is None:
        to.data = {}
    if not _set(to.data, path, value.data):
        return f"{key.rpartition('.')[0]} has no entry of that name.", "set the whole block instead, as {key: value}."
    to.forget(path)
    to.texts.update({path + below: source for below, source in value.texts.items()})
    to.overrides[path] = _shown(argument)
    return "", None


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))


def _set(data: Any, path: KeyPath, value: Any) -> bool:
    """Sets a value in plain data, making the blocks above it; False where a list or a scalar stands in the way."""
    for key in path[:-1]:
        if isinstance(data, dict):
            if data.get(str(key)) is None:
                data[str(key)] = {}
            data = data[str(key)]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return False
    last = path[-1]
    if isinstance(data, dict):
        data[str(last)] = value
    elif isinstance(data, list) and isinstance(last, int) and last < len(data):
        data[last] = value
    else:
        return False
    return True


def _shown(argument: str) -> str:
    """The argument as messages repeat it: without a value that may be a secret, and not at any length."""
    key, equals, text = argument.partition("=")
    if not equals:  # not even a key: what follows the first name may be the value
        return cut(argument) if not credentials.is_private(_path(key)) else f"{key.partition('.')[0]}…"
    hidden = credentials.is_private(_path(key)) or credentials.in_value(text)
    return f"{key}=…" if hidden else cut(argument)
