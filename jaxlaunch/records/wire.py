"""Lines of JSON that others wrote: read without ever raising anything but ValueError. Pure.

What comes out can be written anywhere: it nests little, its numbers are finite, and its text is UTF-8. Python's own
JSON passes on lone surrogates (`os.listdir` makes them of a file name in Latin-1), which no strict encoder takes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 32  # of lists and objects in each other; json itself gives up somewhere around a thousand


def encodable(text: str) -> str:
    """`text` with what UTF-8 cannot hold (lone surrogates) written out as `\\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode()


def decoded(line: bytes) -> Any:
    """The value of a line of JSON. Raises ValueError when it is none, or nests deeper than MAX_DEPTH."""
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and max(_depths(line)) > MAX_DEPTH:  # json would recurse
        raise ValueError("it nests too deep")
    text = line.decode("utf-8", "replace").strip()
    value, end = (_DECODER if _may_overflow(line) else _PLAIN).raw_decode(text)
    if end != len(text):
        raise ValueError("there is more than one value in it")
    return _encodable_in(value) if b"\\" in line and (b"\\ud" in line or b"\\uD" in line) else value


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _no_number(name: str) -> None:
    """NaN and the infinities are no JSON."""


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)
_PLAIN = json.JSONDecoder(parse_constant=_no_number)  # without a call for each number: tables read a million of them
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")


def _may_overflow(line: bytes) -> bool:
    """Whether there may be a number of three digits in its exponent, or of very many. No regular expression: it takes
    four times as long as json."""
    found = line.translate(_ALIKE)
    has_exponent = b"0e" in found and (b"0e000" in found or b"0e+000" in found)
    return has_exponent or b"0" * 200 in found


# A string, and one that the end of the line cuts: an alternative that always matches, so that the time is linear.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)', re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NOT_QUOTES, _NOT_BRACKETS = (bytes(set(range(256)) - set(kept)) for kept in (b'[]{}"', b"[]{}"))


def _depths(line: bytes) -> Iterator[int]:
    """How deep the line nests after each of its brackets; 0 before the first."""
    if b"\\" in line:  # a quote may be of a string
        brackets = _STRING.sub(b"", line).translate(None, _NOT_BRACKETS)
    else:
        brackets = b"".join(line.translate(None, _NOT_QUOTES).split(b'"')[::2])
    return itertools.accumulate((_STEPS[each] for each in brackets), initial=0)


def is_cut(line: bytes) -> bool:
    """Whether the line ends within a string, a list or an object that it began."""
    *_, depth = _depths(line)
    return depth > 0 or any(not found[1].endswith(b'"') for found in _STRING.finditer(line))


def _encodable_in(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_encodable_in(each) for each in value]
    if isinstance(value, dict):
        return {encodable(key): _encodable_in(each) for key, each in value.items()}
    return value
