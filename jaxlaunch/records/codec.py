"""Decodes untrusted JSON into dataclasses whose annotations restrict their values. Pure.

A program next to the agent, anyone who shares the storage, and anyone who may change the JobSet can
write the JSON that is read here. Decoding therefore raises only ValueError, and its result can be
encoded again: the nesting is limited, numbers are finite, and text is UTF-8. Python's own decoder
passes on lone surrogates, which strict encoders reject; `os.listdir` returns them for file names in
Latin-1. A field with a default may be missing, and unknown fields are ignored because newer
versions may add some.
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
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

# In bytes. Our own longest texts are cut to some thousands of characters.
MAX_RECORD_BYTES = 256 * 1024
# The largest step or exit code, which also fits into a float and into the readers of metrics.
MAX_NUMBER = 2**63 - 1
# As Unix time this is the year 3871. There is no datetime beyond the year 9999.
MAX_TIME_S = 60_000_000_000
# In error messages, a wrong value is cut to this many characters.
MAX_REPR_CHARS = 200
# The limit for nested lists and objects. `json` itself fails at a depth of about a thousand.
MAX_DEPTH = 32

# Returns the value for a record, or raises MalformedError.
Reader = Callable[[Any], Any]
R = TypeVar("R")


class MalformedError(ValueError):
    """A value that does not fit its record.

    Attributes:
        needed: Description of a valid value.
        value: The wrong value.
        field: Path of the field, such as "failure.kind".
    """

    def __init__(self, needed: str, value: Any, field: str = "") -> None:
        super().__init__(needed, value)
        self.needed, self.value, self.field = needed, value, field

    def __str__(self) -> str:
        return f"{self.field or 'it'} must be {self.needed}, not {truncate_repr(self.value)}"


def truncate_repr(value: Any) -> str:
    """Return the representation of a wrong value, cut to a length that fits into a message."""
    return repr(value)[:MAX_REPR_CHARS]


# --- restrictions in annotations: Annotated[int, within(0, 255)] ----------------------------------


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Restricts a number to a range, which excludes NaN."""

    minimum: float
    maximum: float

    def make_reader(self, kind: type, read_plain: Reader) -> Reader:
        """Return a reader with one call per value: a large folder of runs has a million."""
        kinds = (int,) if kind is int else (int, float)
        minimum, maximum = self.minimum, self.maximum
        end = "on" if maximum == MAX_NUMBER else f"to {maximum}"

        def read_number(value: Any) -> Any:
            if type(value) in kinds and minimum <= value <= maximum:
                return value
            raise MalformedError(f"a number from {minimum} {end}", read_plain(value))

        return read_number


def max_length(count: int) -> Reader:
    """Accept texts of at most `count` characters and objects of at most `count` values."""
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
    """Base class of records whose JSON has other keys than the names of some fields."""

    # By name of the field.
    JSON_KEYS: ClassVar[Mapping[str, str]] = {}


# --- records --------------------------------------------------------------------------------------


def read_number(data: str, key: str) -> int | None:
    """Return the whole number under a key of a JSON object, or None."""
    try:
        number: int = reader_for(NonNegativeInt)(parse_record(data).get(key))
    except (ValueError, AttributeError):
        return None
    return number


def read_record(record: type[R], fields: Any) -> R:
    """Return the record with these fields, or raise MalformedError for the first wrong field."""
    values = read_partial(record, fields)
    for name in _required_fields(record):  # type: ignore[arg-type]  # mypy holds that a class has no hash
        if name not in values:
            raise MalformedError("given", None, name)
    return record(**values)


def read_partial(record: type, fields: Any) -> dict[str, Any]:
    """Return the values of those fields of the record that are present, or raise MalformedError."""
    field_reader, fields = field_readers(record), _require_object(fields)
    try:
        # Without `_read_field` there is one call less per value: a folder of ten thousand runs has
        # a million values.
        values = {
            key: field_reader[key](value) for key, value in fields.items() if key in field_reader
        }
    except MalformedError:
        # A second pass finds the name of the field.
        values = {
            key: _read_field(key, field_reader[key], value)
            for key, value in fields.items()
            if key in field_reader
        }
    names = {key: name for name, key in _json_keys(record).items()}
    return {names.get(key, key): value for key, value in values.items()} if names else values


def _json_keys(record: type) -> Mapping[str, str]:
    return record.JSON_KEYS if issubclass(record, Keyed) else {}


def present_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record as JSON values, without those that are None."""
    return {name: value for name, value in to_json(record).items() if value is not None}


def to_json(value: Any) -> Any:
    """Convert a record to dicts, lists and plain values.

    Of a Sparse record, only the fields that differ from their defaults are included.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        # Keys are text as in JSON, because a report is also read as a record without being encoded.
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
    """Return the default of each field, or MISSING."""
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
    """Return the reader of each key of a record's JSON."""
    hints, keys = typing.get_type_hints(record, include_extras=True), _json_keys(record)
    return {
        keys.get(field.name, field.name): reader_for(hints[field.name])
        for field in dataclasses.fields(record)
    }


@functools.cache
def reader_for(hint: Any) -> Reader:
    """Return the reader for values of an annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        read_plain, bound = reader_for(inner[0]), inner[1]
        if isinstance(bound, Bounds):
            return bound.make_reader(inner[0], read_plain)
        return lambda value: bound(read_plain(value))
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
    return partial(_read_member, hint) if issubclass(hint, enum.Enum) else _PLAIN[hint]


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
        # A second pass finds the name of the key.
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
# The type must be exact, since a bool is an int but not a number in JSON.
_PLAIN: Mapping[Any, Reader] = {
    str: _require(lambda value: type(value) is str, "a string"),
    int: _require(lambda value: type(value) is int, "a whole number"),
    float: _require(lambda value: type(value) in (int, float), "a number"),
    bool: _require(lambda value: type(value) is bool, "true or false"),
}


# --- JSON -----------------------------------------------------------------------------------------


def _parse_finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


# NaN and infinities are not valid JSON and become None. The second decoder avoids a call per
# number, of which tables read a million.
_STRICT = json.JSONDecoder(parse_float=_parse_finite, parse_constant=lambda name: None)
_LENIENT = json.JSONDecoder(parse_constant=lambda name: None)
_DIGIT_TABLE = bytes.maketrans(b"123456789E", b"000000000e")


def parse_record(data: bytes | str) -> Any:
    """Return the value of a JSON text of at most MAX_RECORD_BYTES, or raise ValueError."""
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"it is longer than {MAX_RECORD_BYTES} bytes")
    return parse_json(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)


def parse_json(line: bytes) -> Any:
    """Return the value of a line of JSON, or raise ValueError, also beyond MAX_DEPTH."""
    # `json` recurses, so the depth is checked first.
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and max(_nesting_depths(line)) > MAX_DEPTH:
        raise ValueError("it nests too deep")
    stripped = line.decode("utf-8", "replace").strip()
    # A number can overflow only if its exponent has three digits or it has very many digits itself.
    # To look for such numbers with a regular expression would take four times as long as the
    # decoder.
    digits = line.translate(_DIGIT_TABLE)
    has_large_exponent = b"0e" in digits and (b"0e000" in digits or b"0e+000" in digits)
    decoder = _STRICT if has_large_exponent or b"0" * 200 in digits else _LENIENT
    value, end = decoder.raw_decode(stripped)
    if end != len(stripped):
        raise ValueError("there is more than one value in it")
    if b"\\ud" in line or b"\\uD" in line:
        return _escape_surrogates(value)
    return value


# A string, or one that the end of the line cuts off. This alternative always matches, which makes
# the time linear.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)', re.DOTALL)
_DEPTH_CHANGES = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_QUOTES, _NOT_BRACKETS = (
    bytes(set(range(256)) - set(characters)) for characters in (b'[]{}"', b"[]{}")
)


def _nesting_depths(line: bytes) -> Iterator[int]:
    """Yield the nesting depth before the first bracket and after each bracket."""
    # With a backslash in the line, a quote may be part of a string.
    if b"\\" in line:
        brackets = _STRING.sub(b"", line).translate(None, _NOT_BRACKETS)
    else:
        brackets = b"".join(line.translate(None, _NOT_QUOTES).split(b'"')[::2])
    return itertools.accumulate((_DEPTH_CHANGES[bracket] for bracket in brackets), initial=0)


def is_truncated(line: bytes) -> bool:
    """Return whether the line ends inside a string, a list or an object."""
    *_, depth = _nesting_depths(line)
    return depth > 0 or any(not match[1].endswith(b'"') for match in _STRING.finditer(line))


def _escape_surrogates(value: Any) -> Any:
    r"""Return the value with lone surrogates, which UTF-8 cannot encode, written as `\udce9`."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_escape_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    return value
