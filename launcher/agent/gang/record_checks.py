"""The forms of records: lines of a log, termination messages, files of the run folder. Pure.

A program beside the agent may write each of them, and so may who shares the storage. What has another form is no
record: readers sort, add and compare its values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch.launcher.agent.gang.progress import MAX_NUMBER
from jaxlaunch.launcher.agent.io import wire

MAX_RECORD = 256 * 1024  # bytes; our longest texts are cut to some thousands of characters
FAR_S = 60_000_000_000  # seconds; as Unix time the year 3871: beyond 9999 there is no datetime

Form = Callable[[Any], bool]


def read(data: bytes | str) -> dict[str, Any] | None:
    """The object in a record of JSON; None where it is none, or longer than MAX_RECORD."""
    if len(data) > MAX_RECORD:
        return None
    line = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    try:
        value = wire.decoded(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def whole(value: Any) -> bool:
    """A number of steps, attempts, ranks or hosts; a bool is none."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


def seconds(value: Any) -> bool:
    """A time span or a Unix time."""
    return type(value) in (int, float) and abs(value) <= FAR_S


def or_none(form: Form) -> Form:
    """That form, or null."""
    return lambda value: value is None or form(value)


def each(form: Form) -> Form:
    """A list of values of that form."""
    return lambda value: isinstance(value, list) and all(map(form, value))


def named(form: Form = lambda value: True) -> Form:
    """An object whose values have that form."""
    return lambda value: isinstance(value, dict) and all(map(form, value.values()))


def record(needed: Mapping[str, Form], others: Mapping[str, Form] | None = None) -> Form:
    """An object with the `needed` fields, and perhaps `others`, each of its form; unknown fields may have any."""
    known = {**needed, **(others or {})}
    return lambda value: (
        isinstance(value, dict)
        and needed.keys() <= value.keys()
        and all(form(value[name]) for name, form in known.items() if name in value)
    )


VERDICT = record(
    {"cause": text, "code": lambda value: whole(value) and value <= 255, "message": text},
    {"rank": or_none(whole), "host": or_none(whole), "step": or_none(whole), "traceback": or_none(text)},
)
