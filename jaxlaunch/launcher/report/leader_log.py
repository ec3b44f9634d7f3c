"""Curves, attempts and phases of a job, from the records in the log of its leader. Pure.

The leader writes a heartbeat every 15 seconds (jaxlaunch/records/log_lines) with the newest metrics
of rank 0, the phases of the ranks, and the seconds of the whole run by cause. A heartbeat with new
metrics becomes a row of the curves, as metrics.jsonl has them: its parts are the differences of the
seconds to the row before. The seconds of an attempt are the difference between the heartbeats that
follow its end and the end of the attempt before it. Records of earlier pods have the seconds of
their attempts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch import contract
from jaxlaunch.contract import Key
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.launcher.report import curves
from jaxlaunch.launcher.report.run_files import TIME, CurveTable
from jaxlaunch.records import rank_history
from jaxlaunch.records.log_lines import BeatLine, Line, PastLine, TailLine, VerdictLine
from jaxlaunch.records.rank_history import RankHistory
from jaxlaunch.records.summary import AttemptProgress, AttemptRecord
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs.journal import STEP

# Seconds between two heartbeats of a gang whose state does not change.
BEAT_PERIOD_S = 15.0
# Stages of a heartbeat that follow the end of an attempt.
_STAGES_BETWEEN = ("gather", "hold", "leave")
# Causes of the seconds in which a gang trains.
_LOOP_CAUSES = ("step", "data", "eval", "save")
# Prefix of the means over the held-out set among the metrics of the trainer.
_EVAL_PREFIX = "eval_"


class _Mark(NamedTuple):
    """The seconds of the run by cause at a time."""

    at: float
    seconds: Mapping[str, float]


class LeaderLog:
    """The course of a run, from the records in a leader's log."""

    def __init__(
        self,
        uid: str,
        *,
        has_trainer: bool,
        max_points: int = curves.MAX_POINTS,
        has_ranks: bool = True,
    ) -> None:
        """Create the log of a JobSet before its first record.

        Args:
            uid: The uid of the JobSet.
            has_trainer: Whether the job has a `train:` block, so that metrics with the prefix
                `eval_` are means over the held-out set.
            max_points: The largest number of points of a curve.
            has_ranks: Whether to keep the phases of the ranks and the ends of their logs.
        """
        self._uid, self._has_trainer, self._has_ranks = uid, has_trainer, has_ranks
        self.metrics, self.evals = CurveTable(max_points), CurveTable(max_points)
        self.ranks = RankHistory()
        self.ranks.period_s = BEAT_PERIOD_S
        self.beat: BeatLine | None = None
        # The end of each rank's log in earlier pods.
        self.tails: dict[int, Sequence[str]] = {}
        self._records: dict[int, AttemptRecord] = {}
        # The end of the attempt before, and the verdict on the attempt if it is known.
        self._begin: _Mark | None = None
        self._verdict: VerdictLine | None = None
        # The step, the metrics and the seconds of the newest row.
        self._row_step: int | None = None
        self._row_metrics: Mapping[str, Any] = {}
        self._row_mark: _Mark | None = None
        self._eval_values: Mapping[str, Any] = {}
        # The records with the newest time, by which records that are read again are recognized.
        self._newest_at = 0.0
        self._newest: list[Line] = []

    def add_records(self, records: Iterable[Line]) -> None:
        """Add records in the order of the log. Those that were added before are skipped."""
        for record in records:
            if record.at < self._newest_at or record in self._newest:
                continue
            if record.at > self._newest_at:
                self._newest_at, self._newest = record.at, []
            self._newest.append(record)
            if isinstance(record, BeatLine):
                self._add_beat(record)
            elif isinstance(record, VerdictLine):
                self._add_verdict(record)
            elif isinstance(record, PastLine):
                self._add_past(record)
            elif isinstance(record, TailLine) and self._has_ranks:
                self.tails[record.rank] = record.lines

    def list_attempts(self, ends: Sequence[AttemptEnd] = ()) -> list[AttemptRecord]:
        """Return the attempts that have ended, oldest first.

        Args:
            ends: Ends that are known from elsewhere, such as the termination messages of pods.
        """
        records = dict(self._records)
        if self._verdict is not None:
            record = self._close_attempt(self._verdict, self._mark_end(self._verdict.at))
            records.setdefault(record.attempt, record)
        for end in ends:
            if end.attempt in records:
                continue
            mark = self._mark_end(0.0)
            is_newest = self.beat is not None and self.beat.attempt == end.attempt
            line = VerdictLine(
                at=mark.at if end.at is None else end.at,
                attempt=end.attempt,
                generation=end.generation,
                verdict=end.verdict,
            )
            if is_newest or end.at is not None:
                begin = None if is_newest else _Mark(line.at, {})
                records[end.attempt] = self._close_attempt(line, mark, begin)
        return [records[number] for number in sorted(records)]

    def running_attempt(self, records: Sequence[AttemptRecord]) -> AttemptProgress | None:
        """Return the attempt of the newest heartbeat, or None if it is among `records`."""
        beat, begin = self.beat, self._begin
        if beat is None or begin is None or any(row.attempt >= beat.attempt for row in records):
            return None
        seconds = _subtract(beat.seconds, begin.seconds)
        return AttemptProgress(self._uid, beat.generation, beat.attempt, begin.at, beat.at, seconds)

    def _add_beat(self, beat: BeatLine) -> None:
        mark = _Mark(beat.at, beat.seconds)
        verdict = self._verdict
        if verdict is not None and (
            beat.stage in _STAGES_BETWEEN or beat.attempt != verdict.attempt
        ):
            end = self._without_pause(mark)
            record = self._close_attempt(verdict, end)
            self._records[record.attempt] = record
            self._verdict, self._begin, self._row_mark = None, end, None
        elif self._begin is None:
            self._begin = mark
        self.beat = beat
        if beat.stage == "run":
            self._add_row(beat, mark)
            if self._has_ranks:
                self._add_phases(beat)

    def _without_pause(self, mark: _Mark) -> _Mark:
        """Return the mark of an end before which the gang was not down yet.

        The seconds until the next attempt are part of that one.
        """
        down_s = 0.0 if self.beat is None else self.beat.seconds.get("down", 0.0)
        pause_s = max(0.0, mark.seconds.get("down", 0.0) - down_s)
        return _Mark(mark.at - pause_s, {**mark.seconds, "down": down_s})

    def _add_verdict(self, line: VerdictLine) -> None:
        if self._begin is None:
            self._begin = _Mark(line.at, {})
        self._verdict = line

    def _add_past(self, line: PastLine) -> None:
        # The next heartbeat is the first of new pods.
        self._begin = self._verdict = self._row_mark = None
        if line.verdict is None or line.ended is None:
            return
        seconds = dict(line.seconds)
        began = line.ended - sum(seconds.values())
        self._records[line.attempt] = self._make_record(
            line.attempt, line.generation, line.verdict, seconds, began, line.ended
        )

    def _close_attempt(
        self, line: VerdictLine, end: _Mark, begin: _Mark | None = None
    ) -> AttemptRecord:
        """Return the record of an attempt that ended, between two marks."""
        begin = begin or self._begin or end
        seconds = _subtract(end.seconds, begin.seconds)
        numbers = line.attempt, line.generation
        record = self._make_record(
            *numbers, line.verdict, seconds, begin.at, end.at, line.committed
        )
        return dataclasses.replace(record, memory=line.memory)

    def _make_record(
        self,
        attempt: int,
        generation: int,
        verdict: Verdict,
        seconds: Mapping[str, float],
        started: float,
        ended: float,
        committed: int | None = None,
    ) -> AttemptRecord:
        return AttemptRecord(
            uid=self._uid,
            generation=generation,
            attempt=attempt,
            cause=verdict.cause,
            rank=verdict.rank,
            first_committed=None,
            last_committed=committed,
            seconds=seconds,
            verdict=verdict,
            started=min(started, ended),
            ended=ended,
        )

    def _mark_end(self, at: float) -> _Mark:
        """Return the mark of an end that no heartbeat has followed yet."""
        beat = self.beat
        if beat is None:
            return _Mark(at, {})
        seconds, rest_s = dict(beat.seconds), max(0.0, at - beat.at)
        cause = beat.phase if beat.phase in contract.CLOCK_CAUSES else "step"
        seconds[cause] = seconds.get(cause, 0.0) + rest_s
        return _Mark(beat.at + rest_s, seconds)

    def _add_row(self, beat: BeatLine, mark: _Mark) -> None:
        """Add a row to the curves if the metrics or, without metrics, the step are new."""
        metrics = dict(beat.metrics or {})
        step = metrics.pop(STEP, beat.step)
        metrics.pop(Key.BEST_STEP, None)
        if type(step) is not int or (step, metrics) == (self._row_step, self._row_metrics):
            return
        self._row_metrics = dict(metrics)
        if self._row_step is not None and step < self._row_step:
            # A resumed attempt trains these steps again.
            self.metrics.drop_from(step)
            self.evals.drop_from(step)
        since = self._row_mark or self._begin or mark
        parts = _subtract(mark.seconds, since.seconds)
        spent_s = {cause: parts.get(cause, 0.0) for cause in _LOOP_CAUSES}
        row = {f"{cause}_s": spent for cause, spent in spent_s.items() if cause != STEP}
        row["wall_s"] = sum(spent_s.values())
        if self._has_trainer:
            values = {
                name.removeprefix(_EVAL_PREFIX): metrics.pop(name)
                for name in list(metrics)
                if name.startswith(_EVAL_PREFIX)
            }
            if values and values != self._eval_values:
                self._eval_values = values
                self.evals.add_row({STEP: step, TIME: mark.at, **values})
        self.metrics.add_row({**metrics, **row, STEP: step, TIME: mark.at})
        self._row_step, self._row_mark = step, mark

    def _add_phases(self, beat: BeatLine) -> None:
        """Add the phases of the ranks to their history.

        A heartbeat lists only the first ranks of a phase. The others are known if only one phase
        has more.
        """
        count = min(sum(beat.counts.values()), rank_history.MAX_RANKS)
        columns = self.ranks.columns
        if not count or (columns and beat.at <= columns[-1].time):
            return
        cut = [name for name, size in beat.counts.items() if size > len(beat.phases.get(name, ()))]
        rest = _phase_letter(cut[0]) if len(cut) == 1 else rank_history.UNKNOWN
        letters = [rest] * count
        for name, ranks in beat.phases.items():
            for rank in ranks:
                if rank < count:
                    letters[rank] = _phase_letter(name)
        self.ranks.add_column(beat.at, letters, [None] * count)


def _phase_letter(name: str) -> str:
    if name == "ended":
        return rank_history.ENDED
    return rank_history.LETTERS.get(name, rank_history.UNKNOWN)


def _subtract(later: Mapping[str, float], earlier: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by cause between two marks. Steps may have become lost work."""
    differences = {cause: spent - earlier.get(cause, 0.0) for cause, spent in later.items()}
    return {cause: spent for cause, spent in differences.items() if spent > 0}
