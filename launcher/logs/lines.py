"""Many line streams, one: agents' output told apart by rank and prefixed again. Never talks to a cluster."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable, Iterator
from datetime import datetime

from launcher.errors import UserError

_RANKED = re.compile(r"\[(\d+)\] ?(.*)", re.DOTALL)
_STAMPED = re.compile(r"(\d{4}-\d\d-\d\dT\S+) ?(.*)", re.DOTALL)
_MANY = 16  # ranks: of more, not all are shown unless they are asked for
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a process, or the agent's own talk when `rank` is None."""

    host: int
    rank: int | None
    text: str
    at: str = ""  # when it was written, in RFC 3339; the kubelet says it
    generation: int = 0

    def prefixed(self) -> str:
        return self.text if self.rank is None else f"[{self.rank}] {self.text}"


def parse(host: int, text: str) -> Line:
    """The line of an agent's stdout or stderr: `[RANK] text` is a process's, all else the agent's."""
    match = _RANKED.fullmatch(text)
    return Line(host, int(match[1]), match[2]) if match else Line(host, None, text)


def stamped(host: int, generation: int, text: str) -> Line:
    """The line of a pod's log, before which the kubelet wrote when."""
    match = _STAMPED.fullmatch(text)
    at, rest = (match[1], match[2]) if match else ("", text)
    return dataclasses.replace(parse(host, rest), at=at, generation=generation)


def merged(streams: Iterable[Iterator[Line]]) -> Iterator[Line]:
    """The lines of streams that are each in order of time, in order of time. Holds one line of each."""
    return heapq.merge(*streams, key=_moment)


def _moment(line: Line) -> datetime:
    return datetime.fromisoformat(line.at)


@dataclasses.dataclass(frozen=True)
class Select:
    """Which lines are wanted; by default all."""

    ranks: frozenset[int] | None = None
    pattern: re.Pattern[str] | None = None

    def wants(self, line: Line, ranks: range) -> bool:
        """Whether a line of the host that runs `ranks` is wanted; an agent's own talk belongs to each of them."""
        of = ranks if line.rank is None else (line.rank,)
        return self.wants_any(of) and (self.pattern is None or self.pattern.search(line.text) is not None)

    def wants_any(self, ranks: Iterable[int]) -> bool:
        return self.ranks is None or not self.ranks.isdisjoint(ranks)


def select(ranks: str | None, pattern: str | None) -> Select:
    """What `--rank` and `--grep` ask for. Raises UserError when either cannot be read."""
    try:
        return Select(_ranks(ranks), None if pattern is None else re.compile(pattern))
    except re.error as error:
        raise UserError(f"--grep {pattern} is not a regular expression: {error}.") from None


def usual(processes: int, failing: int | None = None) -> Select:
    """What is shown when nobody says: every rank of a small gang; of a large one rank 0 and the one that failed."""
    return Select(None if processes <= _MANY else frozenset({0, failing or 0}))


def _ranks(text: str | None) -> frozenset[int] | None:
    if text in (None, "all"):
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise UserError(f"--rank {text} is neither ranks nor `all`.", "write 3, or 0,4-7, or all.")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


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
