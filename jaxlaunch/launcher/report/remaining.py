"""The time that a run still needs: its median step time, the evaluations and the saves ahead.

A median leaves out compilation, restarts and pauses. An evaluation or a save that has not happened
yet has no known length and counts as 0 s.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.launcher.report.curves import Point
from jaxlaunch.launcher.report.run_files import CurveFile

# Differences between reports, of which a median is the time of a step.
MIN_DIFFERENCES = 3
# Newest points of a program that reports no `step_s`.
_RECENT_POINTS = 100
# Keys of the pauses in metrics.jsonl, and the block of `train:` that says how often they are.
_BLOCKS: Mapping[str, str] = {"eval_s": "eval", "save_s": "checkpoint"}


def estimate_remaining_s(
    metrics: CurveFile,
    job: Mapping[str, Any],
    step: int,
    total: int,
    readings: Sequence[tuple[float, int]] = (),
) -> float | None:
    """Return the seconds from `step` to the end of the run, or None after fewer than three steps.

    Args:
        metrics: The rows of metrics.jsonl.
        job: The job of the run, as plain values.
        step: Steps that are complete.
        total: Steps of the whole run.
        readings: Times in seconds and steps as they were seen, for the time before the first row.
    """
    step_s = _median_step_s(metrics, readings)
    if step_s is None:
        return None
    pauses_s = sum(
        _pause_s(metrics, key, every) * count_pauses(every, step, total)
        for key, every in _pause_intervals(job).items()
    )
    return step_s * max(0, total - step) + pauses_s


def _median_step_s(metrics: CurveFile, readings: Sequence[tuple[float, int]]) -> float | None:
    """Return the seconds of a step without pauses: as the trainer measures them, else as seen."""
    if (curve := metrics.curves.get("step_s")) is not None:
        # The median of the recent steps, without the warm-up.
        return curve.points[-1][2]
    points = next((curve.points for curve in metrics.curves.values()), list[Point]())
    seen = [(time, int(step)) for step, time, _ in points[-_RECENT_POINTS:]]
    for times in (seen, readings):
        differences = [
            (later - earlier) / (last - first)
            for (earlier, first), (later, last) in itertools.pairwise(times)
            if last > first and later > earlier
        ]
        if len(differences) >= MIN_DIFFERENCES:
            return statistics.median(differences)
    return None


def _pause_intervals(job: Mapping[str, Any]) -> dict[str, int | None]:
    """Return how many steps apart the pauses of a `train:` job are; None is only at the end."""
    train, intervals = job.get("train"), dict[str, int | None]()
    if not isinstance(train, Mapping):
        return intervals
    for key, name in _BLOCKS.items():
        block = train.get(name)
        default = _default_every()[name]
        every = block.get("every", default) if isinstance(block, Mapping) else default
        intervals[key] = every if type(every) is int and every > 0 else None
    return intervals


@functools.cache
def _default_every() -> Mapping[str, int | None]:
    # The schema takes a while to import, and most commands need no time left.
    from jaxlaunch.trainer.spec.train import Checkpoint, Eval

    return {
        "eval": Eval.model_fields["every"].default,
        "checkpoint": Checkpoint.model_fields["every"].default,
    }


def count_pauses(every: int | None, step: int, total: int) -> int:
    """Return how often a pause, which is also at the end, comes at or after `step`.

    While the pause at `step` itself takes place, the run is at that step.
    """
    if every is None:
        return 1
    return total // every - (max(1, step) - 1) // every + (total % every != 0)


def _pause_s(metrics: CurveFile, key: str, every: int | None) -> float:
    """Return the median of the pauses so far; a row has the pauses since the row before it."""
    points, rows = metrics.pauses[key].points, metrics.curves.get(key)
    if not points or rows is None:
        return 0.0
    first, last = int(rows.points[0][0]), int(rows.points[-1][0])
    # The pauses that are due. Others are saves of the best step, or a wait for the storage.
    count = 0 if every is None else (last - 1) // every - (first - 1) // every
    longest = sorted((seconds for _, _, seconds in points), reverse=True)
    return statistics.median(longest[: max(1, count)])
