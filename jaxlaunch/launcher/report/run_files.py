"""Read the files of a run folder: metrics, samples, checkpoints, classification, job and state.

Others may write these files. Values of a wrong type are skipped, no link is followed, and lines and
files are read only up to a limit.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import contract, regular_files, samples
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.report.curves import MAX_POINTS, Curve, Intervals
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.launcher.yaml import reader, writer
from jaxlaunch.records.run_numbers import RunNumbers
from jaxlaunch.records.summary import StartRecord, Summary, newest_effective_start
from jaxlaunch.runs import history, layout
from jaxlaunch.runs.journal import MAX_LINE_CHARS, STEP
from jaxlaunch.runs.layout import find_holder
from jaxlaunch.runs.run_folder import RunFolder

MAX_CURVES = 100
# The largest number of marks of saves, and of evaluations, below the timeline.
MAX_MARKS = 500
MAX_NAME_CHARS = 120
# Bytes of the newest pictures and texts on a page.
MAX_REPORTED_BYTES = 2_500_000
# Only the end of a longer file is read.
MAX_FILE_BYTES = 1 << 30
# Beyond this value, differences of two numbers overflow.
MAX_VALUE = 1e300
TIME = "time"
# The state of a run without a verdict whose folder no launcher holds.
KILLED = "killed"

_MAX_MANIFEST_BYTES = 64 << 20
_MAX_STEPS = 200
_MAX_CLASSIFICATION_BYTES = 4 << 20
# Characters of a value of the job.
_MAX_VALUE_CHARS = 300
# Values of these blocks may be tokens, and no page shows them.
_PRIVATE_BLOCKS = ("env",)
_TOTAL_STEPS = ("train", "steps")
# Errors of a file that is not JSON, or has another structure.
_FORMAT_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)

# A function for each key of a row that returns its valid value, or raises ValueError.
Checks = Mapping[str, Callable[[Any], Any]]


# --- numbers over the steps -----------------------------------------------------------------------


class CurveTable:
    """Curves of one table of numbers by name, reduced to what a screen can show."""

    def __init__(self, max_points: int = MAX_POINTS) -> None:
        self.curves: dict[str, Curve] = {}
        self._max_points = max_points
        self.intervals = Intervals()
        # The seconds of evaluations and saves, in the intervals that have one.
        self.pauses = _make_pauses()

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a row, which has a step and, if it is known, a time."""
        step, time = row.get(STEP), row.get(TIME, math.nan)
        if type(step) is not int or not 0 <= step < 2**53:
            return
        if type(time) not in (int, float) or not math.isfinite(time):
            time = math.nan
        time = float(time)
        for name, value in row.items():
            is_number = type(value) in (int, float) and abs(value) < MAX_VALUE
            has_room = len(self.curves) < MAX_CURVES and len(name) <= MAX_NAME_CHARS
            if is_number and name not in (STEP, TIME) and (has_room or name in self.curves):
                if (curve := self.curves.get(name)) is None:
                    curve = self.curves[name] = Curve(limit=self._max_points)
                curve.add_item((step, time, value))
                if value > 0 and name in self.pauses:
                    self.pauses[name].add_item((step, time, value))
        self._add_interval(row, step, time)

    def keep_only(self, name: str) -> None:
        """Drop all curves but one, and the seconds of the intervals."""
        self.curves = {key: curve for key, curve in self.curves.items() if key == name}
        self.intervals, self.pauses = Intervals(), _make_pauses()

    def drop_from(self, step: int) -> None:
        """Drop the rows of `step` and of later steps, which a resumed attempt repeats."""
        self.intervals.drop_from(step)
        for curve in (*self.curves.values(), *self.pauses.values()):
            curve.drop_from(step)
        self.curves = {name: curve for name, curve in self.curves.items() if curve.points}

    def _add_interval(self, row: Mapping[str, Any], step: int, time: float) -> None:
        values = [row.get(name) for name in ("wall_s", "data_s", "eval_s", "save_s")]
        wall_s, *spent = (value if type(value) is float else 0.0 for value in values)
        is_valid = all(0 <= seconds < 1e9 for seconds in (wall_s, *spent))
        if wall_s > 0 and not math.isnan(time) and is_valid:
            seconds = dict(zip(("data", "eval", "save"), spent, strict=True))
            self.intervals.add_item((step, time, wall_s, seconds))


class CurveFile(CurveTable):
    """Curves of one file of JSON lines."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        # Device and inode. A resumed run writes a new file.
        self._file_id: tuple[int, int] | None = None
        # The offset of the last complete line. A later row of its step replaces it.
        self._last_line_offset = 0

    def read_new_rows(self) -> bool:
        """Read new rows. Return whether the file was replaced and read from its start."""
        try:
            file = open(self._path, "rb", opener=regular_files.make_opener(self._path.parent))  # noqa: SIM115
        except OSError:
            return False
        with file:
            stat = os.fstat(file.fileno())
            file_id = stat.st_dev, stat.st_ino
            is_new = self._file_id != file_id or stat.st_size < self._last_line_offset
            if is_new:
                self._file_id = file_id
                self._last_line_offset = max(0, stat.st_size - MAX_FILE_BYTES)
                self.curves = {}
                self.intervals, self.pauses = Intervals(), _make_pauses()
            file.seek(self._last_line_offset)
            while line := file.readline(MAX_LINE_CHARS):
                if line.endswith(b"\n"):
                    self._last_line_offset = file.tell() - len(line)
                    self._add_line(line)
        return is_new

    def _add_line(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(row, dict):
            self.add_row(row)


def _make_pauses() -> dict[str, Curve]:
    return {name: Curve(limit=MAX_MARKS) for name in ("eval_s", "save_s")}


def read_reports(folder: Path, limit: int) -> list[dict[str, Any]]:
    """Return the newest reports of pictures and texts, oldest first."""
    rows, remaining_bytes = list[dict[str, Any]](), MAX_REPORTED_BYTES
    for step in samples.list_steps(folder / samples.FOLDER)[:limit]:
        try:
            path = folder / samples.FOLDER / f"{step}.json"
            text = regular_files.read_bounded(path, MAX_REPORTED_BYTES + 1, below=folder)
            row = json.loads(text)
        except (OSError, ValueError, RecursionError):
            continue
        remaining_bytes -= len(text)
        if remaining_bytes < 0:
            break
        if isinstance(row, dict):
            rows.append({**row, STEP: step})
    return rows[::-1]


def read_samples(path: Path, limit: int) -> list[dict[str, Any]]:
    """Return the newest objects in a file of JSON lines, oldest first."""
    try:
        text = regular_files.read_bounded(
            path, 4 * MAX_LINE_CHARS, from_end=True, below=path.parent
        )
    except OSError:
        return []
    rows = []
    for line in text.splitlines()[-4 * limit :]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows[-limit:]


# --- checkpoints ----------------------------------------------------------------------------------


def list_checkpoints(folder: Path, evals: CurveTable) -> list[dict[str, Any]]:
    """Return the steps in the run folder, the newest first. `verified` steps have a manifest."""
    checkpoints = folder / layout.CHECKPOINTS
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(checkpoints, flags)
    except OSError:
        return []
    try:
        numbers = [int(name) for name in os.listdir(descriptor) if name.isdecimal()]
        steps = sorted(numbers, reverse=True)[:_MAX_STEPS]
    finally:
        os.close(descriptor)
    metric, mode = best_metric(read_job(folder))
    curve = evals.curves.get((metric or "").removeprefix("eval/"), Curve())
    points = [point for point in curve.points if int(point[0]) in steps and math.isfinite(point[2])]
    best = (max if mode == "max" else min)(points, key=lambda point: point[2], default=None)
    rows = []
    for step in steps:
        size_bytes = _manifest_bytes(checkpoints / str(step) / contract.MANIFEST, folder)
        is_best = best is not None and step == best[0]
        row = {"step": step, "bytes": size_bytes, "verified": size_bytes is not None}
        rows.append({**row, "best": is_best, "where": f"{layout.CHECKPOINTS}/{step}"})
    return rows


def _manifest_bytes(manifest: Path, below: Path) -> int | None:
    """Return the bytes of a step's files, or None if it has no manifest."""
    try:
        text = regular_files.read_bounded(manifest, _MAX_MANIFEST_BYTES, below=below)
        files = json.loads(text)["manifest"]["files"]
        return sum(int(size_bytes) for size_bytes, _ in files.values())
    except (*_FORMAT_ERRORS, OverflowError):
        return None


# --- classes --------------------------------------------------------------------------------------


def read_classification(folder: Path) -> dict[str, Any] | None:
    """Return an evaluation by class: confusion, rates, calibration, and the worst examples.

    The trainer and `launcher eval` write the file. Returns None if it is missing or invalid.
    """
    path, limit = folder / contract.CLASSIFICATION, _MAX_CLASSIFICATION_BYTES
    try:
        text = regular_files.read_bounded(path, limit + 1, below=folder)
        return _check_classification(json.loads(text)) if len(text) <= limit else None
    except _FORMAT_ERRORS:
        return None


def _check_classification(record: Mapping[str, Any]) -> dict[str, Any]:
    classes = [_check_row(row, _RATES) for row in _check_list(record["per_class"], 1000)]
    confusion = None
    # Examples by label (rows) and by prediction (columns).
    if "confusion" in record:
        rows = [_check_list(row, 50) for row in _check_list(record["confusion"], 50)]
        confusion = [[_check_count(number) for number in row] for row in rows]
        if {len(confusion), *map(len, confusion)} != {len(classes)}:
            raise ValueError("a confusion matrix of other classes")
    calibration, confused = record["calibration"], _check_list(record.get("confused", []), 100)
    bins, worst = _check_list(calibration["bins"], 100), _check_list(record["worst"], 100)
    return {
        "step": _check_count(record["step"]),
        "ema": record["ema"] is True,
        "examples": _check_count(record["examples"]),
        "top1": _check_share(record["top1"]),
        "top5": _check_share(record.get("top5")),
        "macro_f1": _check_share(record["macro"]["f1"]),
        "classes": _check_count(record["classes"]),
        "per_class": classes,
        "confusion": confusion,
        "confused": [_check_row(row, _PAIR) for row in confused],
        "ece": _check_share(calibration["ece"]),
        "bins": [_check_row(row, _BIN if row["examples"] else _EMPTY_BIN) for row in bins],
        # A number alone would not identify an example to a person.
        "worst": [row for row in map(_check_example, worst) if row["where"] is not None],
    }


def _check_list(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"no list of at most {limit}")
    return value


def _check_text(value: Any, limit: int = 120) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return escape_controls(value[:limit])


def _check_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("no count")
    return value


def _check_share(value: Any) -> float | None:
    """Check a number from 0 to 1. Means of rounded numbers may be slightly above 1."""
    return None if value is None else min(1.0, _check_number(value, 1.001))


def _check_loss(value: Any) -> float | None:
    return None if value is None else _check_number(value, MAX_VALUE)


def _check_number(value: Any, limit: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= limit:
        raise ValueError("no such number")
    return float(f"{value:.4g}")


def _check_example(row: Mapping[str, Any]) -> dict[str, Any]:
    checked = _check_row(row, _WORST)
    # An example of a source without names has only a number.
    if row["where"] is None:
        _check_count(row["example"])
        return {**checked, "where": None}
    return {**checked, "where": _check_text(row["where"], 300)}


def _check_row(row: Mapping[str, Any], checks: Checks) -> dict[str, Any]:
    return {key: check(row[key]) for key, check in checks.items()}


_RATES: Checks = {
    "label": _check_text,
    "examples": _check_count,
    "precision": _check_share,
    "recall": _check_share,
    "f1": _check_share,
}
_PAIR: Checks = {"label": _check_text, "predicted": _check_text, "examples": _check_count}
_EMPTY_BIN: Checks = {"examples": _check_count}
_BIN: Checks = {"examples": _check_count, "confidence": _check_share, "accuracy": _check_share}
_WORST: Checks = {
    "label": _check_text,
    "predicted": _check_text,
    "confidence": _check_share,
    "loss": _check_loss,
}


# --- the job --------------------------------------------------------------------------------------


def read_job(folder: Path) -> dict[str, Any]:
    """Return the job of a run as plain values, empty if it cannot be read."""
    try:
        job = reader.read_document(folder / layout.JOB, regular_files.make_opener(folder)).data
    except (OSError, UserError):
        return {}
    return job if isinstance(job, dict) else {}


def find_value(job: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of a key of a job, or None if the job does not have it."""
    value: Any = job
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def best_metric(job: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the metric of the job's best step, or None, and its mode: `max` or `min`."""
    best = find_value(job, "train", "checkpoint", "best")
    if not isinstance(best, dict):
        return None, "min"
    return str(best.get("metric", "eval/loss")), str(best.get("mode", "min"))


def job_batch(job: Mapping[str, Any]) -> int | None:
    """Return the batch size of the job, or None if it has none."""
    batch = find_value(job, "train", "batch")
    return batch if type(batch) is int else None


def quote_folder(folder: Path) -> str:
    """Quote the folder of a run for a shell, relative if it is below the working folder."""
    is_below = folder.is_relative_to(Path.cwd())
    return shlex.quote(str(folder.relative_to(Path.cwd()) if is_below else folder))


def job_text(job: Mapping[str, Any]) -> str:
    """Return a job as YAML, without the values of its environment."""
    shown_job = dict(job)
    for block in _PRIVATE_BLOCKS:
        if isinstance(shown_job.get(block), dict):
            shown_job[block] = dict.fromkeys(shown_job[block], "…")
    return escape_controls(writer.render_document(shown_job)) if shown_job else ""


def compare_jobs(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between jobs, with the value of each job."""
    return differing_rows([dict(_flatten_job(job)) for job in jobs])


def differing_rows(tables: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between tables, with the value in each table or "–"."""
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "–") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flatten_job(job: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys as overrides write them, and their values. Private values are hidden."""
    is_private = prefix.startswith(tuple(f"{block}." for block in _PRIVATE_BLOCKS))
    for key, value in job.items():
        if isinstance(value, dict) and value:
            yield from _flatten_job(value, f"{prefix}{key}.")
        else:
            yield escape_controls(f"{prefix}{key}"), "…" if is_private else _value_text(value)


def _value_text(value: Any) -> str:
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return escape_controls(text)[:_MAX_VALUE_CHARS]


def list_changes(folder: Path, starts: Sequence[StartRecord]) -> list[dict[str, Any]]:
    """Return what each start changed in the job and in the versions of packages and code."""
    changes = list[tuple[int, str, str, str]]()
    files, earlier_versions = RunFolder(folder), dict[str, str]()
    for start in starts:
        for key, values in start.changed.items():
            then, now = (*map(_value_text, values), "", "")[:2]
            changes.append((start.start, escape_controls(key), then, now))
        versions = list_versions(read_start_summary(files, start, starts))
        for key in earlier_versions.keys() & versions.keys():
            if earlier_versions[key] != versions[key]:
                changes.append((start.start, key, earlier_versions[key], versions[key]))
        earlier_versions |= versions
    changes.sort(key=lambda change: change[0])
    keys = ("start", "key", "then", "now")
    return [dict(zip(keys, change, strict=True)) for change in changes]


def read_start_summary(
    files: RunFolder, start: StartRecord, starts: Sequence[StartRecord]
) -> Summary | None:
    """Return the summary of a start.

    That of the newest start that was not refused is in the run folder itself.
    """
    is_newest = start is newest_effective_start(starts)
    name = layout.SUMMARY if is_newest else layout.start_file(start.start, layout.SUMMARY)
    return files.read_summary(name=name)


def list_versions(summary: Summary | None) -> dict[str, str]:
    """Return the versions of packages, and the digest of the code, of a start."""
    versions = {} if summary is None or summary.of is None else summary.of.made_of
    keys = {name: f"version of {escape_controls(name)[:_MAX_VALUE_CHARS]}" for name in versions}
    keys["code"] = "digest of code"
    return {keys[name]: _value_text(value) for name, value in versions.items()}


# --- the row of a table of runs -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunBrief(RunNumbers):
    """State and numbers of a run, for a row of a table."""

    name: str
    # A value of Summary.status, or KILLED.
    state: str
    # The message of the verdict, or "" while the run continues.
    message: str = ""
    code: int | None = None
    restart_count: int = 0
    # Unix time of the first start.
    began_at: float | None = None
    # Unix time of the newest progress.
    updated_at: float | None = None
    owner: str = ""


def brief_stamp(folder: Path) -> tuple[int, ...]:
    """Return what changes when the brief of a run that has ended changes."""
    return *_file_stamp(folder / layout.SUMMARY), *_file_stamp(folder / layout.LOCK)


def _file_stamp(path: Path) -> tuple[int, int]:
    try:
        stat = os.lstat(path)
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_ino


def read_brief(folder: Path) -> RunBrief:
    """Read the row of a run, from at most two of its files."""
    summary, owner = RunFolder(folder).read_summary_row(), layout.owner_name(folder) or ""
    is_running = _is_running(folder)
    if summary is None:
        return RunBrief(folder.name, "running" if is_running else "unknown", owner=owner)
    progress, verdict = summary.of, summary.verdict
    began_at = None if progress is None else progress.started
    if summary.starts:
        began_at = summary.starts[0].started
    restart_count = 0
    if progress is not None:
        restart_count = history.restart_count(
            progress.generation, summary.restarts, progress.attempt
        )
    return RunBrief(
        name=folder.name,
        state=KILLED if verdict is None and not is_running else summary.status,
        message="" if verdict is None else verdict.message,
        code=None if verdict is None else verdict.code,
        restart_count=restart_count,
        began_at=began_at,
        updated_at=None if progress is None else progress.at,
        owner=owner,
        **(summary.run_numbers() | {"steps": summary.steps or _total_steps(folder)}),
    )


def _total_steps(folder: Path) -> int | None:
    try:
        text = regular_files.read_bounded(folder / layout.JOB, reader.MAX_BYTES, below=folder)
    except OSError:
        return None
    numbers = reader.read_whole_numbers(text.decode(errors="replace"), [_TOTAL_STEPS])
    return numbers.get(_TOTAL_STEPS)


def _is_running(folder: Path) -> bool:
    try:
        return find_holder(folder) is not None
    except OSError:
        return False
