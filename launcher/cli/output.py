"""Lines of a gang on the screen: the processes' on stdout, the agents' talk and our own on stderr, or all as JSON."""

from __future__ import annotations

import json
import sys

from launcher.logs import Line, Select


class Printer:
    """Alone, a rank needs no prefix."""

    def __init__(self, select: Select, *, as_json: bool = False) -> None:
        self._is_alone = select.ranks is not None and len(select.ranks) == 1
        self._as_json = as_json

    def show(self, line: Line) -> None:
        if self._as_json:
            print(json.dumps(_json(line), ensure_ascii=False), flush=True)
        elif line.rank is None:
            print(line.text, file=sys.stderr, flush=True)
        else:
            print(line.text if self._is_alone else line.prefixed(), flush=True)

    def say(self, text: str) -> None:
        print(f"launcher: {text}", file=sys.stderr, flush=True)


def _json(line: Line) -> dict[str, str | int | None]:
    return {
        "time": line.at or None,
        "generation": line.generation,
        "host": line.host,
        "rank": line.rank,
        "text": line.text,
    }
