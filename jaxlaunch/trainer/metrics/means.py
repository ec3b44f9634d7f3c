"""The means of an evaluation, from the sums of its batches: of the whole set, and of each part of a mixture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch.contract import Key

Pairs = dict[str, tuple[float, float]]  # of a metric's name: its sum, and the weight of that


class Means:
    """Adds up batches. `derived` gives what follows from means, such as the perplexity of a loss."""

    def __init__(self, derived: Callable[[dict[str, float]], Mapping[str, float]]) -> None:
        self._derived = derived
        self._of: dict[str | None, Pairs] = {None: {}}  # of the whole set under None, and of each part

    def add(self, part: str | None, found: Mapping[str, Any]) -> None:
        """Adds a batch's sums and weights, all its examples being of `part`, or of a set without parts."""
        for of in {None, part}:
            pairs = self._of.setdefault(of, {})
            for name, (total, weight) in found.items():
                before = pairs.get(name, (0.0, 0.0))
                pairs[name] = (before[0] + float(total), before[1] + float(weight))

    def all(self) -> dict[str, float]:
        """Those of the whole set and of its parts, as `loss` and `loss/code`, and how many `examples` each has."""
        found = self._means(None)
        for part in self._of.keys() - {None}:
            found |= {f"{name}/{part}": mean for name, mean in self._means(part).items() if "/" not in name}
        return found

    def _means(self, part: str | None) -> dict[str, float]:
        pairs = dict(self._of[part])
        examples, _ = pairs.pop(Key.EXAMPLES)
        means = {name: total / weight if weight else math.nan for name, (total, weight) in pairs.items()}
        return {**means, **self._derived(means), Key.EXAMPLES: examples}
