"""Timeline of a run: the cause of every second in order, and the phases of its ranks.

Positions on the axis are seconds of running, without the time between two starts. The records have
the exact seconds of each attempt by cause, and metrics.jsonl has their parts in each interval of
steps. Seconds that are in no interval are drawn at the end of their attempt.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch.launcher.report.curves import Interval
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.records import rank_history
from jaxlaunch.records.rank_history import Column, CurrentHang, RankHistory
from jaxlaunch.records.summary import AttemptProgress, AttemptRecord, StartRecord

DOWN, STEP, LOST = "down", "step", "lost_work"
# The cause that a start begins with.
FIRST_CAUSE = "rendezvous"
# Causes that alternate with steps.
_ALTERNATING = ("data", "eval", "save")
# The largest number of pieces into which the steps of an attempt are divided.
_MAX_PIECES = 400
# Shorter pieces are merged into the segment before them.
_MIN_SEGMENT_S = 0.0005
# Characters of the place at which a rank hung.
_MAX_PLACE_CHARS = 300
# Letters of ranks that cannot wait for another one.
_ENDED_LETTERS = (rank_history.ENDED, rank_history.UNKNOWN, rank_history.LETTERS["done"])

# A cause and its seconds.
Piece = tuple[str, float]


class Segment(NamedTuple):
    """Consecutive seconds of one cause, on the axis."""

    begin: float
    end: float
    cause: str


class Span(NamedTuple):
    """The Unix times of a start, and its beginning on the axis."""

    started_at: float
    ended_at: float
    begin: float


class Attempt(NamedTuple):
    """An attempt on the axis. It has no record while it runs."""

    start: int
    begin: float
    end: float
    record: AttemptRecord | None
    number: int
    # The first step that it trained, or None if it has trained none or it is unknown.
    first_step: int | None


class Timeline(NamedTuple):
    """The starts, causes and attempts of a run on one axis."""

    spans: Sequence[Span]
    segments: Sequence[Segment]
    attempts: Sequence[Attempt]

    def axis_position(self, time: float) -> float:
        """Return the position of a Unix time, between two starts that of the later start."""
        for span in self.spans:
            if time <= span.ended_at:
                return span.begin + max(0.0, time - span.started_at)
        last = self.spans[-1] if self.spans else Span(time, time, 0.0)
        return last.begin + last.ended_at - last.started_at

    @property
    def wall_s(self) -> float:
        """Seconds of running, without the time between two starts."""
        return sum(span.ended_at - span.started_at for span in self.spans)

    def seconds_between(self, begin: float, end: float, causes: Collection[str]) -> float:
        """Return the seconds of some causes between two positions."""
        first = bisect.bisect_right(self.segments, begin, key=lambda segment: segment.end)
        last = bisect.bisect_left(self.segments, end, key=lambda segment: segment.begin)
        return sum(
            min(end, segment.end) - max(begin, segment.begin)
            for segment in self.segments[first:last]
            if segment.cause in causes
        )

    @property
    def seconds_by_cause(self) -> dict[str, float]:
        """Seconds by cause."""
        seconds = dict[str, float]()
        for segment in self.segments:
            seconds[segment.cause] = seconds.get(segment.cause, 0.0) + segment.end - segment.begin
        return seconds


def build_timeline(
    starts: Sequence[StartRecord],
    records: Sequence[AttemptRecord],
    intervals: Sequence[Interval],
    running: AttemptProgress | None,
    totals_s: Mapping[int, float],
) -> Timeline:
    """Build the timeline of a run.

    Args:
        starts: Starts of the run, oldest first.
        records: Finished attempts, oldest first.
        intervals: Logged intervals of steps, oldest first.
        running: The attempt that has no record yet, if one runs.
        totals_s: All seconds of each start by its number, including those before its row was
            written.
    """
    spans, segments, attempts = list[Span](), list[Segment](), list[Attempt]()
    begin = 0.0
    for start in starts:
        ends = list[tuple[float, AttemptRecord | AttemptProgress]]()
        ends += [(record.ended, record) for record in records if record.uid == start.uid]
        if start is starts[-1] and running is not None:
            ends.append((running.at, running))
        ended_at = max([start.ended or 0.0, start.started, *(at for at, _ in ends)])
        previous_end = began_at = min(start.started, ended_at - totals_s.get(start.start, 0.0))
        pieces = list[Piece]()
        offset_s = begin - began_at
        for attempt_ended_at, progress in ends:
            previous_end, attempt_began_at = _add_attempt(
                previous_end, attempt_ended_at, progress.seconds, intervals, pieces
            )
            times = offset_s + attempt_began_at, offset_s + previous_end
            end_record = progress if isinstance(progress, AttemptRecord) else None
            attempts.append(
                Attempt(start.start, *times, end_record, progress.attempt, progress.first_step)
            )
        pieces.append((DOWN, ended_at - previous_end))
        spans.append(Span(began_at, ended_at, begin))
        segments += _join_pieces(pieces, begin)
        begin += ended_at - began_at
    return Timeline(spans, segments, attempts)


def _add_attempt(
    previous_end: float,
    ended_at: float,
    seconds: Mapping[str, float],
    intervals: Sequence[Interval],
    pieces: list[Piece],
) -> tuple[float, float]:
    """Append the pieces of an attempt and of the gap before it. Return its end and beginning."""
    ended_at, total_s = max(previous_end, ended_at), sum(seconds.values())
    began_at = max(previous_end, ended_at - total_s)
    pieces.append((DOWN if pieces else FIRST_CAUSE, began_at - previous_end))
    if total_s <= 0:
        pieces.append((DOWN, ended_at - began_at))
        return ended_at, began_at
    # The scale is below 1 if the clocks of two hosts make attempts overlap.
    scale = (ended_at - began_at) / total_s
    loop_causes = (STEP, LOST, *_ALTERNATING)
    startup = [(cause, spent) for cause, spent in seconds.items() if cause not in loop_causes]
    # A "down" piece comes first: the attempt waited until the one before it had ended.
    startup.sort(key=lambda piece: piece[0] != DOWN)
    loop_began_at = began_at + sum(spent for _, spent in startup) * scale
    own_intervals = [
        interval for interval in intervals if loop_began_at < interval[1] <= ended_at + 1
    ]
    attempt_pieces = (*startup, *_list_alternating(seconds, own_intervals))
    pieces += [(cause, spent * scale) for cause, spent in attempt_pieces]
    down_s = sum(spent for cause, spent in startup if cause == DOWN)
    return ended_at, began_at + down_s * scale


def _list_alternating(seconds: Mapping[str, float], intervals: Sequence[Interval]) -> list[Piece]:
    """Divide the steps of an attempt into pieces. The last steps are those that were lost."""
    left_s = {cause: max(0.0, seconds.get(cause, 0.0)) for cause in _ALTERNATING}
    steps_s = max(0.0, seconds.get(STEP, 0.0) + seconds.get(LOST, 0.0))
    pieces = list[Piece]()
    # Neighbouring intervals are merged if there are more than a screen can show.
    group_size = -(-len(intervals) // (_MAX_PIECES // 4)) or 1
    for start in range(0, len(intervals), group_size):
        group = intervals[start : start + group_size]
        wall_s = sum(interval[2] for interval in group)
        spent_s = {cause: sum(interval[3][cause] for interval in group) for cause in _ALTERNATING}
        for cause in ("data", STEP, "eval", "save"):
            if cause == STEP:
                taken_s = min(steps_s, max(0.0, wall_s - sum(spent_s.values())))
                steps_s -= taken_s
            else:
                taken_s = min(left_s[cause], spent_s[cause])
                left_s[cause] -= taken_s
            pieces.append((cause, taken_s))
    left_s[STEP] = steps_s
    pieces += [(cause, left_s[cause]) for cause in ("data", STEP, "eval", "save")]
    lost_s, reversed_pieces = seconds.get(LOST, 0.0), list[Piece]()
    for cause, spent in reversed(pieces):
        if cause == STEP and lost_s > 0:
            lost_part_s = min(lost_s, spent)
            lost_s -= lost_part_s
            reversed_pieces += [(LOST, lost_part_s), (STEP, spent - lost_part_s)]
        else:
            reversed_pieces.append((cause, spent))
    return reversed_pieces[::-1]


def _join_pieces(pieces: Iterable[Piece], begin: float) -> list[Segment]:
    """Return the pieces as consecutive segments. Neighbours of the same cause are joined."""
    segments = list[Segment]()
    for cause, spent in pieces:
        if spent <= 0:
            continue
        if segments and (segments[-1].cause == cause or spent < _MIN_SEGMENT_S):
            segments[-1] = segments[-1]._replace(end=begin + spent)
        else:
            segments.append(Segment(begin, begin + spent, cause))
        begin += spent
    return segments


def rank_phases(
    history: RankHistory, timeline: Timeline, *, has_lag: bool = True
) -> dict[str, Any] | None:
    """Return the phases of the ranks over time, or None for a single rank.

    Each of the `columns` is a sample [from, to, letters, lags], encoded as in the history. The
    letters are the phases of the ranks, and the lags are the steps by which each rank is behind the
    foremost, if `has_lag`. A sample stands for the time since the one before it, or for one period
    after a gap.
    """
    ranks = max((len(rank_history.decode_letters(column)) for column in history.columns), default=0)
    if ranks < 2:
        return None
    columns, previous_end = [], 0.0
    for column in history.columns:
        end = timeline.axis_position(column.time)
        is_next = end - previous_end < 1.8 * history.period_s
        begin = previous_end if is_next else end - history.period_s
        if end > begin:
            columns.append([round(begin, 2), round(end, 2), column.letters, column.lags])
        previous_end = max(previous_end, end)
    # The letters of ranks that have ended or have reported nothing stand for no phase.
    letters = {letter: phase for phase, letter in rank_history.LETTERS.items() if phase is not None}
    letters |= {rank_history.HUNG: "hung", rank_history.WAITS: "waits"}
    hangs = list(_list_hangs(timeline))
    is_running = bool(timeline.attempts) and timeline.attempts[-1].record is None
    if history.hang is not None and is_running:
        # No timeout has passed yet, and the step may still be completed.
        begin = timeline.axis_position(history.hang.since)
        hangs.append(_hang_row(history.hang, begin, max(begin, timeline.wall_s)))
    for hang in hangs:
        _mark_hang(columns, hang)
    return {
        "ranks": ranks,
        "letters": letters,
        "columns": columns,
        "hangs": hangs,
        "slow": [slow._asdict() for slow in history.list_slow_ranks()],
        "has_lag": has_lag,
        "has_own": any(column.own for column in history.columns),
    }


def _hang_row(hang: CurrentHang, begin: float, end: float) -> dict[str, Any]:
    return {
        "rank": hang.rank,
        "from": begin,
        "to": end,
        "place": escape_controls(hang.place)[:_MAX_PLACE_CHARS],
        "has_waiting": hang.has_waiting,
    }


def _list_hangs(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield, for each attempt that hung, the rank that it waited for and the time."""
    for attempt in timeline.attempts:
        failure = None if attempt.record is None else attempt.record.verdict.failure
        if failure is not None and failure.hang is None and failure.cause is not None:
            failure = failure.cause
        if failure is None or failure.hang is None or failure.rank is None:
            continue
        hang = failure.hang
        begin = max(attempt.begin, attempt.end - hang.elapsed_s)
        row = CurrentHang(failure.rank, hang.place, 0.0, hang.waiting.count > 0)
        yield _hang_row(row, begin, attempt.end)


def _mark_hang(columns: list[list[Any]], hang: Mapping[str, Any]) -> None:
    """Mark the rank that hung, and the ranks that waited for it, with their own letters."""
    for column in columns:
        if column[1] <= hang["from"] or column[0] >= hang["to"]:
            continue
        letters = rank_history.decode_letters(Column(0.0, column[2], ""))
        for rank, letter in enumerate(letters):
            if rank == hang["rank"]:
                letters[rank] = rank_history.HUNG
            elif hang["has_waiting"] and letter not in _ENDED_LETTERS:
                letters[rank] = rank_history.WAITS
        column[2] = rank_history.encode_letters(letters)
