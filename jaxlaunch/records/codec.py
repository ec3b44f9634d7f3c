"""Encoding of dataclasses as JSON, and decoding of untrusted JSON. Pure.

The JSON that is decoded here may be written by a program next to the agent, by anyone who shares
the storage, and by anyone who may change the JobSet. Annotations of a dataclass restrict the values
of its fields, such as `Annotated[int, Bounds(0, 255)]`. Decoding raises only ValueError, and its
result can be encoded again: the nesting is limited, numbers are finite, and text is valid UTF-8.
Python's own decoder keeps lone surrogates, which `os.listdir` returns for file names in Latin-1 and
which strict encoders reject. A field with a default may be missing. Unknown fields are ignored,
because newer versions of jaxlaunch may add some.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import itertools
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

# jaxlaunch cuts its own texts to a few thousand characters.
MAX_RECORD_BYTES = 256 * 1024
# The largest step or rank. Readers of metrics also support it.
MAX_NUMBER = 2**63 - 1
# As Unix time this is in the year 3871. A datetime ends with the year 9999.
MAX_TIME_S = 60_000_000_000
# A wrong value in an error message is cut to this length.
MAX_REPR_CHARS = 200
# The deepest nesting of lists and objects. `json` itself fails at a depth of about a thousand.
MAX_DEPTH = 32

# A function that returns the value of a field for a value of JSON, or raises MalformedError.
Reader = Callable[[Any], Any]
R = TypeVar("R")


class MalformedError(ValueError):
    """A value that does not fit its record.

    Attributes:
        needed: Description of valid values.
        value: The wrong value.
        field: Path of the field, such as "failure.kind".
    """

    def __init__(self, needed: str, value: Any, field: str = "") -> None:
        super().__init__(needed, value)
        self.needed, self.value, self.field = needed, value, field

    def __str__(self) -> str:
        return f"{self.field or 'it'} must be {self.needed}, not {truncate_repr(self.value)}"


def truncate_repr(value: Any) -> str:
    """Return the representation of a wrong value, cut to MAX_REPR_CHARS."""
    return repr(value)[:MAX_REPR_CHARS]


# --- restrictions in annotations ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Restricts a number to a range that includes both ends, and excludes NaN."""

    minimum: float
    maximum: float

    def make_reader(self, kind: type, read_plain: Reader) -> Reader:
        """Return a reader of numbers in this range.

        It needs a single call per valid value, because a large folder of runs has a million values.
        """
        kinds = (int,) if kind is int else (int, float)
        minimum, maximum = self.minimum, self.maximum
        limit = "on" if maximum == MAX_NUMBER else f"to {maximum}"

        def read_number(value: Any) -> Any:
            if type(value) in kinds and minimum <= value <= maximum:
                return value
            # The plain reader raises the error for a value that is not a number.
            raise MalformedError(f"a number from {minimum} {limit}", read_plain(value))

        return read_number


def max_length(count: int) -> Reader:
    """Accept texts, lists and objects of at most `count` characters or items."""
    return _require(lambda value: len(value) <= count, f"no longer than {count}")


def matches(pattern: str) -> Reader:
    """Accept texts that match a regular expression completely."""
    return _require(lambda value: bool(re.fullmatch(pattern, value)), f"a text like {pattern}")


def truncate_to(chars: int) -> Reader:
    """Keep the first `chars` characters of a text, or the last ones if the number is negative."""
    return lambda text: text[:chars] if chars >= 0 else text[chars:]


def _require(is_valid: Callable[[Any], bool], needed: str) -> Reader:
    def check_value(value: Any) -> Any:
        if is_valid(value):
            return value
        raise MalformedError(needed, value)

    return check_value


# A step, attempt, rank or host.
NonNegativeInt = Annotated[int, Bounds(0, MAX_NUMBER)]
# An exit code, or the negative number of a signal.
ExitStatus = Annotated[int, Bounds(-127, 255)]
ExitCode = Annotated[int, Bounds(0, 255)]
# A duration.
Seconds = Annotated[float, Bounds(-MAX_TIME_S, MAX_TIME_S)]
# Unix time.
UnixTime = Annotated[float, Bounds(0, MAX_TIME_S)]
# A cause in contract.OUTCOMES of this or a newer version.
Cause = Annotated[str, matches("[a-z_]{1,32}")]


class Sparse:
    """Base class of records whose JSON has only the fields that differ from their defaults."""


class Keyed:
    """Base class of records with fields whose keys in JSON differ from their names."""

    # The key by the name of the field.
    JSON_KEYS: ClassVar[Mapping[str, str]] = {}


# --- records --------------------------------------------------------------------------------------


def read_number(data: str, key: str) -> int | None:
    """Return the number at a key of a JSON object, or None if there is no NonNegativeInt."""
    try:
        number: int = reader_for(NonNegativeInt)(parse_record(data).get(key))
    except (ValueError, AttributeError):
        return None
    return number


def read_record(record: type[R], fields: Any) -> R:
    """Return the record with these fields of JSON.

    Raises:
        MalformedError: A field is wrong, or a field without a default is missing.
    """
    values = read_partial(record, fields)
    for name in _required_fields(record):  # type: ignore[arg-type]  # mypy believes that classes are not hashable
        if name not in values:
            raise MalformedError("given", None, name)
    return record(**values)


def read_partial(record: type, fields: Any) -> dict[str, Any]:
    """Return the values of the fields that are present in JSON, by the names of the fields.

    Raises:
        MalformedError: A field is wrong.
    """
    readers, fields = field_readers(record), _require_object(fields)
    try:
        # `_read_field` would add a call per value, and ten thousand runs have a million values.
        values = {key: readers[key](value) for key, value in fields.items() if key in readers}
    except MalformedError:
        # A second pass adds the name of the field to the error.
        values = {
            key: _read_field(key, readers[key], value)
            for key, value in fields.items()
            if key in readers
        }
    names = {key: name for name, key in _json_keys(record).items()}
    return {names.get(key, key): value for key, value in values.items()} if names else values


def _json_keys(record: type) -> Mapping[str, str]:
    return record.JSON_KEYS if issubclass(record, Keyed) else {}


def present_fields(record: Any) -> dict[str, Any]:
    """Convert a record to a dict like `to_json`, without the fields that are None."""
    return {name: value for name, value in to_json(record).items() if value is not None}


def to_json(value: Any) -> Any:
    """Convert a record to the dicts, lists and plain values that JSON has."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        # Keys become strings, because `read_record` may read the result without encoding it first.
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    record: Any = type(value)
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(record)}
    if issubclass(record, Sparse):
        defaults = _field_defaults(record)
        fields = {name: item for name, item in fields.items() if item != defaults[name]}
    keys = _json_keys(record)
    return {keys.get(name, name): to_json(item) for name, item in fields.items()}


@functools.cache
def _field_defaults(record: Any) -> Mapping[str, Any]:
    """Return the default of each field, which is MISSING for fields without one."""
    missing = dataclasses.MISSING
    return {
        field.name: field.default if field.default_factory is missing else field.default_factory()
        for field in dataclasses.fields(record)
    }


@functools.cache
def _required_fields(record: Any) -> list[str]:
    missing, defaults = dataclasses.MISSING, _field_defaults(record)
    return [name for name, default in defaults.items() if default is missing]


@functools.cache
def field_readers(record: type) -> Mapping[str, Reader]:
    """Return the reader for each key in the JSON of a record."""
    hints, keys = typing.get_type_hints(record, include_extras=True), _json_keys(record)
    return {
        keys.get(field.name, field.name): reader_for(hints[field.name])
        for field in dataclasses.fields(record)
    }


@functools.cache
def reader_for(hint: Any) -> Reader:
    """Return the reader for the annotation of a field."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        read_plain, restriction = reader_for(inner[0]), inner[1]
        if isinstance(restriction, Bounds):
            return restriction.make_reader(inner[0], read_plain)
        return lambda value: restriction(read_plain(value))
    if origin in (typing.Union, types.UnionType):
        kind = next(kind for kind in inner if kind is not type(None))
        return partial(_read_optional, reader_for(kind))
    if origin is collections.abc.Mapping:
        read_key = _read_number_key if inner[0] is int else reader_for(inner[0])
        return partial(_read_mapping, read_key, reader_for(inner[1]))
    if origin in (collections.abc.Sequence, tuple):
        read_item = reader_for(inner[0])
        read_list = _require(lambda value: isinstance(value, list), "a list")
        sequence = tuple if origin is tuple else list
        return lambda value: sequence(read_item(item) for item in read_list(value))
    if dataclasses.is_dataclass(hint):
        return partial(read_record, hint)  # type: ignore[arg-type]
    return partial(_read_member, hint) if issubclass(hint, enum.Enum) else _PLAIN_READERS[hint]


def _read_field(field: str, read_value: Reader, value: Any) -> Any:
    try:
        return read_value(value)
    except MalformedError as error:
        error.field = f"{field}.{error.field}" if error.field else field
        raise


def _read_optional(read_value: Reader, value: Any) -> Any:
    try:
        return None if value is None else read_value(value)
    except MalformedError as error:
        error.needed += "" if error.field else " or null"
        raise


def _read_mapping(read_key: Reader, read_value: Reader, value: Any) -> Any:
    fields = _require_object(value).items()
    try:
        return {read_key(key): read_value(item) for key, item in fields}
    except MalformedError:
        # A second pass adds the key to the error.
        return {
            _read_field("a key", read_key, key): _read_field(truncate_repr(key), read_value, item)
            for key, item in fields
        }


def _read_number_key(key: str) -> int:
    if not (key.isdecimal() and len(key) < 19):
        raise MalformedError("a number", key)
    return int(key)


def _read_member(kind: Any, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise MalformedError(
            f"one of {', '.join(member.value for member in kind)}", value
        ) from None


_require_object = _require(lambda value: isinstance(value, dict), "an object")
# The types must be exact, because a bool is an int in Python, but not a number in JSON.
_PLAIN_READERS: Mapping[Any, Reader] = {
    str: _require(lambda value: type(value) is str, "a string"),
    int: _require(lambda value: type(value) is int, "a whole number"),
    float: _require(lambda value: type(value) in (int, float), "a number"),
    bool: _require(lambda value: type(value) is bool, "true or false"),
}


# --- JSON -----------------------------------------------------------------------------------------


def _parse_finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _parse_int(text: str) -> int:
    number = int(text)
    if abs(number) > sys.float_info.max:
        raise ValueError(f"it has a whole number of {len(text)} characters, beyond any float")
    return number


def _parse_int_or_none(text: str) -> int | None:
    number = int(text)
    return number if abs(number) <= sys.float_info.max else None


# NaN and infinities, which are not valid JSON, and floats that overflow become None. Of the first
# two decoders for numbers that may overflow, one refuses the whole numbers beyond the largest float
# and the other makes them None. For other text, the last decoder saves a call per number.
_STRICT_DECODER, _LENIENT_DECODER = (
    json.JSONDecoder(
        parse_float=_parse_finite, parse_int=parse_int, parse_constant=lambda name: None
    )
    for parse_int in (_parse_int, _parse_int_or_none)
)
_FAST_DECODER = json.JSONDecoder(parse_constant=lambda name: None)
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789E", b"000000000e")


def parse_record(data: bytes | str) -> Any:
    """Parse JSON of at most MAX_RECORD_BYTES. Raises ValueError."""
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"it is longer than {MAX_RECORD_BYTES} bytes")
    return parse_json(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


def parse_json(line: bytes, *, drop_huge: bool = False) -> Any:
    """Parse JSON that nests no deeper than MAX_DEPTH.

    Args:
        line: The JSON, which may have whitespace around it.
        drop_huge: Whether a whole number beyond the largest float becomes None, as a metric of a
            user's program may. In a record it is an error: None is a valid value of many fields.

    Raises:
        ValueError: It is not JSON, nests too deep, or has a number beyond the largest float.
    """
    # `json` recurses, so the depth is checked before.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and max(_nesting_depths(line)) > MAX_DEPTH:
        raise ValueError("it nests too deep")
    text = line.decode("utf-8", "replace").strip()
    # A number can overflow only if its exponent has three digits, or if it has hundreds of digits.
    # A regular expression that finds such numbers would take four times as long as the decoder.
    zeroed = line.translate(_DIGITS_TO_ZERO)
    has_large_exponent = b"0e" in zeroed and (b"0e000" in zeroed or b"0e+000" in zeroed)
    may_overflow = has_large_exponent or b"0" * 200 in zeroed
    checked_decoder = _LENIENT_DECODER if drop_huge else _STRICT_DECODER
    value, end = (checked_decoder if may_overflow else _FAST_DECODER).raw_decode(text)
    if end != len(text):
        raise ValueError("there is more than one value in it")
    if b"\\ud" in line or b"\\uD" in line:
        return _escape_surrogates(value)
    return value


# A string, which may be cut off by the end of the line. Because a quote always begins a match, the
# time is linear.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)', re.DOTALL)
_DEPTH_CHANGES = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_ALL_BUT_BRACKETS_AND_QUOTES, _ALL_BUT_BRACKETS = (
    bytes(set(range(256)) - set(characters)) for characters in (b'[]{}"', b"[]{}")
)


def _nesting_depths(line: bytes) -> Iterator[int]:
    """Yield the nesting depth before the first bracket and after each bracket."""
    # Without a backslash, every second quote ends a string, so no regular expression is needed.
    if b"\\" in line:
        brackets = _STRING.sub(b"", line).translate(None, _ALL_BUT_BRACKETS)
    else:
        brackets = b"".join(line.translate(None, _ALL_BUT_BRACKETS_AND_QUOTES).split(b'"')[::2])
    return itertools.accumulate((_DEPTH_CHANGES[bracket] for bracket in brackets), initial=0)


def is_truncated(line: bytes) -> bool:
    """Return whether a line of JSON ends inside a string, a list or an object."""
    *_, depth = _nesting_depths(line)
    return depth > 0 or any(not match[1].endswith(b'"') for match in _STRING.finditer(line))


def _escape_surrogates(value: Any) -> Any:
    r"""Replace lone surrogates, which UTF-8 cannot encode, by escapes such as `\udce9`."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_escape_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    return value
