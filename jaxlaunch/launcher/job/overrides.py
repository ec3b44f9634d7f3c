"""Dotted overrides from the command line: `train.steps=100` sets one value, read as YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job import credentials, introspection
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.wording import cut, dotted
from jaxlaunch.launcher.yaml import reader
from jaxlaunch.launcher.yaml.reader import AFTER_THE_FILE


@dataclasses.dataclass(frozen=True)
class Override:
    """One argument, read."""

    path: KeyPath
    value: Any
    texts: Mapping[KeyPath, str]  # of the value's plain scalars, by their path in the job
    shown: str  # the argument as messages repeat it


def read(argument: str) -> Override | Fault:
    """What an argument sets; a fault where it cannot be read."""
    try:
        argument = argument.encode(errors="surrogateescape").decode()  # in a C locale Python reads bytes as ASCII
    except UnicodeError:  # a byte of the command line that is none of its encoding
        legible = argument.encode(errors="replace").decode()
        return _fault(_shown(legible), "is not UTF-8.", "check how the shell writes it.")
    key, equals, text = argument.partition("=")
    if key.startswith("-"):
        hint = "a key has none, as in hosts=2; arguments of your program belong in its command:."
        return _fault(_shown(argument), "begins with a dash.", hint)
    if not equals or not all(part.strip() for part in key.split(".")):
        return _fault(_shown(argument), "is not of the form key=value.", "for example hosts=2")
    path = _path(key)
    value = reader.parse(text, "override", path)
    if value.faults:
        first = value.faults[0]
        hint = f"""quote the value, and the whole for the shell: '{key}="…"'."""
        return dataclasses.replace(first, where=f"{_shown(argument)} (override)", line=AFTER_THE_FILE, hint=hint)
    return Override(path, value.data, value.texts, _shown(argument))


def written(key: str, value: Any) -> str:
    """The argument that sets a key to a value, before a shell's quotes."""
    if isinstance(value, Mapping):
        value = "{" + ", ".join(f"{name}: {item}" for name, item in value.items()) + "}"
    elif isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    return f"{key}={value}"


def put(override: Override, data: Any) -> Fault | None:
    """Set the value in plain data, with the blocks above it; return a fault where a list or a scalar is in the way."""
    path = override.path
    for depth, key in enumerate(path):
        is_last = depth == len(path) - 1
        if isinstance(data, dict):
            key = str(key)
            if not is_last and data.get(key) is None:
                if _is_list(path[: depth + 1]):
                    return _no_entry(override, depth + 1)
                data[key] = {}
        elif not (isinstance(data, list) and isinstance(key, int) and key < len(data)):
            return _no_entry(override, depth)
        if is_last:
            data[key] = override.value
        data = data[key]
    return None


def _is_list(path: KeyPath) -> bool:
    return any(kind.items is not None for kind in introspection.at(JobSpec, path))


def _no_entry(override: Override, depth: int) -> Fault:
    above, key = override.path[:depth], override.path[depth]
    whole = "list instead, as [value]" if _is_list(above) else "block instead, as {key: value}"
    return _fault(override.shown, f"{dotted(above)} has no entry {cut(str(key))}.", f"set the whole {whole}.")


def _fault(shown: str, message: str, hint: str | None) -> Fault:
    return Fault((), message, hint, where=f"{shown} (override)", line=AFTER_THE_FILE)


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))


def _shown(argument: str) -> str:
    """Return the argument as messages repeat it: cut, and without a value that may be a secret."""
    key, equals, text = argument.partition("=")
    if not equals:  # not even a key: what follows the first name may be the value
        return cut(argument) if not credentials.is_private(_path(key)) else f"{key.partition('.')[0]}…"
    hidden = credentials.is_private(_path(key)) or credentials.in_value(text)
    return f"{key}=…" if hidden else cut(argument)
