"""One run as it is seen: all that its folder says, in one record of plain values for the page and for comparisons."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.report import checkpoints, classes, folder, jobs, ranks, timeline
from jaxlaunch.launcher.report.rows import Curve, Rows, reported, samples
from jaxlaunch.launcher.report.timeline import Running, Timeline
from jaxlaunch.launcher.wording import visible
from jaxlaunch.records.attempt import Record
from jaxlaunch.records.summary import Start, Summary, ratio
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import rows as starts_of

MOST_RANKS = 64  # whose log ends are on the page
MOST_ATTEMPTS = 500  # the newest
MOST_SAMPLES = 12
MOST_TEXT, MOST_PICTURE = 4000, 400_000  # characters of one sample
_STACK, _MESSAGE, _KEY = 8000, 2000, 100  # characters


class Followed:
    """A run that is looked at again and again: its files of numbers are read only once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics, self.evals = Rows(path / layout.METRICS), Rows(path / layout.EVALS)

    def read(self) -> Seen:
        """The run as it is now."""
        for rows in (self.metrics, self.evals):
            rows.read()
        found = RunFolder(self.path).summary()
        starts = starts_of(found)
        quiet = RunFolder(self.path)
        records = [record for uid in dict.fromkeys(start.uid for start in starts) for record in quiet.records(uid)]
        totals = {
            start.start: sum(_seconds(quiet, found, start, starts[-1]).values()) for start in starts if start.ended
        }
        running = _running(found, records)
        line = timeline.of(starts, records[-MOST_ATTEMPTS:], self.metrics.parts, running, totals)
        return Seen(folder.brief(self.path), found, starts, line, self.metrics, self.evals)


def _seconds(files: RunFolder, found: Summary | None, start: Start, last: Start) -> Mapping[str, float]:
    """The seconds of a start by cause; none where its record is gone."""
    of = found if start is last else files.summary(name=layout.start_file(start.start, layout.SUMMARY))
    return {} if of is None else of.seconds


def _running(found: Summary | None, records: Sequence[Record]) -> Running | None:
    """The attempt that no record has yet."""
    of = None if found is None or found.verdict is not None else found.of
    if of is None or any(record.uid == of.uid and record.attempt >= of.attempt for record in records):
        return None
    return Running(of.attempt, of.started, of.at, of.seconds)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A run at a moment."""

    brief: folder.Brief
    summary: Summary | None
    starts: Sequence[Start]
    timeline: Timeline
    metrics: Rows
    evals: Rows

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all starts, by cause."""
        return self.timeline.seconds

    def curves(self) -> dict[str, Curve]:
        """Every curve by its name on the page: those of eval.jsonl begin with `eval/`."""
        return self.metrics.curves | {f"eval/{name}": curve for name, curve in self.evals.curves.items()}

    def sentence(self) -> dict[str, str]:
        """State, cause and what to do, as `launcher explain` begins."""
        brief = self.brief
        at = "" if brief.step is None else f" at step {brief.step}"
        verdict = None if self.summary is None else self.summary.verdict
        name = f"Run {visible(brief.name)}"
        if brief.state == folder.KILLED:
            todo = "Its launcher was killed before it could write the end. The same command resumes the run."
            return {"state": brief.state, "text": f"{name} was killed{at}.", "todo": todo}
        if verdict is None:
            phase = "is running" if brief.state == "running" else "has written nothing yet"
            return {"state": brief.state, "text": f"{name} {phase}{at}.", "todo": ""}
        text = f"{name} {_ENDS[brief.state]}{at}: {visible(verdict.message)[:_MESSAGE]}"
        return {"state": brief.state, "text": text, "todo": _TODO.get(verdict.code, _todo(verdict.code))}

    def to_json(self) -> dict[str, Any]:
        """What the page is made of. Every text in it is a stranger's until the page shows it as text."""
        brief, found = self.brief, self.summary
        last = self.starts[-1] if self.starts else None
        return {
            "name": visible(brief.name),
            "sentence": self.sentence(),
            "step": brief.step,
            "steps": self.steps(),
            "left_s": self._left_s(),
            "goodput": ratio(self.seconds),
            "seconds": {cause: round(spent, 3) for cause, spent in self.seconds.items()},
            "wall_s": round(sum(span.ended - span.started for span in self.timeline.spans), 3),
            "began": brief.began,
            "at": brief.at,
            "owner": brief.owner,
            "restarts": brief.restarts,
            "saved": None if found is None else found.saved,
            "notes": [] if found is None else [visible(note)[:_MESSAGE] for note in found.notes][-20:],
            "strip": [[_s(one.begin), _s(one.end), one.cause] for one in self.timeline.segments],
            "attempts": [_attempt(one) for one in self.timeline.attempts],
            "starts": [_start(start, self.timeline) for start in self.starts],
            "marks": self._marks(),
            "curves": {visible(name): self._points(curve) for name, curve in self.curves().items() if curve.points},
            "heat": ranks.of(brief.folder, self.timeline),
            "ranks": self._ranks(last.start if last else 1),
            "checkpoints": checkpoints.of(brief.folder, self.evals),
            "differs": jobs.changes(brief.folder, self.starts),
            "job": jobs.text(brief.folder),
            "classes": classes.of(brief.folder),
            "samples": self._samples(),
            "commands": self._commands(),
        }

    def steps(self) -> int | None:
        """The steps that the job wants: given, or as far as the rate of epochs says."""
        if self.brief.steps is not None:
            return self.brief.steps
        if self.brief.state == "done":
            return self.brief.step
        epochs, passes = jobs.epochs(self.brief.folder), self.metrics.curves.get("epoch")
        if epochs is None or passes is None:
            return None
        step, _, rate = passes.points[-1]
        return math.floor(epochs * step / rate + 1e-6) if rate > 0 else None

    def _left_s(self) -> float | None:
        """Seconds of stepping that are left, at the speed of the last tenth of the run."""
        steps, loss = self.steps(), next(iter(self.metrics.curves.values()), None)
        if self.brief.state != "running" or steps is None or loss is None or len(loss.points) < 2:
            return None
        tail = loss.points[-max(2, len(loss.points) // 10) :]
        (first, begun, _), (last, ended, _) = tail[0], tail[-1]
        return None if last <= first or ended <= begun else (ended - begun) / (last - first) * max(0.0, steps - last)

    def _points(self, curve: Curve) -> list[list[float | None]]:
        """Steps, seconds on the axis, values."""
        at = self.timeline.at
        steps, times, values = zip(*curve.points, strict=True)
        return [
            [int(step) for step in steps],
            [None if math.isnan(time) else _s(at(time)) for time in times],
            [float(f"{value:.6g}") for value in values],
        ]

    def _marks(self) -> list[list[Any]]:
        at = self.timeline.at
        evals = next(iter(self.evals.curves.values()), Curve())
        found = [[_s(at(time)), "eval", int(step)] for step, time, _ in evals.points if not math.isnan(time)]
        saves = self.metrics.curves.get("save_s", Curve()).points
        found += [[_s(at(time)), "save", int(step)] for step, time, spent in saves if spent > 0 and time == time]
        return found[-1000:]

    def _ranks(self, start: int) -> list[dict[str, Any]]:
        """The end of each rank's log, and where it stood when the run hung."""
        found = self.summary
        stacks = {} if found is None else dict(found.stacks)
        logs = RunFolder(self.brief.folder)
        verdict = None if found is None else found.verdict
        first = [verdict.rank] if verdict is not None and verdict.rank is not None else []
        shown = list(dict.fromkeys([*first, *sorted(stacks), *range(MOST_RANKS)]))[:MOST_RANKS]
        tails = dict(logs.tails(start, shown))
        return [
            {
                "rank": rank,
                "tail": [visible(line)[:500] for line in tails.get(rank, [])[-60:]],
                "stack": visible(stacks.get(rank, ""))[-_STACK:],
                "is_cause": rank in first,
            }
            for rank in shown
            if rank in tails or rank in stacks
        ]

    def _samples(self) -> list[dict[str, Any]]:
        """What the model went on with after its prompts, and what the program reported, by step."""
        rows = samples(self.brief.folder / layout.SAMPLES, MOST_SAMPLES) + reported(self.brief.folder, MOST_SAMPLES)
        found = dict[int, list[Any]]()
        for row in rows:
            if type(step := row.get("step")) is int and 0 <= step < 2**53:
                given = _plain(row.get("samples"))
                found.setdefault(step, []).extend(given if isinstance(given, list) else [given])
        return [{"step": step, "samples": found[step]} for step in sorted(found)]

    def _commands(self) -> list[list[str]]:
        where = jobs.quoted(self.brief.folder)
        commands = [["Say why it is where it is", f"launcher explain {where}"]]
        commands += [["Read a rank's log", f"launcher logs {where} --rank 0 --tail 100"]]
        if self.brief.state != "done":
            commands += [["Continue from the newest checkpoint", f"launcher run {where}/job.yaml --run-dir {where}"]]
        if self.metrics.curves:
            commands += [["Compare it with another run", f"launcher compare {where} OTHER"]]
        return commands


_ENDS = {"done": "is done", "stopped": "was stopped", "failed": "failed"}
_TODO: Mapping[int, str] = {
    contract.DONE: "",
    contract.PREEMPTED: "It is saved. The same command resumes it.",
}


def _todo(code: int) -> str:
    page = troubleshooting.of_code(code)
    return f"Exit code {code}: {contract.outcome(code).meaning}." + (f" What to do: {page}" if page else "")


def _plain(value: Any, depth: int = 0) -> Any:
    """A value of a sample, of texts and numbers alone; what nests deeper than a sample does is left out."""
    if isinstance(value, str):
        is_picture = value.startswith("data:image/png;base64,")
        return value[:MOST_PICTURE] if is_picture else visible(value[:MOST_TEXT])
    if isinstance(value, dict) and depth < 4:
        return {visible(str(key))[:_KEY]: _plain(each, depth + 1) for key, each in list(value.items())[:50]}
    if isinstance(value, list) and depth < 4:
        return [_plain(each, depth + 1) for each in value[:50]]
    is_number = type(value) is int and abs(value) < 2**53 or type(value) is float and math.isfinite(value)
    return value if is_number or type(value) is bool else None


def _s(seconds: float) -> float:
    return round(seconds, 3)


def _attempt(one: timeline.Attempt) -> dict[str, Any]:
    record = one.record
    where = {"start": one.start, "number": one.number, "from": _s(one.begin), "to": _s(one.end)}
    if record is None:
        return where | {"cause": "running", "code": None, "message": "running"}
    verdict = record.verdict
    return where | {
        "generation": record.generation,
        "cause": record.cause,
        "code": verdict.code,
        "message": visible(verdict.message)[:_MESSAGE],
        "rank": verdict.rank,
        "step": verdict.step,
        "saved": record.last_committed,
        "traceback": visible(verdict.traceback or "")[-_STACK:],
    }


def _start(start: Start, line: Timeline) -> dict[str, Any]:
    return {
        "number": start.start,
        "at": _s(line.at(start.started)),
        "started": start.started,
        "code": start.code,
        "first_step": start.first_step,
        "last_step": start.last_step,
    }
