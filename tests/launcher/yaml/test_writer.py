from __future__ import annotations

import pytest
import yaml

from jaxlaunch.launcher.yaml import reader, writer

TRICKY = [
    *("no", "y", "12:30", "3e-4", "1_000", "0x1F", "010", ".5", "null", "~", "<<", "=", "true"),
    *("2026-01-01", "a: b"),
]


@pytest.mark.parametrize(
    "text",
    [
        *TRICKY,
        "",
        "$$(A) $",
        "two\nlines\n",
        "  ends in space \n x",
        "é×",
        "- a",
        "#a",
        "a\x85b",
        "\u2028\nx",
        "\x1b[2J\x9b",
    ],
)
def test_text_is_equal_in_yaml_1_1_and_1_2(text: str) -> None:
    written = writer.render_document({"a": [text, {"b": text}]})
    assert yaml.safe_load(written) == {"a": [text, {"b": text}]}
    document = reader.parse_document(written, "x")
    assert (document.data, document.faults) == ({"a": [text, {"b": text}]}, [])


@pytest.mark.parametrize("text", TRICKY)
def test_ambiguous_text_is_quoted(text: str) -> None:
    """Go's reader is not here to be asked: to it, y is true and 3e-4 a number."""
    assert writer.render_document({"a": text}) == f"a: '{text}'\n"


def test_documents_are_written_as_one_stream() -> None:
    shared = {"a": 1}
    expected = "b:\n  a: 1\nc:\n  a: 1\n---\n{}\n"
    assert writer.render_documents([{"b": shared, "c": shared}, {}]) == expected
