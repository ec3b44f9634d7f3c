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


def read_page(folder: Path, pages: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the data of the page, the best run first. `pages` has the addresses of their pages."""
    sweep = read_sweep(folder)
    rows = [_read_row(sweep, name, (pages or {}).get(name)) for name in sweep.changes]
    metric = sweep.metric or next((row.metric.name for row in rows if row.metric), "loss")
    return make_page(folder.name, metric, sweep.is_higher_better, rows)


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


def _read_row(sweep: SweepRecord, name: str, page: str | None) -> SweepRow:
    path = sweep.folder / name
    if not layout.is_run(path) or path.is_symlink():
        return SweepRow(name, sweep.changes[name])
    brief = run_files.read_brief(path)
    metrics, evals = CurveFile(path / layout.METRICS), CurveFile(path / layout.EVALS)
    metrics.read_new_rows()
    evals.read_new_rows()
    return SweepRow(
        name,
        sweep.changes[name],
        page=page,
        state=brief.state,
        why=brief.message,
        step=brief.step,
        steps=brief.steps,
        duration_s=duration_s(brief),
        metric=find_metric(metrics, evals, run_files.read_job(path), sweep.metric),
    )
