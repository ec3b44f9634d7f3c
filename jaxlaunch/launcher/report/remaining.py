"""Estimate of the time that a run still needs, for its steps, evaluations and saves.

The step time is a median, which leaves out compilation, restarts and pauses. Before the first
evaluation or save, its length is unknown and counts as 0 s.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.contract import PAUSE_STEPS
from jaxlaunch.launcher.report.curves import Point
from jaxlaunch.launcher.report.run_files import CurveTable

# The smallest number of differences between reports from which a step time is computed.
MIN_DIFFERENCES = 3
# The number of newest points that are used of a program that reports no `step_s`.
_RECENT_POINTS = 100
# Keys of the pauses in metrics.jsonl, and the blocks of `train:` with their intervals.
_BLOCKS: Mapping[str, str] = {"eval_s": "eval", "save_s": "checkpoint"}


def estimate_remaining_s(
    metrics: CurveTable,
    job: Mapping[str, Any],
    step: int,
    total: int,
    readings: Sequence[tuple[float, int]] = (),
) -> float | None:
    """Return the seconds from `step` to the end of the run, or None after fewer than three steps.

    Args:
        metrics: The rows of metrics.jsonl.
        job: The job of the run, as plain values.
        step: The newest complete step.
        total: The number of steps of the whole run.
        readings: Times in seconds at which a new step was seen, and the steps. They are used before
            metrics.jsonl has enough rows.
    """
    step_s = _median_step_s(metrics, readings)
    if step_s is None:
        return None
    pauses_s = sum(
        _pause_s(metrics, key, every) * count_pauses(every, step, total)
        for key, every in _pause_intervals(job).items()
    )
    return step_s * max(0, total - step) + pauses_s


def _median_step_s(metrics: CurveTable, readings: Sequence[tuple[float, int]]) -> float | None:
    """Return the seconds of a step without pauses, as the trainer reports them or as observed."""
    if (curve := metrics.curves.get("step_s")) is not None:
        # The median of the recent steps, without the warm-up.
        return curve.points[-1][2]
    points = next((curve.points for curve in metrics.curves.values()), list[Point]())
    row_times = [(time, int(step)) for step, time, _ in points[-_RECENT_POINTS:]]
    for times in (row_times, readings):
        differences = [
            (later - earlier) / (last - first)
            for (earlier, first), (later, last) in itertools.pairwise(times)
            if last > first and later > earlier
        ]
        if len(differences) >= MIN_DIFFERENCES:
            return statistics.median(differences)
    return None


def _pause_intervals(job: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the steps between pauses of a `train:` job. None means only one, at the end."""
    train, intervals = job.get("train"), dict[str, int | None]()
    if not isinstance(train, Mapping):
        return intervals
    for key, name in _BLOCKS.items():
        block = train.get(name)
        every = block.get("every", PAUSE_STEPS) if isinstance(block, Mapping) else PAUSE_STEPS
        intervals[key] = every if type(every) is int and every > 0 else None
    return intervals


def count_pauses(every: int | None, step: int, total: int) -> int:
    """Return the number of pauses at or after `step`, including one at the end.

    The pause at `step` itself counts, because the run is at that step during the pause.
    """
    if every is None:
        return 1
    return total // every - (max(1, step) - 1) // every + (total % every != 0)


def _pause_s(metrics: CurveTable, key: str, every: int | None) -> float:
    """Return the median length of the regular pauses so far."""
    points, rows = metrics.pauses[key].points, metrics.curves.get(key)
    if not points or rows is None:
        return 0.0
    first_step, last_step = int(rows.points[0][0]), int(rows.points[-1][0])
    # The number of regular pauses. The others, which are shorter, are saves of the best step and
    # waits for the storage.
    count = 0 if every is None else (last_step - 1) // every - (first_step - 1) // every
    longest = sorted((seconds for _, _, seconds in points), reverse=True)
    # Of two pauses, the shorter one: the first evaluation compiles its program.
    return statistics.median_low(longest[: max(1, count)])
