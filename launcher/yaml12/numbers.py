"""Numbers of a document without its other values: a table of ten thousand jobs shows four of each. Pure.

A document as `writer` makes it has a key or a `- ` in each line that is not indented, so a line says where it belongs.
What is written in another way is left to `reader`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from jaxlaunch.launcher.errors import KeyPath
from jaxlaunch.launcher.yaml12 import reader

_DEEPER = r"(?: .*\n|- .*\n|\n)*"
_WHOLE = re.compile(rf"(?:[A-Za-z_]\w*:.*\n{_DEEPER})+")
_NUMBER = re.compile(r"0|[1-9]\d{0,14}|null")


def of(text: str, paths: Sequence[KeyPath]) -> Mapping[KeyPath, int]:
    """The whole numbers at these paths, of one key or two; those of them that there are."""
    found = dict[KeyPath, int]()
    is_written = _WHOLE.fullmatch(text) is not None
    for path in paths:
        value = _written(text, path) if is_written else ""
        if value is None or value == "null":
            continue
        if not _NUMBER.fullmatch(value):
            return _read(text, paths)
        found[path] = int(value)
    return found


def _written(text: str, path: KeyPath) -> str | None:
    """What follows the key in its line; None where there is no such key, and "" where only `reader` knows."""
    block = _line(str(path[0])).search(text)
    if block is None:
        return None
    if len(path) == 1:
        return "" if block[1] and block[2].strip() else block[1]
    if block[1]:
        return None if _NUMBER.fullmatch(block[1]) else ""
    inner = _line(str(path[1]), "  ").search(block[2])
    return None if inner is None else inner[1]


@functools.cache
def _line(key: str, indent: str = "") -> re.Pattern[str]:
    """Finds a key: what follows it in its line, and for one that is not indented the lines below that are its own."""
    return re.compile(rf"^{indent}{re.escape(key)}:(?: (.+))?\n({_DEEPER if not indent else ''})", re.MULTILINE)


def _read(text: str, paths: Sequence[KeyPath]) -> Mapping[KeyPath, int]:
    data, found = reader.parse(text, "").data, dict[KeyPath, int]()
    for path in paths:
        value = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            found[path] = value
    return found
