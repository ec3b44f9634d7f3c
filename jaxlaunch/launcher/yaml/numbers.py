"""Numbers of a document without its other values: a table of ten thousand jobs shows four of each. Pure.

A document as `writer` makes it has a key or a `- ` in each line that is not indented, so a line says where it belongs.
What is written in another way is left to `reader`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxlaunch.launcher.errors import KeyPath
from jaxlaunch.launcher.yaml import reader

_Block = tuple[str | None, list[str]]  # what follows a key in its line, and the lines below that are its own
_NUMBER = re.compile(r"0|[1-9]\d{0,14}|null")


def of(text: str, paths: Sequence[KeyPath]) -> Mapping[KeyPath, int]:
    """The whole numbers at these paths, of one key or two; those of them that there are."""
    found, blocks = dict[KeyPath, int](), _blocks(text)
    for path in paths:
        value = "" if blocks is None else _written(blocks, path)
        if value is None or value == "null":
            continue
        if not _NUMBER.fullmatch(value):
            return _read(text, paths)
        found[path] = int(value)
    return found


def _blocks(text: str) -> Mapping[str, _Block] | None:
    """The keys that are not indented; None where only `reader` knows."""
    found, deeper = dict[str, _Block](), list[str]()
    *lines, rest = text.split("\n")
    if rest or not lines or lines[0][:1] in ("", " ", "-"):
        return None
    for line in lines:
        if line[:1] in ("", " ") or line[:2] == "- ":
            deeper.append(line)
            continue
        key, colon, rest = line.partition(":")
        if not (colon and key.isascii() and key.isidentifier()):
            return None
        deeper = []
        if _follows(rest):
            found.setdefault(key, (rest[1:] or None, deeper))
    return found


def _follows(rest: str) -> bool:
    """Whether this may follow a key and its colon."""
    return not rest or (rest[0] == " " and len(rest) > 1)


def _written(blocks: Mapping[str, _Block], path: KeyPath) -> str | None:
    """What follows the key in its line; None where there is no such key, and "" where only `reader` knows."""
    value, deeper = blocks.get(str(path[0]), (None, []))
    if len(path) == 1:
        return "" if value and any(line.strip() for line in deeper) else value
    if value:
        return None if _NUMBER.fullmatch(value) else ""
    start = f"  {path[1]}:"
    rests = (line[len(start) :] for line in deeper if line.startswith(start))
    return next((rest[1:] or None for rest in rests if _follows(rest)), None)


def _read(text: str, paths: Sequence[KeyPath]) -> Mapping[KeyPath, int]:
    data, found = reader.parse(text, "").data, dict[KeyPath, int]()
    for path in paths:
        value = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            found[path] = value
    return found
