"""Lines of JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxlaunch.records import codec
from jaxlaunch.records.codec import MAX_DEPTH, parse_json


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"1 2",
        b'{"a": 1} {"b": 2}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"1" * 5_000,
    ]
    + [b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2)],
)
def test_invalid_json_raises_only_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(line)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (rb'"caf\udce9"', "caf\\udce9"),
        (rb'{"\udce9": ["\udce9"]}', {"\\udce9": ["\\udce9"]}),
        (rb'"\ud83d\ude00"', "\U0001f600"),
        (b'"caf\xc3\xa9"', "café"),
        (b'"caf\xe9"', "caf\ufffd"),
        (b"[NaN, -Infinity, 1e999, 0.5]", [None, None, None, 0.5]),
        (b"[1" + b"0" * 300 + b"]", [10**300]),
        (b" [1] ", [1]),
    ],
)
def test_parsed_value_can_be_encoded(line: bytes, value: Any) -> None:
    assert parse_json(line) == value
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def test_number_beyond_floats_is_refused_or_dropped() -> None:
    """Arithmetic of such a number with a float would raise OverflowError."""
    for digits in ("9" * 400, "-" + "9" * 400):
        line = f'{{"host": {digits}, "step": 1e999}}'.encode()
        with pytest.raises(ValueError, match=f"a whole number of {len(digits)} characters"):
            parse_json(line)
        with pytest.raises(ValueError, match="beyond any float"):
            codec.parse_record(line)
        assert codec.read_number(line.decode(), "host") is None
        assert parse_json(line, drop_huge=True) == {"host": None, "step": None}


def test_deep_nesting_is_refused_before_parsing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "_STRICT_DECODER", None)
    monkeypatch.setattr(codec, "_FAST_DECODER", None)
    for line in (b'{"note":' * 8000, b"[" * 60_000, b'["' + rb"\"" * 30_000 + b'",' + b"[" * 40):
        with pytest.raises(ValueError):
            parse_json(line)


def test_brackets_in_strings_do_not_count_as_depth() -> None:
    for value in (["[" * 100, '\\"{' * 50], [[1]] * 100, {str(key): {} for key in range(100)}):
        assert parse_json(json.dumps(value).encode()) == value
