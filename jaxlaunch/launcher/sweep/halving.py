"""Which runs of a sweep are stopped early. Pure.

At a rung, a number of steps, each run has its metric's first value from there on. When every run has one, or has ended,
the worse half is stopped: of five the worst two. A run that ended without a value there is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass
class Standing:
    """How far a run is: its value at each rung that it has reached."""

    is_over: bool = False  # it ended by itself: done, failed or stopped by somebody
    values: dict[int, float] = field(default_factory=dict)  # by the number of the rung
    cut: int | None = None  # the rung at which it was stopped early


def decided(standings: Mapping[str, Standing], rungs: int) -> int:
    """How many rungs are decided: at each of them every run that got there has a value or is over."""
    for rung in range(rungs):
        if any(not standing.is_over and rung not in standing.values for standing in _at(standings, rung).values()):
            return rung
    return rungs


def worse(standings: Mapping[str, Standing], rung: int, *, is_higher_better: bool) -> Collection[str]:
    """The runs to stop at a rung where every value is known; of equal ones the later."""
    values = {name: one.values[rung] for name, one in _at(standings, rung).items() if rung in one.values}
    order = sorted(values, key=lambda name: -values[name] if is_higher_better else values[name])
    return order[len(order) - len(order) // 2 :]


def _at(standings: Mapping[str, Standing], rung: int) -> Mapping[str, Standing]:
    """Those that no earlier rung stopped."""
    return {name: one for name, one in standings.items() if one.cut is None or one.cut >= rung}
