"""Runs next to each other: what differs in their jobs, and their curves over steps, hours or examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.report import jobs
from jaxlaunch.launcher.report.run import Seen
from jaxlaunch.launcher.wording import visible

AXES = ("step", "hour", "examples")
COLUMNS = ("loss", "eval/loss", "accuracy", "eval/accuracy", "examples_per_s", "tokens_per_s", "mfu")
_MOST_DIFFERENCES = 300
Line = tuple[str, Sequence[float], Sequence[float]]  # a run's name, and its curve


def data(runs: Sequence[Seen], metrics: Sequence[str], at: str) -> dict[str, Any]:
    """What the page of a comparison is made of. Raises UserError where no run has a metric that is asked for."""
    for metric in metrics:
        known(runs, metric)
    found = [seen.to_json() for seen in runs]
    names = unique([visible(seen.brief.name) for seen in runs])
    kept = ("sentence", "step", "goodput", "wall_s", "curves")
    return {
        "runs": [
            {**{key: one[key] for key in kept}, "name": name, "batch": jobs.batch(seen.brief.folder)}
            for one, name, seen in zip(found, names, runs, strict=True)
        ],
        "differs": [*differences([seen.brief.folder for seen in runs]), *made_otherwise(runs)],
        "columns": columns(runs, metrics),
        "metric": list(metrics) or None,
        "at": at,
    }


def differences(folders: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """The keys of their jobs that not all runs have alike, with each run's value."""
    described = [jobs.read(folder / jobs.FILE) for folder in folders]
    return [row for row in jobs.differences(described) if row[0] != "name"][:_MOST_DIFFERENCES]


def made_otherwise(runs: Sequence[Seen]) -> list[tuple[str, list[str]]]:
    """The versions, and the digest of the code, that not all runs have alike."""
    return jobs.differing([jobs.made_of(seen.summary) for seen in runs])


def columns(runs: Sequence[Seen], metrics: Sequence[str]) -> list[str]:
    """The numbers that a table of the runs shows."""
    names = {name for seen in runs for name, curve in seen.curves().items() if curve.points}
    return list(metrics) or [name for name in COLUMNS if name in names]


def known(runs: Sequence[Seen], metric: str) -> None:
    """Raises UserError where no run has the metric."""
    names = sorted({name for seen in runs for name in seen.curves()})
    if metric not in names:
        raise UserError(
            f"No run has the metric {visible(metric)}.", f"they have {', '.join(map(visible, names)) or 'none'}."
        )


def lines(runs: Sequence[Seen], metric: str, at: str) -> list[Line]:
    """The curve of each run that has the metric. Raises UserError where a run cannot say its examples."""
    known(runs, metric)
    found = list[Line]()
    for name, seen in zip(unique([visible(seen.brief.name) for seen in runs]), runs, strict=True):
        curve = seen.curves().get(metric)
        if curve is None or not curve.points:
            continue
        scale = _scale(seen, at)
        pairs = [(seen.timeline.at(time) / 3600 if at == "hour" else step * scale, y) for step, time, y in curve.points]
        pairs = sorted(pair for pair in pairs if math.isfinite(pair[0]))
        found.append((name, [x for x, _ in pairs], [y for _, y in pairs]))
    return [line for line in found if line[1]]


def _scale(seen: Seen, at: str) -> float:
    if at != "examples":
        return 1.0
    batch = jobs.batch(seen.brief.folder)
    if batch is None:
        name = visible(seen.brief.name)
        raise UserError(f"Run {name} does not say how many examples a step has.", "compare by --at step or --at hour.")
    return float(batch)


def last(seen: Seen, name: str) -> float | None:
    """The newest value of a curve."""
    curve = seen.curves().get(name)
    return curve.points[-1][2] if curve is not None and curve.points else None


def unique(names: Sequence[str]) -> list[str]:
    """The names, each with a number where two are equal."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def summary(found: Mapping[str, Any]) -> list[list[str]]:
    """The rows of the table of runs, its heads first."""
    heads = ["RUN", "STATE", "STEP", *(name.upper() for name in found["columns"]), "GOODPUT", "TIME"]
    return [heads, *(_row(run, found["columns"]) for run in found["runs"])]


def _row(run: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    curves, goodput = run["curves"], run["goodput"]
    values = [f"{curves[name][2][-1]:.4g}" if name in curves else "-" for name in names]
    share = "-" if goodput is None else f"{goodput:.1%}"
    step = "-" if run["step"] is None else str(run["step"])
    return [run["name"], run["sentence"]["state"], step, *values, share, f"{run['wall_s']:.0f}s"]
