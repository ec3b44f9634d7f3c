"""A metric of the evaluations that decides something: which steps are the best, and when a run gets no better. Pure.

What was seen is saved beside the state, so that a run that resumes decides as one that was never broken.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxlaunch.trainer.spec import EVAL, Best, StopEarly, Watched


def value_of(watched: Watched, means: Mapping[str, float]) -> float:
    """The watched metric among the means of an evaluation."""
    return means[watched.metric.removeprefix(EVAL)]


def _is_better(watched: Watched, value: float, than: float, by: float = 0.0) -> bool:
    return value < than - by if watched.mode == "min" else value > than + by


class BestSteps:
    """The steps of the best values so far, at most `keep`; of equal values the older step."""

    def __init__(self, best: Best) -> None:
        self._best = best
        self._found: list[tuple[int, float]] = []  # step and value, the best first

    def see(self, step: int, value: float) -> None:
        """Takes an evaluation into account; what is not finite is never among the best."""
        if math.isfinite(value) and step not in self.steps:
            at = sum(not _is_better(self._best, value, each) for _, each in self._found)
            self._found.insert(at, (step, value))
            del self._found[self._best.keep :]

    @property
    def steps(self) -> list[int]:
        """The best steps, the best first."""
        return [step for step, _ in self._found]

    def to_meta(self) -> dict[str, Any]:
        """What a checkpoint says of them."""
        return {**_key(self._best), "steps": [[step, value] for step, value in self._found]}

    def resume(self, meta: Mapping[str, Any] | None, there: Collection[int]) -> None:
        """Goes on from what a checkpoint says, if it is of the same metric, with the steps that are still `there`."""
        if meta is not None and _key(self._best).items() <= meta.items():
            found = [(int(step), float(value)) for step, value in meta["steps"] if step in there]
            self._found = found[: self._best.keep]


class Patience:
    """Counts evaluations in a row that were no better than the best before them."""

    def __init__(self, rule: StopEarly) -> None:
        self._rule = rule
        self._best: tuple[int, float] | None = None
        self._stale = 0

    def see(self, step: int, value: float) -> None:
        """Takes an evaluation into account; what is not finite is not better."""
        is_better = self._best is None or _is_better(self._rule, value, self._best[1], self._rule.min_delta)
        if math.isfinite(value) and is_better:
            self._best, self._stale = (step, value), 0
        else:
            self._stale += 1

    @property
    def is_over(self) -> bool:
        """Whether the run is to end."""
        return self._stale >= self._rule.patience

    def sentence(self) -> str:
        """Why it ends."""
        rule = self._rule
        by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        best = "" if self._best is None else f" than {self._best[1]:.6g} of step {self._best[0]}"
        times = f"{self._stale} evaluation{'s' * (self._stale != 1)}"
        return f"{rule.metric} was not better{best}{by} in {times} (train.stop_early)"

    def to_meta(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {**_key(self._rule), "best": None if self._best is None else list(self._best), "stale": self._stale}

    def resume(self, meta: Mapping[str, Any] | None) -> None:
        """Goes on from what a checkpoint says, if it is of the same metric."""
        if meta is not None and _key(self._rule).items() <= meta.items():
            self._best = None if meta["best"] is None else (int(meta["best"][0]), float(meta["best"][1]))
            self._stale = int(meta["stale"])


def _key(watched: Watched) -> dict[str, str]:
    return {"metric": watched.metric, "mode": watched.mode}
