"""How messages write paths, counts, choices and long values."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import KeyPath

LONGEST_SHOWN = 60  # characters of a value or a key


def cut(text: str) -> str:
    """The text, at a length that a line can hold."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def dotted(path: KeyPath) -> str:
    """`volumes.0.path`, as overrides write it too."""
    return ".".join(cut(str(key)) for key in path)


def either(options: Sequence[object]) -> str:
    """`1, 2 or 4`."""
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last


def count(number: int, noun: str) -> str:
    """`1 host`, `4 hosts`, `2 processes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"
