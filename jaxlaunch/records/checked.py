"""Turns JSON that others wrote into records: dataclasses whose annotations say what each field may hold. Pure.

A program beside the agent may write what is read here, and so may whoever shares the storage or may change the JobSet.
A field may be left out where it has a default, and fields that are not known are ignored: they are a newer version's.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from jaxlaunch.records import wire

MAX_RECORD = 256 * 1024  # bytes of JSON; our longest texts are cut to some thousands of characters
MAX_NUMBER = 2**63 - 1  # of steps and exit codes: a float holds it, and so do the readers of metrics
FAR_S = 60_000_000_000  # seconds; as Unix time the year 3871: beyond 9999 there is no datetime
MAX_SHOWN = 200  # characters of a wrong value, in a message

Reader = Callable[[Any], Any]  # returns what a record holds of a value, or raises Malformed
R = TypeVar("R")


class Malformed(ValueError):
    """A value that is not what its record says: which `field` it is of, and what it must be."""

    def __init__(self, needed: str, value: Any) -> None:
        super().__init__(needed, value)
        self.needed, self.value, self.field = needed, value, ""

    def __str__(self) -> str:
        return f"{self.field or 'it'} must be {self.needed}, not {shown(self.value)}"


def shown(value: Any) -> str:
    """A wrong value, at a length that a message can hold."""
    return repr(value)[:MAX_SHOWN]


# --- what an annotation may add to a type: Annotated[int, within(0, 255)] ---------------------------------------------


@dataclasses.dataclass(frozen=True)
class within:
    """A number in these bounds, so not NaN."""

    least: float
    most: float

    def of(self, kind: type, read_plain: Reader) -> Reader:
        """What reads such a number: one call for each, because a folder of ten thousand runs has a million."""
        kinds, least, most = (int,) if kind is int else (int, float), self.least, self.most

        def checked(value: Any) -> Any:
            if type(value) in kinds and least <= value <= most:
                return value
            raise Malformed(f"a number from {least} {'on' if most == MAX_NUMBER else f'to {most}'}", read_plain(value))

        return checked


def at_most(count: int) -> Reader:
    """A text of so many characters, or an object of so many values."""
    return _holds(lambda value: len(value) <= count, f"no longer than {count}")


def like(pattern: str) -> Reader:
    """A text that the pattern describes."""
    return _holds(lambda value: re.fullmatch(pattern, value) is not None, f"a text like {pattern}")


def cut(chars: int) -> Reader:
    """The first characters of a text, or its last where the number is negative."""
    return lambda text: text[:chars] if chars >= 0 else text[chars:]


def _holds(is_right: Callable[[Any], bool], needed: str) -> Reader:
    def checked(value: Any) -> Any:
        if is_right(value):
            return value
        raise Malformed(needed, value)

    return checked


Whole = Annotated[int, within(0, MAX_NUMBER)]  # steps, attempts, ranks, hosts
Exit = Annotated[int, within(-127, 255)]  # an exit code, or minus the signal: 128 and that is an exit code too
ExitCode = Annotated[int, within(0, 255)]
Seconds = Annotated[float, within(-FAR_S, FAR_S)]  # a time span
Time = Annotated[float, within(0, FAR_S)]  # Unix time
Cause = Annotated[str, like("[a-z_]{1,32}")]  # of contract.OUTCOMES, or of a newer version's


class Sparse:
    """A record of which JSON has only the fields that differ from their defaults."""


# --- reading ----------------------------------------------------------------------------------------------------------


def decoded(data: bytes | str) -> Any:
    """The value in a record of JSON. Raises ValueError where it is none, or longer than MAX_RECORD."""
    if len(data) > MAX_RECORD:
        raise ValueError(f"it is longer than {MAX_RECORD} bytes")
    return wire.decoded(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


def number_in(data: str, key: str) -> int | None:
    """The whole number of a key in a record of JSON; None where there is none."""
    try:
        found: int = reader(Whole)(decoded(data).get(key))
    except (ValueError, AttributeError):
        return None
    return found


def read(record: type[R], fields: Any) -> R:
    """The record with these fields. Raises Malformed, which names the first field that is wrong."""
    found: R = _record(record)(fields)  # type: ignore[arg-type]  # mypy holds that a class has no hash
    return found


def read_some(record: type, fields: Any) -> dict[str, Any]:
    """The fields of the record that are given, each read. Raises Malformed."""
    known, given = readers(record), _object(fields)
    try:  # a call less for each value: a folder of ten thousand runs has a million
        return {name: known[name](value) for name, value in given.items() if name in known}
    except Malformed:  # once more, for the name of the field
        return {name: _read_in(name, known[name], value) for name, value in given.items() if name in known}


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON has them, and those of records in it; the ones without a value are left out."""
    return {name: value for name, value in to_json(record).items() if value is not None}


def to_json(value: Any) -> Any:
    """Return a record, and those in it, as objects, lists and plain values.

    A Sparse record has only the fields that differ from their defaults.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        # Text, as JSON has it: a report is also read as a record without a way through JSON.
        return {key if isinstance(key, str) else str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    record: Any = type(value)
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(record)}
    if issubclass(record, Sparse):
        fields = {name: item for name, item in fields.items() if item != _default(record, name)}
    return {name: to_json(item) for name, item in fields.items()}


@functools.cache
def _default(record: Any, name: str) -> Any:
    """Return the default of a field, or MISSING where it has none."""
    field = next(field for field in dataclasses.fields(record) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@functools.cache
def readers(record: type) -> Mapping[str, Reader]:
    """What reads each field of a record."""
    hints = typing.get_type_hints(record, include_extras=True)
    return {field.name: reader(hints[field.name]) for field in dataclasses.fields(record)}


@functools.cache
def reader(hint: Any) -> Reader:
    """What reads a value of an annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        read_plain, bound = reader(inner[0]), inner[1]
        if isinstance(bound, within):
            return bound.of(inner[0], read_plain)
        return lambda value: bound(read_plain(value))
    if origin in (typing.Union, types.UnionType):
        return partial(_optional, reader(next(each for each in inner if each is not type(None))))
    if origin is collections.abc.Mapping:
        return partial(_mapping, _number if inner[0] is int else reader(inner[0]), reader(inner[1]))
    if origin in (collections.abc.Sequence, tuple):
        read_each, read_list = reader(inner[0]), _holds(lambda value: isinstance(value, list), "a list")
        held = tuple if origin is tuple else list
        return lambda value: held(read_each(each) for each in read_list(value))
    if dataclasses.is_dataclass(hint):
        return _record(hint)  # type: ignore[arg-type]
    return _enum(hint) if issubclass(hint, enum.Enum) else _PLAIN[hint]


@functools.cache
def _record(record: Any) -> Reader:
    missing = dataclasses.MISSING
    needed = [one.name for one in dataclasses.fields(record) if one.default is missing is one.default_factory]
    return partial(_read_record, record, needed)


def _read_record(record: Any, needed: Sequence[str], value: Any) -> Any:
    known = read_some(record, value)
    for name in needed:
        if name not in known:
            _read_in(name, _holds(bool, "given"), None)
    return record(**known)


def _read_in(field: str, read: Reader, value: Any) -> Any:
    """What `read` returns. Raises Malformed, which names the field."""
    try:
        return read(value)
    except Malformed as error:
        error.field = f"{field}.{error.field}" if error.field else field
        raise


def _optional(read: Reader, value: Any) -> Any:
    try:
        return None if value is None else read(value)
    except Malformed as error:
        error.needed += "" if error.field else " or null"
        raise


def _mapping(read_key: Reader, read_value: Reader, value: Any) -> Any:
    fields = _object(value).items()
    try:
        return {read_key(key): read_value(each) for key, each in fields}
    except Malformed:  # once more, for the name of the key
        return {_read_in("a key", read_key, key): _read_in(shown(key), read_value, each) for key, each in fields}


def _number(key: str) -> int:
    """The number in a key, which JSON has as a text."""
    if not (key.isdecimal() and len(key) < 19):
        raise Malformed("a number", key)
    return int(key)


def _enum(of: Any) -> Reader:
    needed = f"one of {', '.join(each.value for each in of)}"

    def read_member(value: Any) -> Any:
        try:
            return of(value)
        except ValueError:
            raise Malformed(needed, value) from None

    return read_member


_object = _holds(lambda value: isinstance(value, dict), "an object")
_PLAIN: Mapping[Any, Reader] = {  # of exactly that type: a bool is no number
    str: _holds(lambda value: type(value) is str, "a string"),
    int: _holds(lambda value: type(value) is int, "a whole number"),
    float: _holds(lambda value: type(value) in (int, float), "a number"),
    bool: _holds(lambda value: type(value) is bool, "true or false"),
}
