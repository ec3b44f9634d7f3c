"""Where every second of a run went, in order: the strip above its curves. Pure.

Times are seconds of running: the hours between two starts of a run are left out. What is on record is the seconds of
each attempt by cause, exact, and the parts of each logged interval; in between, seconds of a cause that fall into no
interval stand at the end of its attempt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxlaunch.records.attempt import Record
from jaxlaunch.records.summary import Start

DOWN, STEP, LOST = "down", "step", "lost_work"
FIRST = "rendezvous"  # what a start begins with
_BODY = (STEP, LOST, "data", "eval", "save")  # of contract.CLOCK: in turns; the others come before them, in its order
_MOST_PIECES = 400  # of an attempt
_LEAST_S = 0.0005

Part = tuple[float, float, Mapping[str, float]]  # Unix time at the end of an interval, its seconds, those by cause
Piece = tuple[str, float]  # cause, seconds


@dataclasses.dataclass(frozen=True)
class Segment:
    """Seconds of one cause in a row."""

    begin: float
    end: float
    cause: str


@dataclasses.dataclass(frozen=True)
class Span:
    """When a start ran, in Unix time, and where it begins on the axis."""

    started: float
    ended: float
    begin: float


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An attempt on the axis; its record has no verdict while it runs."""

    start: int
    begin: float
    end: float
    record: Record | None
    number: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The strip of a run."""

    spans: Sequence[Span]
    segments: Sequence[Segment]
    attempts: Sequence[Attempt]

    def at(self, time: float) -> float:
        """A moment on the axis; one between two starts is where the later one begins."""
        for span in self.spans:
            if time <= span.ended:
                return span.begin + max(0.0, time - span.started)
        last = self.spans[-1] if self.spans else Span(time, time, 0.0)
        return last.begin + last.ended - last.started

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause."""
        found = dict[str, float]()
        for segment in self.segments:
            found[segment.cause] = found.get(segment.cause, 0.0) + segment.end - segment.begin
        return found


@dataclasses.dataclass(frozen=True)
class Running:
    """The attempt that goes on: since when, its seconds by cause, and when that was true."""

    number: int
    started: float
    at: float
    seconds: Mapping[str, float]


def of(
    starts: Sequence[Start],
    records: Sequence[Record],
    parts: Sequence[Part],
    running: Running | None,
    totals: Mapping[int, float],
) -> Timeline:
    """The strip of a run: `starts` and `records` the oldest first, as `parts`. `totals`: all seconds of a start by its
    number, those before its row was written included."""
    spans, segments, attempts = [], list[Segment](), list[Attempt]()
    begin = 0.0
    for start in starts:
        mine = [record for record in records if record.uid == start.uid]
        is_last = start is starts[-1]
        ends = [record.ended for record in mine] + ([running.at] if is_last and running else [])
        ended = max([start.ended or 0.0, *ends, start.started])
        now = began = min(start.started, ended - totals.get(start.start, 0.0))
        pieces = list[Piece]()
        for record in mine:
            now, begun = _attempt(now, record.ended, record.seconds, parts, pieces)
            where = (begin + begun - began, begin + now - began)
            attempts.append(Attempt(start.start, *where, record, record.attempt))
        if is_last and running:
            now, begun = _attempt(now, running.at, running.seconds, parts, pieces)
            where = (begin + begun - began, begin + now - began)
            attempts.append(Attempt(start.start, *where, None, running.number))
        pieces.append((DOWN, ended - now))
        spans.append(Span(began, ended, begin))
        segments += _placed(pieces, begin)
        begin += ended - began
    return Timeline(spans, segments, attempts)


def _attempt(
    now: float, ended: float, seconds: Mapping[str, float], parts: Sequence[Part], to: list[Piece]
) -> tuple[float, float]:
    """Appends the pieces of an attempt that ended at `ended`, and what is between it and the one before it. Returns
    when it ended, and when it began."""
    ended, total = max(now, ended), sum(seconds.values())
    begun = max(now, ended - total)
    to.append((DOWN if to else FIRST, begun - now))
    if total <= 0:
        to.append((DOWN, ended - begun))
        return ended, begun
    scale = (ended - begun) / total  # below 1 where clocks of two hosts, or of two attempts, overlap
    waits = [(cause, spent) for cause, spent in seconds.items() if cause not in _BODY]
    waits.sort(key=lambda piece: piece[0] != DOWN)  # it waited for what came before it to end
    first = begun + sum(spent for _, spent in waits) * scale
    inner = [part for part in parts if first < part[0] <= ended + 1]
    whole = [*waits, *_turns(seconds, inner)]
    to += [(cause, spent * scale) for cause, spent in whole]
    return ended, begun + sum(spent for cause, spent in waits if cause == DOWN) * scale


def _turns(seconds: Mapping[str, float], parts: Sequence[Part]) -> Iterable[Piece]:
    """Steps and what came between them, as the intervals say; lost work is the last of the steps."""
    left = {cause: max(0.0, seconds.get(cause, 0.0)) for cause in ("data", "eval", "save")}
    steps = max(0.0, seconds.get(STEP, 0.0) + seconds.get(LOST, 0.0))
    pieces = list[Piece]()
    for _, wall, spent in _grouped(parts):
        for cause in ("data", STEP, "eval", "save"):
            if cause == STEP:
                took = min(steps, max(0.0, wall - sum(spent.values())))
                steps -= took
            else:
                took = min(left[cause], spent[cause])
                left[cause] -= took
            pieces.append((cause, took))
    pieces += [("data", left["data"]), (STEP, steps), ("eval", left["eval"]), ("save", left["save"])]
    return _with_lost(pieces, seconds.get(LOST, 0.0))


def _grouped(parts: Sequence[Part]) -> Iterable[Part]:
    """The intervals, joined to as many as a screen can show."""
    size = -(-len(parts) // (_MOST_PIECES // 4)) or 1
    for at in range(0, len(parts), size):
        group = parts[at : at + size]
        sums = {cause: sum(part[2][cause] for part in group) for cause in ("data", "eval", "save")}
        yield group[-1][0], sum(part[1] for part in group), sums


def _with_lost(pieces: Sequence[Piece], lost: float) -> list[Piece]:
    found = list[Piece]()
    for cause, spent in reversed(pieces):
        if cause == STEP and lost > 0:
            gone = min(lost, spent)
            lost -= gone
            found += [(LOST, gone), (STEP, spent - gone)]
        else:
            found.append((cause, spent))
    return found[::-1]


def _placed(pieces: Iterable[Piece], at: float) -> Iterable[Segment]:
    """The pieces one after the other; neighbours of one cause are one segment."""
    found = list[Segment]()
    for cause, spent in pieces:
        if spent <= 0:
            continue
        if found and (found[-1].cause == cause or spent < _LEAST_S):
            found[-1] = dataclasses.replace(found[-1], end=at + spent)
        else:
            found.append(Segment(at, at + spent, cause))
        at += spent
    return found
