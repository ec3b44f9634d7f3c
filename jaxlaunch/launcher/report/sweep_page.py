"""Data of a sweep's page: its runs by their metric, their curves, and the metric by key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.launcher.report import headline, run_files
from jaxlaunch.launcher.report.curves import Curve
from jaxlaunch.launcher.report.run_files import CurveFile, CurveTable, RunBrief
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.runs import layout

_MAX_BYTES, _MAX_RUNS = 64 << 20, 2000
MAX_KEY_CHARS, MAX_VALUE_CHARS = 120, 200
# Points of all curves on the page, and the points that each curve keeps at least.
_MAX_PAGE_POINTS, _MIN_CURVE_POINTS = 20_000, 50
# The largest number of runs whose metric is kept in memory.
_MAX_FILES = 64
# Points of the small curve in a row.
SPARK_POINTS = 40
WAITING = "waiting"


@dataclasses.dataclass(frozen=True)
class SweepRecord:
    """A sweep as its file describes it, with the overrides of each run by key."""

    folder: Path
    metric: str | None
    is_higher_better: bool
    changes: Mapping[str, Mapping[str, str]]


def read_sweep(folder: Path) -> SweepRecord:
    """Return the sweep in a folder. Invalid lines of its file are skipped."""
    metric, is_higher_better = None, False
    changes = dict[str, Mapping[str, str]]()
    try:
        text = regular_files.read_bounded(folder / layout.SWEEP, _MAX_BYTES, below=folder)
    except OSError:
        text = b""
    for line in text.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict):
            continue
        if isinstance(row.get("metric"), str):
            metric, is_higher_better = row["metric"], row.get("mode") == "max"
        run, overrides = row.get("run"), row.get("set")
        # The name must be that of a subfolder.
        if not isinstance(run, str) or run in ("", ".", "..") or "/" in run:
            continue
        if isinstance(overrides, list) and len(changes) < _MAX_RUNS:
            pairs = (str(override).partition("=") for override in overrides)
            changes[run] = {
                escape_controls(key)[:MAX_KEY_CHARS]: escape_controls(value)[:MAX_VALUE_CHARS]
                for key, _, value in pairs
            }
    return SweepRecord(folder, metric, is_higher_better, changes)


@dataclasses.dataclass(frozen=True)
class RunMetric:
    """The metric of a run that a table shows, with its curve."""

    name: str
    curve: Curve

    @property
    def value(self) -> float:
        """The newest value."""
        return self.curve.points[-1][2]

    def to_json(self) -> dict[str, Any]:
        """Return the name, the value, and a small curve."""
        spark = [float(f"{value:.4g}") for value in self.curve.values_by_range(SPARK_POINTS)]
        name = escape_controls(self.name)
        return {"name": name, "value": float(f"{self.value:.6g}"), "spark": spark}


def find_metric(
    metrics: CurveTable, evals: CurveTable, job: Mapping[str, Any], metric: str | None
) -> RunMetric | None:
    """Return `metric` of a run, or its result if it has no such metric, or None."""
    curves = metrics.curves | {f"eval/{name}": curve for name, curve in evals.curves.items()}
    curves = {name: curve for name, curve in curves.items() if curve.points}
    if metric is None or metric not in curves:
        names = headline.result_names(curves, run_files.best_metric(job)[0])
        metric = names[0] if names else None
    return None if metric is None else RunMetric(metric, curves[metric])


def keep_metric(metrics: CurveTable, evals: CurveTable, chosen: RunMetric | None) -> None:
    """Drop all curves but that of a metric, if there is one."""
    if chosen is not None:
        is_eval = chosen.name.startswith("eval/")
        metrics.keep_only("" if is_eval else chosen.name)
        evals.keep_only(chosen.name.removeprefix("eval/") if is_eval else "")


def describe_tags(folder: Path) -> str:
    """Return the labels of a run's job, such as `baseline, team=vision`."""
    labels = run_files.find_value(run_files.read_job(folder), "labels")
    return format_labels(labels) if isinstance(labels, dict) else ""


def format_labels(labels: Mapping[str, Any]) -> str:
    """Return labels as text, such as `baseline, team=vision`."""
    texts = (f"{key}={value}" if value else str(key) for key, value in labels.items())
    return escape_controls(", ".join(texts))[:MAX_VALUE_CHARS]


def duration_s(brief: RunBrief) -> float | None:
    """Return the seconds from the first start of a run to its newest state."""
    if brief.began_at is None or brief.updated_at is None:
        return None
    return round(max(0.0, brief.updated_at - brief.began_at), 1)


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """A run of a sweep, as its page shows it."""

    name: str
    changes: Mapping[str, str]
    # The address of the page of the run.
    page: str | None = None
    state: str = WAITING
    why: str = ""
    step: int | None = None
    steps: int | None = None
    duration_s: float | None = None
    metric: RunMetric | None = None

    def to_json(self, metric: str, max_points: int) -> dict[str, Any]:
        """Return the row, with the curve of `metric`: another one could not be compared."""
        row: dict[str, Any] = dataclasses.asdict(dataclasses.replace(self, metric=None))
        del row["metric"]
        row |= {"name": escape_controls(self.name), "why": escape_controls(self.why)[:300]}
        row |= {"value": None, "curve": None}
        if self.metric is None or self.metric.name != metric:
            return row
        points = self.metric.curve.reduce_points(max_points)
        steps = [int(point[0]) for point in points]
        values = [float(f"{point[2]:.5g}") for point in points]
        return row | {"value": float(f"{self.metric.value:.6g}"), "curve": [steps, values]}


def make_page(
    name: str, metric: str, is_higher_better: bool, runs: Sequence[SweepRow]
) -> dict[str, Any]:
    """Return the data of a sweep's page, the best run first."""
    limit = max(_MIN_CURVE_POINTS, _MAX_PAGE_POINTS // max(1, len(runs)))
    rows = [run.to_json(metric, limit) for run in runs]
    sign = -1 if is_higher_better else 1
    rows.sort(key=lambda row: (row["value"] is None, sign * (row["value"] or 0.0)))
    return {
        "name": escape_controls(name),
        "metric": escape_controls(metric),
        "mode": "max" if is_higher_better else "min",
        "keys": list(dict.fromkeys(key for run in runs for key in run.changes)),
        "runs": rows,
    }


def read_page(folder: Path) -> dict[str, Any]:
    """Return the data of the page of the sweep in a folder, the best run first."""
    return SweepReader(folder).read_page({})


class MetricCatalog:
    """Reads one metric of many runs, without keeping their other curves in memory."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[CurveFile, CurveFile]] = {}

    def read_metric(self, path: Path, metric: str | None, *, is_running: bool) -> RunMetric | None:
        """Return the metric of a run. A second call for a run that trains reads only new rows."""
        if path not in self._files:
            self._files[path] = CurveFile(path / layout.METRICS), CurveFile(path / layout.EVALS)
        metrics, evals = self._files.pop(path)
        metrics.read_new_rows()
        evals.read_new_rows()
        chosen = find_metric(metrics, evals, run_files.read_job(path), metric)
        if is_running and len(self._files) < _MAX_FILES:
            self._files[path] = metrics, evals
            keep_metric(metrics, evals, chosen)
        return chosen


class SweepReader:
    """Reader of a sweep. Repeated reads parse only the new rows of the runs that train."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._metrics = folder, MetricCatalog()
        # The rows of runs that have ended, each with the stamp of its files.
        self._rows: dict[str, tuple[tuple[int, ...], SweepRow]] = {}

    def read_page(self, pages: Mapping[str, str]) -> dict[str, Any]:
        """Return the data of the page. `pages` has the addresses of the pages of the runs."""
        sweep = read_sweep(self._folder)
        limit = max(_MIN_CURVE_POINTS, _MAX_PAGE_POINTS // max(1, len(sweep.changes)))
        rows = [
            dataclasses.replace(self._read_row(sweep, name, limit), page=pages.get(name))
            for name in sweep.changes
        ]
        metric = sweep.metric or next((row.metric.name for row in rows if row.metric), "loss")
        return make_page(self._folder.name, metric, sweep.is_higher_better, rows)

    def _read_row(self, sweep: SweepRecord, name: str, max_points: int) -> SweepRow:
        path = sweep.folder / name
        if not layout.is_run(path) or path.is_symlink():
            return SweepRow(name, sweep.changes[name])
        stamp = run_files.brief_stamp(path)
        if name in self._rows and self._rows[name][0] == stamp:
            return self._rows[name][1]
        brief = run_files.read_brief(path)
        is_running = brief.state == "running"
        metric = self._metrics.read_metric(path, sweep.metric, is_running=is_running)
        row = SweepRow(
            name,
            sweep.changes[name],
            state=brief.state,
            why=brief.message,
            step=brief.step,
            steps=brief.steps,
            duration_s=duration_s(brief),
            metric=metric,
        )
        if brief.state not in ("running", "unknown"):
            if metric is not None:
                curve = Curve(metric.curve.points, max_points)
                row = dataclasses.replace(row, metric=RunMetric(metric.name, curve))
            self._rows[name] = stamp, row
        return row
