"""What a mistyped or shortened word was meant to be."""

from __future__ import annotations

import pytest

from jaxlaunch import spelling


@pytest.mark.parametrize(
    ("word", "options", "meant"),
    [
        ("digts", ["dices", "digits", "dsprites"], ["digits"]),
        ("steps", ["name", "hosts", "slices"], []),
        ("stesp", ["seed", "steps"], ["steps"]),
        ("host", ["hosts", "ttl"], ["hosts"]),
        ("readonly", ["path", "read_only"], ["read_only"]),
        ("lr", ["lt", "log_every"], []),
        ("rnu", ["run", "render"], ["run"]),
    ],
)
def test_mistyped_word_is_suggested(word: str, options: list[str], meant: list[str]) -> None:
    assert spelling.find_nearest(word, options, 3)[: len(meant)] == meant
    assert bool(spelling.find_nearest(word, options)) == bool(meant)


def test_short_form_is_expanded() -> None:
    assert spelling.find_completions("bf16", ["float32", "bfloat16"]) == ["bfloat16"]
    assert spelling.find_completions("cos", ["constant", "cosine"]) == ["cosine"]
    assert spelling.find_completions("lr", ["log_every"]) == []
