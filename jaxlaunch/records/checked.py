"""Turns JSON that others wrote into records: dataclasses whose annotations say what each field may hold. Pure.

A program beside the agent may write what is read here, and so may whoever shares the storage or may change the JobSet.
A field may be left out where it has a default, and fields that are not known are ignored: they are a newer version's.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from jaxlaunch.records import wire

MAX_RECORD = 256 * 1024  # bytes of JSON; our longest texts are cut to some thousands of characters
MAX_NUMBER = 2**63 - 1  # of steps and exit codes: a float holds it, and so do the readers of metrics
FAR_S = 60_000_000_000  # seconds; as Unix time the year 3871: beyond 9999 there is no datetime
MAX_SHOWN = 200  # characters of a wrong value, in a message

Reader = Callable[[Any], Any]
R = TypeVar("R")


class Malformed(ValueError):
    """A value that is not what its record says: which field it is of, and what it must be."""

    def __init__(self, needed: str, value: Any, field: str = "") -> None:
        self.needed, self.value, self.field = needed, value, field
        super().__init__(self.rule + ("" if value is dataclasses.MISSING else f", not {shown(value)}"))

    @property
    def rule(self) -> str:
        """What the field must be, without the value."""
        return f"{self.field or 'it'} must be {self.needed}"

    def within(self, field: str) -> Malformed:
        """The same, as the error of the record that has it in `field`."""
        return Malformed(self.needed, self.value, f"{field}.{self.field}" if self.field else field)


@dataclasses.dataclass(frozen=True)
class Within:
    """The least and the greatest number."""

    least: float
    most: float


@dataclasses.dataclass(frozen=True)
class AtMost:
    """How many characters a text may have, or how many values a mapping."""

    count: int


@dataclasses.dataclass(frozen=True)
class AtMostBytes:
    """How long an object may be as JSON."""

    count: int


@dataclasses.dataclass(frozen=True)
class Keeping:
    """A record whose fields an object has, and keeps with its others."""

    record: type


@dataclasses.dataclass(frozen=True)
class Cut:
    """How many characters of a text are kept: its first, or its last where the number is negative."""

    chars: int


@dataclasses.dataclass(frozen=True)
class Like:
    """The pattern of a text."""

    pattern: str


Whole = Annotated[int, Within(0, MAX_NUMBER)]  # steps, attempts, ranks, hosts
Exit = Annotated[int, Within(-MAX_NUMBER, MAX_NUMBER)]  # an exit code, or minus the signal
ExitCode = Annotated[int, Within(0, 255)]
Seconds = Annotated[float, Within(-FAR_S, FAR_S)]  # a time span
Time = Annotated[float, Within(0, FAR_S)]  # Unix time
Cause = Annotated[str, Like("[a-z_]{1,32}")]  # of contract.OUTCOMES, or of a newer version's


def shown(value: Any) -> str:
    """A wrong value, at a length that a message can hold."""
    return repr(value)[:MAX_SHOWN]


def decoded(data: bytes | str) -> Any:
    """The value in a record of JSON. Raises ValueError where it is none, or longer than MAX_RECORD."""
    if len(data) > MAX_RECORD:
        raise ValueError(f"it is longer than {MAX_RECORD} bytes")
    return wire.decoded(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


def decoded_object(data: bytes | str) -> dict[str, Any]:
    """The object in a record of JSON; an empty one where there is none."""
    try:
        value = decoded(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read(record: type[R], fields: Any) -> R:
    """The record with these fields. Raises Malformed, which names the first field that is wrong."""
    found: R = _record(record)(fields)  # type: ignore[arg-type]  # mypy holds that a class has no hash
    return found


def read_or_none(record: type[R], fields: Any) -> R | None:
    """The same; None where a field is wrong."""
    try:
        return read(record, fields)
    except Malformed:
        return None


def read_some(record: type, fields: Any) -> dict[str, Any]:
    """The fields of the record that are given, each read. Raises Malformed."""
    known, of = {}, readers(record)
    for name, value in _object(fields).items():
        if name in of:
            try:
                known[name] = of[name](value)
            except Malformed as error:
                raise error.within(name) from None
    return known


def whole_or_none(value: Any) -> int | None:
    """A whole number from 0 on; None for any other value."""
    return value if type(value) is int and 0 <= value <= MAX_NUMBER else None


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON has them, and those of records in it; the ones without a value are left out."""
    return {name: value for name, value in dataclasses.asdict(record).items() if value is not None}


@functools.cache
def readers(record: type) -> Mapping[str, Reader]:
    """What reads each field of a record."""
    hints = typing.get_type_hints(record, include_extras=True)
    return {field.name: reader(hints[field.name]) for field in dataclasses.fields(record)}


@functools.cache
def reader(hint: Any) -> Reader:
    """What reads a value of an annotation: returns it, or raises Malformed."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return _bounded(inner[0], inner[1])
    if origin in (typing.Union, types.UnionType):
        return _optional(reader(next(each for each in inner if each is not type(None))))
    if origin is collections.abc.Mapping:
        return _mapping(*inner)
    if origin is collections.abc.Sequence:
        return _list(reader(inner[0]))
    if dataclasses.is_dataclass(hint):
        return _record(hint)  # type: ignore[arg-type]
    return _enum(hint) if issubclass(hint, enum.Enum) else _plain(hint)


@functools.cache
def _record(record: Any) -> Reader:
    needed = {
        field.name
        for field in dataclasses.fields(record)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any) -> Any:
        known = read_some(record, value)
        for name in needed - known.keys():
            raise Malformed("given", dataclasses.MISSING, name)
        return record(**known)

    return read


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed("an object", value)
    return value


def _optional(read: Reader) -> Reader:
    def read_optional(value: Any) -> Any:
        if value is None:
            return None
        try:
            return read(value)
        except Malformed as error:
            raise Malformed(f"{error.needed} or null", error.value, error.field) from None

    return read_optional


def _mapping(of_key: Any, of_value: Any) -> Reader:
    read_key, read_value = _key(of_key), reader(of_value)

    def read(value: Any) -> Any:
        found = {}
        for key, each in _object(value).items():
            try:
                found[read_key(key)] = read_value(each)
            except Malformed as error:
                raise error.within(shown(key)) from None
        return found

    return read if (of_key, of_value) != (str, Any) else _object


def _key(hint: Any) -> Reader:
    """What reads a key, which JSON has as a text."""
    if hint is not int:
        return reader(hint)

    def read(key: str) -> int:
        if not (key.isdecimal() and len(key) < 19):
            raise Malformed("a number", key)
        return int(key)

    return read


def _list(read_each: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise Malformed("a list", value)
        return [read_each(each) for each in value]

    return read


def _enum(of: Any) -> Reader:
    def read(value: Any) -> Any:
        try:
            return of(value)
        except ValueError:
            raise Malformed(f"one of {', '.join(str(each.value) for each in of)}", value) from None

    return read


_WORDS: Mapping[Any, str] = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def _plain(of: type) -> Reader:
    """Of exactly that type: a bool is no number. A whole number is a number too."""
    allowed, words = (int, float) if of is float else (of,), _WORDS[of]

    def read(value: Any) -> Any:
        if type(value) not in allowed:
            raise Malformed(words, value)
        return value

    return read


def _bounded(of: Any, bound: Any) -> Reader:
    """A value of a type that is within its bound, or cut to it."""
    read_plain, words = reader(of), _WORDS.get(of, "an object")

    def at_most(value: Any) -> Any:
        if len(read_plain(value)) <= bound.count:
            return value
        raise Malformed(f"{words} of at most {bound.count} {'characters' if of is str else 'values'}", value)

    def at_most_bytes(value: Any) -> Any:
        if len(json.dumps(read_plain(value))) <= bound.count:
            return value
        raise Malformed(f"{words} of at most {bound.count} bytes", value)

    def keeping(value: Any) -> Any:
        read(bound.record, value)
        return value

    def cut(value: Any) -> Any:
        text = read_plain(value)
        return text[: bound.chars] if bound.chars >= 0 else text[bound.chars :]

    def like(value: Any) -> Any:
        if re.fullmatch(bound.pattern, read_plain(value)) is not None:
            return value
        raise Malformed(f"{words} like {bound.pattern}", value)

    if isinstance(bound, Within):
        return _number(of, bound.least, bound.most)
    reads = {AtMost: at_most, AtMostBytes: at_most_bytes, Keeping: keeping, Cut: cut, Like: like}
    return reads[type(bound)]


def _number(of: type, least: float, most: float) -> Reader:
    allowed = (int, float) if of is float else (int,)
    words = f"{_WORDS[of]} from {least} {'on' if most == MAX_NUMBER else f'to {most}'}"

    def read(value: Any) -> Any:
        if type(value) in allowed and least <= value <= most:  # never of NaN
            return value
        raise Malformed(words, value)

    return read
