"""Many line streams, one: agents' output told apart by rank and prefixed again. Never talks to a cluster."""

from __future__ import annotations

import dataclasses
import re

_RANKED = re.compile(r"\[(\d+)\] ?(.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a process, or the agent's own talk when `rank` is None."""

    host: int
    rank: int | None
    text: str

    def prefixed(self) -> str:
        return self.text if self.rank is None else f"[{self.rank}] {self.text}"


def parse(host: int, text: str) -> Line:
    """The line of an agent's stdout or stderr: `[RANK] text` is a process's, all else the agent's."""
    match = _RANKED.fullmatch(text)
    return Line(host, int(match[1]), match[2]) if match else Line(host, None, text)


class Lines:
    """Bytes of one stream in, whole lines out. A line that never ends is cut at `limit` bytes."""

    def __init__(self, limit: int = 64 * 1024) -> None:
        self._rest = b""
        self._limit = limit

    def feed(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._limit:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole]

    def end(self) -> list[str]:
        """What was left without a newline."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []
