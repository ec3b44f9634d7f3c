"""Means of an evaluation, and decisions on a watched metric: the best steps, and an early stop.

The values so far are saved with each checkpoint, so that a resumed run takes the same decisions as
an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from jaxlaunch.contract import Key
from jaxlaunch.trainer.models.experts import Routing
from jaxlaunch.trainer.spec import EVAL_PREFIX, Best, StopEarly, WatchedMetric


class EvaluationMeans:
    """Sums over the batches of an evaluation, and their means at the end.

    `derive_metrics` computes further metrics from the means.
    """

    def __init__(self, derive_metrics: Callable[[dict[str, float]], Mapping[str, float]]) -> None:
        self._derive_metrics = derive_metrics
        # (sum, weight) by part of a mixture and name of the metric. The part None is the whole set.
        self._sums: dict[str | None, dict[str, tuple[float, float]]] = {None: {}}
        # The routing of a model with experts by part, in float64.
        self._routings: dict[str | None, Routing] = {}

    def add(self, part: str | None, sums: Mapping[str, Any]) -> None:
        """Add the sums and weights of a batch, whose examples all belong to `part`."""
        batch_sums = {name: jax.tree.map(np.float64, item) for name, item in sums.items()}
        batch_routing = batch_sums.pop(Key.ROUTING, None)
        for key in {None, part}:
            part_sums = self._sums.setdefault(key, {})
            for name, (batch_total, batch_weight) in batch_sums.items():
                total, weight = part_sums.get(name, (0.0, 0.0))
                part_sums[name] = (total + float(batch_total), weight + float(batch_weight))
            if batch_routing is not None:
                routing = self._routings.get(key) or jax.tree.map(np.zeros_like, batch_routing)
                self._routings[key] = jax.tree.map(np.add, routing, batch_routing)

    def compute_means(self) -> dict[str, float]:
        """Return the means of the whole set and of its parts, as `loss` and `loss/code`."""
        means = self._part_means(None)
        for part in self._sums.keys() - {None}:
            part_means = self._part_means(part).items()
            means |= {f"{name}/{part}": mean for name, mean in part_means if "/" not in name}
        return means

    def _part_means(self, part: str | None) -> dict[str, float]:
        sums = dict(self._sums[part])
        examples, _ = sums.pop(Key.EXAMPLES)
        means = {
            name: total / weight if weight else math.nan for name, (total, weight) in sums.items()
        }
        if part in self._routings:
            routing_means = self._routings[part].metric_means()
            means |= {name: float(mean) for name, mean in routing_means.items()}
        return {**means, **self._derive_metrics(means), Key.EXAMPLES: examples}


def watched_value(watched: WatchedMetric, means: Mapping[str, float]) -> float:
    """Return the value of the watched metric in the means of an evaluation."""
    return means[watched.metric.removeprefix(EVAL_PREFIX)]


def _is_better(watched: WatchedMetric, value: float, other: float, margin: float = 0.0) -> bool:
    return value < other - margin if watched.mode == "min" else value > other + margin


def _watched_key(watched: WatchedMetric) -> dict[str, str]:
    return {"metric": watched.metric, "mode": watched.mode}


class BestSteps:
    """The steps with the best values so far, at most `keep`. Of equal values the older wins."""

    def __init__(self, best: Best) -> None:
        self.rule = best
        # (step, value), the best first.
        self._values: list[tuple[int, float]] = []

    def add_value(self, step: int, value: float) -> None:
        """Add the value of an evaluation. A value that is not finite is never among the best."""
        if math.isfinite(value) and step not in self.steps:
            rank = sum(not _is_better(self.rule, value, other) for _, other in self._values)
            self._values.insert(rank, (step, value))
            del self._values[self.rule.keep :]

    @property
    def steps(self) -> list[int]:
        """The best steps, the best first."""
        return [step for step, _ in self._values]

    def to_meta(self) -> dict[str, Any]:
        """Return the steps and values for the metadata of a checkpoint."""
        return _watched_key(self.rule) | {"steps": [[step, value] for step, value in self._values]}

    def resume(self, meta: Mapping[str, Any] | None, steps: Collection[int]) -> None:
        """Restore the values that exist in `steps`, if the checkpoint is of the same metric."""
        if meta is not None and _watched_key(self.rule).items() <= meta.items():
            values = [(int(step), float(value)) for step, value in meta["steps"] if step in steps]
            self._values = values[: self.rule.keep]


class Patience:
    """Counts consecutive evaluations without an improvement."""

    def __init__(self, rule: StopEarly) -> None:
        self.rule = rule
        self._best: tuple[int, float] | None = None
        # Evaluations since the best one.
        self._stale_count = 0

    def add_value(self, step: int, value: float) -> None:
        """Add the value of an evaluation. A value that is not finite never improves."""
        is_better = self._best is None or _is_better(
            self.rule, value, self._best[1], self.rule.min_delta
        )
        if math.isfinite(value) and is_better:
            self._best, self._stale_count = (step, value), 0
        else:
            self._stale_count += 1

    @property
    def is_over(self) -> bool:
        """Whether the run should end."""
        return self._stale_count >= self.rule.patience

    def describe_end(self) -> str:
        """Return the reason for the early stop as a sentence."""
        rule = self.rule
        margin = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        best = "" if self._best is None else f" than {self._best[1]:.6g} of step {self._best[0]}"
        times = f"{self._stale_count} evaluation{'s' * (self._stale_count != 1)}"
        return f"{rule.metric} was not better{best}{margin} in {times} (train.stop_early)"

    def to_meta(self) -> dict[str, Any]:
        """Return the state for the metadata of a checkpoint."""
        best = None if self._best is None else list(self._best)
        return _watched_key(self.rule) | {"best": best, "stale": self._stale_count}

    def resume(self, meta: Mapping[str, Any] | None) -> None:
        """Restore the state, if the checkpoint is of the same metric."""
        if meta is not None and _watched_key(self.rule).items() <= meta.items():
            best = meta["best"]
            self._best = None if best is None else (int(best[0]), float(best[1]))
            self._stale_count = int(meta["stale"])
