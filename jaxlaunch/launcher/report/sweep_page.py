"""Data of a sweep's page: its runs by their metric, their curves, and the metric by key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.launcher.report import headline, run_files
from jaxlaunch.launcher.report.curves import Curve
from jaxlaunch.launcher.report.run_files import CurveFile, RunBrief
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.runs import layout

_MAX_BYTES, _MAX_RUNS = 64 << 20, 2000
_MAX_KEY_CHARS, _MAX_VALUE_CHARS = 120, 200
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

    def list_keys(self) -> list[str]:
        """Return the swept keys."""
        return list(dict.fromkeys(key for changes in self.changes.values() for key in changes))


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
                escape_controls(key)[:_MAX_KEY_CHARS]: escape_controls(value)[:_MAX_VALUE_CHARS]
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
    metrics: CurveFile, evals: CurveFile, folder: Path, metric: str | None
) -> RunMetric | None:
    """Return `metric` of a run, or its result if it has no such metric, or None."""
    curves = metrics.curves | {f"eval/{name}": curve for name, curve in evals.curves.items()}
    curves = {name: curve for name, curve in curves.items() if curve.points}
    if metric is None or metric not in curves:
        names = headline.result_names(curves, run_files.best_metric(folder)[0])
        metric = names[0] if names else None
    return None if metric is None else RunMetric(metric, curves[metric])


def describe_tags(folder: Path) -> str:
    """Return the labels of a run's job, such as `baseline, team=vision`."""
    labels = run_files.job_value(folder, "labels")
    if not isinstance(labels, dict):
        return ""
    texts = (f"{key}={value}" if value else str(key) for key, value in labels.items())
    return escape_controls(", ".join(texts))[:_MAX_VALUE_CHARS]


def duration_s(brief: RunBrief) -> float | None:
    """Return the seconds from the first start of a run to its newest state."""
    if brief.began_at is None or brief.updated_at is None:
        return None
    return round(max(0.0, brief.updated_at - brief.began_at), 1)


def read_page(folder: Path, pages: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the data of the page, the best run first. `pages` has the addresses of their pages."""
    sweep = read_sweep(folder)
    limit = max(_MIN_CURVE_POINTS, _MAX_PAGE_POINTS // max(1, len(sweep.changes)))
    rows = [_read_row(sweep, name, limit, (pages or {}).get(name)) for name in sweep.changes]
    sign = -1 if sweep.is_higher_better else 1
    rows.sort(key=lambda row: (row["value"] is None, sign * (row["value"] or 0.0)))
    return {
        "name": escape_controls(folder.name),
        "metric": escape_controls(sweep.metric or "loss"),
        "mode": "max" if sweep.is_higher_better else "min",
        "keys": sweep.list_keys(),
        "runs": rows,
    }


def _read_row(sweep: SweepRecord, name: str, limit: int, page: str | None) -> dict[str, Any]:
    """Return the row of a run, whose curve has at most `limit` points."""
    path = sweep.folder / name
    row: dict[str, Any] = {"name": escape_controls(name), "changes": sweep.changes[name]}
    row |= {"state": WAITING, "why": "", "step": None, "steps": None, "duration_s": None}
    row |= {"value": None, "curve": None, "page": None}
    if not layout.is_run(path) or path.is_symlink():
        return row
    brief = run_files.read_brief(path)
    row |= {"page": page, "state": brief.state, "why": escape_controls(brief.message)[:300]}
    row |= {"step": brief.step, "steps": brief.steps, "duration_s": duration_s(brief)}
    metrics, evals = CurveFile(path / layout.METRICS), CurveFile(path / layout.EVALS)
    metrics.read_new_rows()
    evals.read_new_rows()
    metric = find_metric(metrics, evals, path, sweep.metric)
    # Another metric could not be compared.
    if metric is not None and metric.name == (sweep.metric or metric.name):
        points = metric.curve.reduce_points(limit)
        row["value"] = float(f"{metric.value:.6g}")
        row["curve"] = [
            [int(point[0]) for point in points],
            [float(f"{point[2]:.5g}") for point in points],
        ]
    return row
