"""Comparison of runs: differences of their jobs, and their curves over steps, hours or examples."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.report import curves, headline, run_files
from jaxlaunch.launcher.report.plots import Line
from jaxlaunch.launcher.report.run import Report
from jaxlaunch.launcher.wording import escape_controls

COLUMNS = (
    *("loss", "eval/loss", "accuracy", "eval/accuracy"),
    *("examples_per_s", "tokens_per_s", "mfu"),
)
_MAX_DIFFERENCES = 300
# The largest number of runs that a dashboard compares.
MAX_COMPARED = 8
# Names of JobSets and of sweeps, which are values of labels. A name in the path of a request is
# part of a path of the API server, too.
OBJECT_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def compare_runs(runs: Sequence[Report], metrics: Sequence[str], axis: str) -> dict[str, Any]:
    """Return the data of the page. Raises UserError if no run has one of `metrics`."""
    for metric in metrics:
        _require_metric(runs, metric)
    keys = ("sentence", "step", "goodput", "wall_s", "curves", "drawn", "name", "batch", "unread")
    jobs = [run.job for run in runs]
    items = [item for run in runs for item in run.named_curves().items()]
    metric_names = {name for name, curve in items if curve.points}
    differences = [row for row in run_files.compare_jobs(jobs) if row[0] != "name"]
    versions = run_files.differing_rows([run.list_versions() for run in runs])
    rows = []
    max_points = curves.MAX_PAGE_POINTS // len(runs)
    for name, job, run in zip(_unique_names(runs), jobs, runs, strict=True):
        batch = run_files.job_batch(job)
        data = run.to_json(max_points) | {"name": name, "batch": batch}
        rows.append({key: data[key] for key in keys})
    return {
        "runs": rows,
        "differs": [*differences[:_MAX_DIFFERENCES], *versions],
        "columns": list(metrics) or [name for name in COLUMNS if name in metric_names],
        "metric": list(metrics) or None,
        "at": axis,
    }


def parse_job_id(run_id: str) -> tuple[str, str] | None:
    """Return namespace and name of a job from its id in a table, or None for another id."""
    match run_id.split("/"):
        case ["job", namespace, name] if OBJECT_NAME.fullmatch(name):
            return namespace, name
    return None


def compare_reports(
    read_report: Callable[[str], Report | None], run_ids: Sequence[str]
) -> dict[str, Any] | None:
    """Return the data of the comparison of runs by their ids, or None if fewer than two exist."""
    ids = list(dict.fromkeys(run_ids))[:MAX_COMPARED]
    reports = {run_id: report for run_id in ids if (report := read_report(run_id)) is not None}
    if len(reports) < 2:
        return None
    data = compare_runs(list(reports.values()), (), "step")
    for row, run_id in zip(data["runs"], reports, strict=True):
        row["page"] = run_id if parse_job_id(run_id) else f"run/{run_id}"
    return data


def _require_metric(runs: Sequence[Report], metric: str) -> None:
    names = sorted({name for run in runs for name in run.named_curves()})
    if metric not in names:
        hint = f"they have {', '.join(map(escape_controls, names)) or 'none'}."
        raise UserError(f"No run has the metric {escape_controls(metric)}.", hint)


def _unique_names(runs: Sequence[Report]) -> list[str]:
    """Return the names of the runs. A repeated name gets a number."""
    counts, names = Counter[str](), []
    for run in runs:
        name = escape_controls(run.brief.name)
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


def curve_lines(runs: Sequence[Report], metric: str, axis: str) -> list[Line]:
    """Return the curve of each run with the metric, over an axis: step, hour or examples.

    Raises UserError if the number of examples of a run is unknown.
    """
    _require_metric(runs, metric)
    lines = list[Line]()
    for name, run in zip(_unique_names(runs), runs, strict=True):
        curve, scale = run.named_curves().get(metric), 1
        if curve is None or not curve.points:
            continue
        if axis == "examples":
            if (batch_size := run_files.job_batch(run.job)) is None:
                name = escape_controls(run.brief.name)
                message = f"Run {name} does not say how many examples a step has."
                raise UserError(message, "compare by --at step or --at hour.")
            scale = batch_size
        points = []
        for step, time, value in curve.points:
            hour = run.timeline.axis_position(time) / 3600
            points.append((hour if axis == "hour" else float(step * scale), value))
        if points := sorted(point for point in points if math.isfinite(point[0])):
            lines.append((name, [x for x, _ in points], [y for _, y in points]))
    return lines


def find_ranking(runs: Sequence[Report], metrics: Sequence[str]) -> tuple[str, bool] | None:
    """Return the metric by which runs are sorted, and whether higher values are better, or None.

    It is the first of `metrics`, or else that of the jobs' best checkpoints, or a loss.
    """
    best = dict(run_files.best_metric(run.job) for run in runs)
    names = {name for run in runs for name in run.named_curves()}
    choices = [*metrics[:1], *([] if metrics else best), "eval/loss", "loss"]
    metric = next((name for name in choices if name in names), None)
    if metric is None:
        return None
    if metric in best:
        return metric, best[metric] == "max"
    is_higher_better = headline.is_higher_better(metric)
    return None if is_higher_better is None else (metric, is_higher_better)


def sort_runs(
    rows: Sequence[Mapping[str, Any]], ranking: tuple[str, bool] | None
) -> list[Mapping[str, Any]]:
    """Return the rows of runs with the best one first: those that are done, then the others."""
    if ranking is None:
        return list(rows)
    metric, is_higher_better = ranking

    def sort_key(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        value = row["curves"][metric][2][-1] if metric in row["curves"] else math.nan
        is_known = value is not None and math.isfinite(value)
        is_done = row["sentence"]["state"] == "done"
        return not is_done, not is_known, (-value if is_higher_better else value) if is_known else 0

    return sorted(rows, key=sort_key)


def summary_table(
    comparison: Mapping[str, Any], ranking: tuple[str, bool] | None
) -> list[list[str]]:
    """Return the rows of the table of runs, the header first and then the best run."""
    columns = comparison["columns"]
    table = [["RUN", "STATE", "STEP", *(name.upper() for name in columns), "GOODPUT", "TIME"]]
    for run in sort_runs(comparison["runs"], ranking):
        points = run["curves"]
        values = [f"{points[name][2][-1]:.4g}" if name in points else "-" for name in columns]
        goodput = "-" if run["goodput"] is None else f"{run['goodput']:.1%}"
        step = "-" if run["step"] is None else str(run["step"])
        state, time = run["sentence"]["state"], f"{run['wall_s']:.0f}s"
        table.append([run["name"], state, step, *values, goodput, time])
    return table
