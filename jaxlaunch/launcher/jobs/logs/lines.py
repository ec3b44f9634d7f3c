"""Lines of a gang: parsed by rank, merged by time, selected by rank and pattern. Never talks to a cluster."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.records.log_lines import CONTINUED

_RANKED = re.compile(r"\[(\d+)\] ?(.*)", re.DOTALL)
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)"
_STAMPED = re.compile(rf"({_TIME})(?: (.*))?", re.DOTALL)
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_MANY = 16  # ranks: of a larger gang, not all are shown by default
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a process, or of the agent itself when `rank` is None."""

    host: int
    rank: int | None
    text: str
    at: str = ""  # when it was written, in RFC 3339, by the kubelet's clock; empty when it did not say
    generation: int = 0

    def prefixed(self) -> str:
        """The line as the agent writes it: `[RANK] text`."""
        return self.text if self.rank is None else f"[{self.rank}] {self.text}"


def parse(host: int, text: str) -> Line:
    """The line of an agent's stdout or stderr: `[RANK] text` is a process's, all else the agent's."""
    match = _RANKED.fullmatch(text)
    return Line(host, int(match[1]), match[2]) if match else Line(host, None, text)


def stamped(host: int, generation: int, text: str, before: Line | None = None) -> Line:
    """The line of a pod's log, which begins with the kubelet's timestamp.

    A further piece of a line has no timestamp of its own: it is of the same time and rank as the line `before` it. What
    else has none, the kubelet says itself.
    """
    match = _STAMPED.fullmatch(text)
    if match is None and before is not None and text.startswith(CONTINUED):
        return dataclasses.replace(before, text=text)
    at, rest = (match[1], match[2] or "") if match else ("", text)
    return dataclasses.replace(parse(host, rest), at=at, generation=generation)


def merged(streams: Iterable[Iterator[Line]]) -> Iterator[Line]:
    """The lines of streams that are each in order of time, in order of time. Holds one line of each in memory."""
    return heapq.merge(*streams, key=_moment)


def _moment(line: Line) -> datetime:
    """When it was written; what the kubelet says itself, such as that a log is gone, has no time and comes first."""
    try:
        return datetime.fromisoformat(line.at)
    except ValueError:
        return _EARLIEST


@dataclasses.dataclass(frozen=True)
class Select:
    """Which lines are selected; by default all."""

    ranks: frozenset[int] | None = None
    pattern: re.Pattern[str] | None = None

    def wants(self, line: Line, ranks: range) -> bool:
        """Whether a line of the host that runs `ranks` is selected; an agent's own line belongs to each of them."""
        of = ranks if line.rank is None else (line.rank,)
        return self.wants_any(of) and (self.pattern is None or self.pattern.search(line.text) is not None)

    def wants_any(self, ranks: Iterable[int]) -> bool:
        """Whether lines of at least one of these ranks are selected."""
        return self.ranks is None or not self.ranks.isdisjoint(ranks)


def select(ranks: str | None, pattern: str | None) -> Select:
    """What `--rank` and `--grep` select. Raises UserError when either cannot be parsed."""
    try:
        return Select(_ranks(ranks), None if pattern is None else re.compile(pattern))
    except re.error as error:
        raise UserError(f"--grep {pattern} is not a regular expression: {error}.") from None


def exist(select: Select, processes: int) -> None:
    """Raises UserError when a rank that was named is none of the job's."""
    missing = sorted(rank for rank in select.ranks or () if rank >= processes)
    if missing:
        known = "the only rank is 0" if processes == 1 else f"ranks are 0–{processes - 1}"
        raise UserError(f"--rank {missing[0]} does not exist: {known}.")


def usual(processes: int, failing: int | None = None) -> Select:
    """What is selected without `--rank`: every rank of a small gang; of a large one rank 0 and the one that failed."""
    return Select(None if processes <= _MANY else frozenset({0, failing or 0}))


def _ranks(text: str | None) -> frozenset[int] | None:
    if text in (None, "all"):
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--rank {text} is not a list of ranks.", "write 3, or 0,4-7, or all.")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
