"""Report of one run as plain values, for its page and for comparisons."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.report import curves, headline, run_files
from jaxlaunch.launcher.report.curves import Curve, Point
from jaxlaunch.launcher.report.remaining import estimate_remaining_s
from jaxlaunch.launcher.report.run_files import CurveFile, CurveTable, RunBrief
from jaxlaunch.launcher.report.timeline import Attempt, Timeline, build_timeline, rank_phases
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.records.rank_history import RankHistory
from jaxlaunch.records.run_numbers import TimedNumbers
from jaxlaunch.records.summary import RankMemory, StartRecord, Summary, newest_effective_start
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import RunFolder, start_rows

# The largest number of ranks whose log ends are on the page.
MAX_RANKS = 64
# The number of newest attempts on the page.
MAX_ATTEMPTS = 500
MAX_SAMPLES = 12
# Characters of one sample.
MAX_TEXT_CHARS, MAX_PICTURE_CHARS = 4000, 400_000
_STACK_CHARS, _MESSAGE_CHARS, _KEY_CHARS = 8000, 2000, 100
# The sections of a page that only some sources have, and their values without one. `unread` has a
# sentence for each place of the page whose data could not be read.
SECTIONS: Mapping[str, Any] = {
    "notes": [],
    "ranks": [],
    "memory": [],
    "hosts": [],
    "checkpoints": [],
    "differs": [],
    "classes": None,
    "samples": [],
    "commands": [],
    "explanation": None,
    "unread": {},
}
_END_PHRASES = {"done": "is done", "stopped": "was stopped", "failed": "failed"}


class RunReader:
    """Reader of one run. Repeated reads parse only the new rows of its files of metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics, self.evals = CurveFile(path / layout.METRICS), CurveFile(path / layout.EVALS)

    def read_report(self) -> RunReport:
        """Return the run as it is now."""
        self.metrics.read_new_rows()
        self.evals.read_new_rows()
        files = RunFolder(self.path)
        summary = files.read_summary()
        starts = start_rows(summary)
        uids = dict.fromkeys(start.uid for start in starts)
        records = [record for uid in uids for record in files.read_records(uid)]
        # All seconds of each start that has ended, including those before its row was written.
        totals_s = {}
        for start in starts:
            if start.ended:
                start_summary = run_files.read_start_summary(files, start, starts)
                totals_s[start.start] = (
                    sum(start_summary.seconds.values()) if start_summary else 0.0
                )
        running = None if summary is None or summary.verdict is not None else summary.of
        if running is not None:
            ended = (record.attempt for record in records if record.uid == running.uid)
            if max(ended, default=0) >= running.attempt:
                running = None
        timeline = build_timeline(
            starts, records[-MAX_ATTEMPTS:], self.metrics.intervals.items, running, totals_s
        )
        return RunReport(
            brief=run_files.read_brief(self.path),
            starts=starts,
            timeline=timeline,
            ranks=RankHistory.from_json(files.read_json(layout.RANKS)),
            metrics=self.metrics,
            evals=self.evals,
            folder=self.path,
            summary=summary,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(abc.ABC):
    """State of a run at one moment, from the files of its folder or from a cluster."""

    brief: RunBrief
    starts: Sequence[StartRecord]
    timeline: Timeline
    ranks: RankHistory
    metrics: CurveTable
    evals: CurveTable

    @property
    @abc.abstractmethod
    def job(self) -> Mapping[str, Any]:
        """The job as plain values, empty if it is unknown."""

    @abc.abstractmethod
    def describe_state(self) -> dict[str, str]:
        """Return state, cause and advice, as in the first line of `launcher explain`."""

    @abc.abstractmethod
    def list_sections(self) -> dict[str, Any]:
        """Return the sections of the page that only this source has, by SECTIONS."""

    def list_memory_facts(self) -> list[tuple[str, str]]:
        """Return what is known of the memory of other hosts than the first."""
        return []

    # Whether the history of the ranks has the steps by which each is behind.
    has_lag: ClassVar[bool] = True

    def list_versions(self) -> dict[str, str]:
        """Return the versions of packages and the digest of the code, as far as known."""
        return {}

    @property
    def seconds_by_cause(self) -> dict[str, float]:
        """Seconds by cause."""
        return self.timeline.seconds_by_cause

    def named_curves(self) -> dict[str, Curve]:
        """Return all curves by name. The names of those in eval.jsonl begin with `eval/`."""
        evals = {f"eval/{name}": curve for name, curve in self.evals.curves.items()}
        return self.metrics.curves | evals

    def describe_results(self) -> str:
        """Return `: accuracy 98.6 %, eval/loss 0.057; 2 kills cost 35 s`, as far as known."""
        results = ", ".join(f"{name} {value}" for name, value in self._list_results())
        restarts = headline.describe_restarts(self.timeline)
        text = f": {results}" if results else ""
        return text + (f"; {restarts}" if restarts else "")

    def _list_results(self) -> list[tuple[str, str]]:
        metric, _ = run_files.best_metric(self.job)
        return headline.list_results(self.named_curves(), metric)

    def to_json(self, max_points: int = curves.MAX_PAGE_POINTS) -> dict[str, Any]:
        """Return the data of the page, whose texts are untrusted.

        All curves together have at most `max_points` points, unless there are very many curves.
        """
        shown_curves = {name: curve for name, curve in self.named_curves().items() if curve.points}
        limit = max(curves.MIN_CURVE_POINTS, max_points // max(1, len(shown_curves)))
        brief, seconds, wall_s = self.brief, self.seconds_by_cause, self.timeline.wall_s
        numbers = TimedNumbers(**(brief.run_numbers() | {"goodput": None}), seconds=seconds)
        facts = list(numbers.describe_numbers())
        if memory := headline.describe_memory(self.metrics.curves):
            facts.append(("most memory", memory))
        facts += self.list_memory_facts()
        cards = self._list_results()
        if speed := headline.describe_speed(self.metrics.curves):
            cards.append(("Speed", speed))
        return {
            "name": escape_controls(brief.name),
            "sentence": self.describe_state(),
            "step": brief.step,
            "steps": self.total_steps(),
            "left_s": self.remaining_s(),
            "goodput": numbers.goodput,
            "cards": cards,
            "facts": [
                (label, text)
                for label, text in facts
                # The cards have the metrics, each with its name.
                if not (cards and label == "metrics")
            ],
            "seconds": {cause: round(spent, 3) for cause, spent in seconds.items()},
            "wall_s": round(wall_s, 3),
            "began": brief.began_at,
            "at": brief.updated_at,
            "owner": brief.owner,
            "restarts": brief.restart_count,
            "saved": brief.committed,
            "strip": [
                [round(begin, 3), round(end, 3), cause]
                for begin, end, cause in self.timeline.segments
            ],
            "attempts": [
                _attempt_row(attempt) | {"end": end}
                for attempt, end in zip(
                    self.timeline.attempts, headline.describe_ends(self.timeline), strict=True
                )
            ],
            "starts": [
                {
                    "number": start.start,
                    "at": self._axis_seconds(start.started),
                    "started": start.started,
                    "code": start.code,
                    "first_step": start.first_step,
                    "last_step": start.last_step,
                    "refusal": escape_controls(start.refusal)[:_MESSAGE_CHARS],
                }
                for start in self.starts
            ],
            "marks": self._list_marks(),
            "curves": {
                escape_controls(name): self._curve_points(curve.reduce_points(limit))
                for name, curve in shown_curves.items()
            },
            "drawn": [
                escape_controls(name) for name in shown_curves if headline.is_shown_curve(name)
            ],
            "heat": rank_phases(self.ranks, self.timeline, has_lag=self.has_lag),
            "job": run_files.job_text(self.job),
            **SECTIONS,
            **self.list_sections(),
        }

    def total_steps(self) -> int | None:
        """Return the total steps of the job, as given or computed from the epochs so far."""
        if self.brief.steps is not None:
            return self.brief.steps
        if self.brief.state == "done":
            return self.brief.step
        epochs = run_files.find_value(self.job, "train", "epochs")
        epoch_curve = self.metrics.curves.get("epoch")
        if type(epochs) not in (int, float) or epoch_curve is None:
            return None
        step, _, epoch = epoch_curve.points[-1]
        return math.floor(epochs * step / epoch + 1e-6) if epoch > 0 else None

    def remaining_s(self) -> float | None:
        """Return the seconds that the run still needs, or None if they are unknown."""
        steps, step = self.total_steps(), self.brief.step
        if self.brief.state != "running" or steps is None or step is None:
            return None
        return estimate_remaining_s(self.metrics, self.job, step, steps)

    def _curve_points(self, points: Sequence[Point]) -> list[list[float | None]]:
        """Return steps, seconds on the axis, and values."""
        steps, times, values = zip(*points, strict=True)
        return [
            [int(step) for step in steps],
            [None if math.isnan(time) else self._axis_seconds(time) for time in times],
            [float(f"{value:.6g}") for value in values],
        ]

    def _axis_seconds(self, time: float) -> float:
        return round(self.timeline.axis_position(time), 3)

    def _list_marks(self) -> list[list[Any]]:
        evals = next(iter(self.evals.curves.values()), Curve())
        points_by_kind = {
            "eval": evals.reduce_points(run_files.MAX_MARKS),
            "save": self.metrics.pauses["save_s"].points,
        }
        return [
            [self._axis_seconds(time), kind, int(step)]
            for kind, points in points_by_kind.items()
            for step, time, _ in points
            if not math.isnan(time)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport(Report):
    """State of a run on this machine."""

    folder: Path
    summary: Summary | None

    @functools.cached_property
    def job(self) -> Mapping[str, Any]:
        """The job as plain values, empty if it is unknown."""
        return run_files.read_job(self.folder)

    def list_versions(self) -> dict[str, str]:
        """Return the versions of packages and the digest of the code, as far as known."""
        return run_files.list_versions(self.summary)

    def list_sections(self) -> dict[str, Any]:
        """Return the sections of the page that are read from the run folder."""
        notes = () if self.summary is None else self.summary.notes[-20:]
        return {
            "notes": [escape_controls(note)[:_MESSAGE_CHARS] for note in notes],
            "ranks": self._list_ranks(),
            "memory": list(map(_memory_row, () if self.summary is None else self.summary.memory)),
            "checkpoints": run_files.list_checkpoints(self.folder, self.evals),
            "differs": run_files.list_changes(self.folder, self.starts),
            "classes": run_files.read_classification(self.folder),
            "samples": self._list_samples(),
            "commands": self._list_commands(),
        }

    def list_memory_facts(self) -> list[tuple[str, str]]:
        """Return the memory of the fullest host. The curves have that of the first one."""
        fullest = () if self.summary is None else self.summary.memory[:1]
        return [("fullest host", row.describe()) for row in fullest if row.host > 0]

    def describe_state(self) -> dict[str, str]:
        """Return state, cause and advice, as in the first line of `launcher explain`."""
        state, step = self.brief.state, self.brief.step
        name = f"Run {escape_controls(self.brief.name)}"
        duration, numbers = headline.format_span(self.timeline.wall_s), self.describe_results()
        at_step = "" if step is None else f" at step {step}"
        verdict = None if self.summary is None else self.summary.verdict
        if state == run_files.KILLED:
            verb = "starts the run again" if self.brief.committed is None else "resumes the run"
            next_step = (
                f"Its launcher was killed before it could write the end. The same command {verb}."
            )
            return {
                "state": state,
                "text": f"{name} was killed after {duration}{at_step}{numbers}.",
                "todo": next_step,
            }
        if verdict is None:
            text = f"{name} has written nothing yet{at_step}."
            if state == "running":
                steps = self.total_steps()
                of_steps = "" if step is None or steps is None else f" of {steps}"
                text = f"{name} has been running for {duration}{at_step}{of_steps}{numbers}."
                text += self._describe_hang()
            return {"state": state, "text": text, "todo": self._describe_slow_rank()}
        outcome = contract.outcome_for_code(verdict.code)
        next_step = ""
        if outcome.is_stop:
            next_step = "The same command starts it again: it reported no saved step."
            if self.brief.committed is not None:
                next_step = "It is saved. The same command resumes it."
        elif verdict.code == contract.DONE:
            next_step = self._describe_slow_rank()
        else:
            next_step = f"Exit code {verdict.code}: {outcome.meaning}."
            if link := troubleshooting.command_for_code(verdict.code):
                next_step += f" What to do: {link}"
        if self.starts and self.starts[-1] is not newest_effective_start(self.starts):
            start = self.starts[-1]
            refusal = escape_controls(start.refusal)[:_MESSAGE_CHARS]
            next_step += f" Start {start.start} was refused (exit {start.code}): {refusal}"
        message = escape_controls(verdict.message)[:_MESSAGE_CHARS]
        text = f"{name} {_END_PHRASES[state]} after {duration}{at_step}: {message}"
        if verdict.code == contract.DONE:
            text = f"{name} is done in {duration}{numbers or at_step}."
        return {"state": state, "text": text, "todo": next_step.strip()}

    def _describe_hang(self) -> str:
        """Return a sentence about a rank that hangs before a timeout has passed, or ""."""
        if (hang := self.ranks.hang) is None:
            return ""
        waiting_text = "; the other ranks wait for it" if hang.has_waiting else ""
        seconds = max(0.0, (self.brief.updated_at or hang.since) - hang.since)
        place = escape_controls(hang.place)[:_MESSAGE_CHARS]
        span = headline.format_span(seconds)
        return f" Rank {hang.rank} has not ended its step for {span}, {place}{waiting_text}."

    def _describe_slow_rank(self) -> str:
        """Return a sentence about the rank that the others wait for in each step, or ""."""
        if not (slow_ranks := self.ranks.list_slow_ranks()):
            return ""
        slow = slow_ranks[0]
        return (
            f"Rank {slow.rank} is {(slow.own - slow.usual) / 10:.1f} % slower than the others, "
            f"which wait for it: it spends {slow.own / 10:.1f} % of each step on data and its own "
            f"Python code, the others {slow.usual / 10:.1f} %."
        )

    def _list_ranks(self) -> list[dict[str, Any]]:
        """Return the end of each rank's log and its stack after a hang, the failed rank first."""
        stacks = {} if self.summary is None else dict(self.summary.stacks)
        verdict = None if self.summary is None else self.summary.verdict
        failed_rank = None if verdict is None else verdict.rank
        first_ranks = [] if failed_rank is None else [failed_rank]
        ranks = list(dict.fromkeys([*first_ranks, *sorted(stacks), *range(MAX_RANKS)]))[:MAX_RANKS]
        newest_start = newest_effective_start(self.starts)
        start = 1 if newest_start is None else newest_start.start
        tails = dict(RunFolder(self.folder).read_log_tails(start, ranks))
        return [
            {
                "rank": rank,
                "tail": [escape_controls(line)[:500] for line in tails.get(rank, [])[-60:]],
                "stack": escape_controls(stacks.get(rank, ""))[-_STACK_CHARS:],
                "is_cause": rank == failed_rank,
            }
            for rank in ranks
            if rank in tails or rank in stacks
        ]

    def _list_samples(self) -> list[dict[str, Any]]:
        """Return the samples that the model generated or the program reported, by step."""
        folder = self.folder
        rows = run_files.read_samples(folder / layout.SAMPLES, MAX_SAMPLES)
        samples_by_step = dict[int, list[Any]]()
        for row in rows + run_files.read_reports(folder, MAX_SAMPLES):
            if type(step := row.get("step")) is int and 0 <= step < 2**53:
                samples = _sanitize_value(row.get("samples"))
                samples = samples if isinstance(samples, list) else [samples]
                samples_by_step.setdefault(step, []).extend(samples)
        return [{"step": step, "samples": rows} for step, rows in sorted(samples_by_step.items())]

    def _list_commands(self) -> list[list[str]]:
        folder = run_files.quote_folder(self.folder)
        commands = [["Say why it is where it is", f"launcher explain {folder}"]]
        commands.append(["Read a rank's log", f"launcher logs {folder} --rank 0 --tail 100"])
        if self.brief.state != "done":
            resume = f"launcher run {folder}/job.yaml --run-dir {folder}"
            has_saved = self.brief.committed is not None
            action = "Continue from the newest checkpoint" if has_saved else "Start it again"
            commands.append([action, resume])
        if self.metrics.curves:
            commands.append(["Compare it with another run", f"launcher compare {folder} OTHER"])
        if (place := layout.read_tracker_place(self.folder)) is not None:
            is_url = place[0] == "url"
            commands.append(["Its page at the tracker" if is_url else "Its tracker", place[1]])
        return [[name, escape_controls(text)] for name, text in commands]


def _sanitize_value(value: Any, depth: int = 0) -> Any:
    """Reduce a value of a sample to texts and numbers, without deep nesting."""
    if isinstance(value, str):
        is_picture = value.startswith("data:image/png;base64,")
        return value[:MAX_PICTURE_CHARS] if is_picture else escape_controls(value[:MAX_TEXT_CHARS])
    if isinstance(value, dict) and depth < 4:
        items = [(escape_controls(str(key))[:_KEY_CHARS], item) for key, item in value.items()]
        return {key: _sanitize_value(item, depth + 1) for key, item in items[:50]}
    if isinstance(value, list) and depth < 4:
        return [_sanitize_value(item, depth + 1) for item in value[:50]]
    if type(value) is int:
        return value if abs(value) < 2**53 else None
    is_number = type(value) is float and math.isfinite(value)
    return value if is_number or type(value) is bool else None


def _memory_row(memory: RankMemory) -> dict[str, Any]:
    """Return the memory of a rank and of its host as the page shows it."""
    return {
        "rank": memory.rank,
        "host": memory.host,
        "process": f"{memory.process_gib:.3g} GiB",
        "used": memory.describe_use(),
    }


def _attempt_row(attempt: Attempt) -> dict[str, Any]:
    row: dict[str, Any] = {"start": attempt.start, "number": attempt.number}
    row |= {"from": round(attempt.begin, 3), "to": round(attempt.end, 3)}
    record = attempt.record
    if record is None:
        return row | {"cause": "running", "code": None, "message": "running"}
    verdict = record.verdict
    return row | {
        "generation": record.generation,
        "cause": record.cause,
        "code": verdict.code,
        "message": escape_controls(verdict.message)[:_MESSAGE_CHARS],
        "rank": verdict.rank,
        "step": verdict.step,
        "saved": record.last_committed,
        "memory": "" if record.memory is None else record.memory.describe(),
        "traceback": escape_controls(verdict.traceback or "")[-_STACK_CHARS:],
    }
