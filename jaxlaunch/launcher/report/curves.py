"""Series over the steps of a run, reduced while they are read to what a screen can show.

The steps are divided into ranges of equal width. A curve keeps the lowest and the highest point of
each range, and the seconds of a range are summed. When a series has too many items, the width
doubles and neighbouring ranges are merged, so that all parts of the run are reduced equally. The
oldest and the newest item are always kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

# Points of a curve in memory; a screen has fewer columns.
MAX_POINTS = 2000
# Points of all curves on a page, each of which takes some 25 bytes.
MAX_PAGE_POINTS = 20_000
# Each curve keeps this many points, however many curves a page has.
MIN_CURVE_POINTS = 100
MAX_INTERVALS = 1000

# Step, Unix time, value.
Point = tuple[float, float, float]
# Step and Unix time at its end, wall seconds, seconds by cause.
Interval = tuple[float, float, float, dict[str, float]]
# A tuple that begins with its step.
Item = TypeVar("Item", bound=tuple[Any, ...])


class StepSeries(Generic[Item]):
    """Items in the order of their steps. Each range of steps keeps a few of its items."""

    def __init__(self, limit: int) -> None:
        self.items: list[Item] = []
        self._limit, self._width = limit, 1
        # Index of the first item in the newest range. The oldest item is in no range.
        self._range_start = 1

    def merge_range(self, items: list[Item]) -> list[Item]:
        """Return at most two items that stand for all items of a range."""
        raise NotImplementedError

    def add_item(self, item: Item) -> None:
        """Add the newest item. It replaces the last one if that has the same step."""
        items, start = self.items, self._range_start
        if items and items[-1][0] == item[0]:
            items.pop()
        count = len(items)
        if count > start + 1:
            # The newest item was kept only because it was the newest.
            items[start:] = self.merge_range(items[start:])
            count = len(items)
        if count <= start or items[-1][0] // self._width != item[0] // self._width:
            self._range_start = max(1, count)
        items.append(item)
        while len(self.items) > self._limit:
            self._width *= 2
            self._join_ranges()

    def drop_from(self, step: float) -> None:
        """Drop the items of `step` and of later steps."""
        self.items = [item for item in self.items if item[0] < step]
        items, self._range_start = self.items, max(1, len(self.items))
        while self._range_start > 1 and (
            items[self._range_start - 1][0] // self._width == items[-1][0] // self._width
        ):
            self._range_start -= 1

    def _join_ranges(self) -> None:
        groups = itertools.groupby(self.items[1:], lambda item: item[0] // self._width)
        *earlier, newest = [list(group) for _, group in groups]
        joined = self.items[:1]
        for group in earlier:
            joined += self.merge_range(group)
        self._range_start = len(joined)
        joined += self.merge_range(newest[:-1]) if len(newest) > 1 else []
        self.items = [*joined, newest[-1]]


class Curve(StepSeries[Point]):
    """One number over the steps. A long curve keeps the lowest and highest point of each range."""

    def __init__(self, points: Sequence[Point] = (), limit: int = MAX_POINTS) -> None:
        super().__init__(limit)
        for point in points:
            self.add_item(point)

    @property
    def points(self) -> list[Point]:
        """The points of the curve."""
        return self.items

    def merge_range(self, items: list[Point]) -> list[Point]:
        """Return the lowest and the highest point in their order."""
        low = high = 0
        for index, (_, _, value) in enumerate(items):
            if value < items[low][2]:
                low = index
            elif value > items[high][2]:
                high = index
        return [items[low]] if low == high else [items[min(low, high)], items[max(low, high)]]

    def reduce_points(self, limit: int) -> list[Point]:
        """Return at most `limit` points of the whole curve, the extremes of each range."""
        return self.points if len(self.points) <= limit else Curve(self.points, limit).points

    def values_by_range(self, count: int) -> list[float]:
        """Return the mean of the lowest and highest value in each of `count` ranges of steps.

        A range without a point has the value of the range before it. There are at most as many
        ranges as points.
        """
        first, last = self.points[0][0], self.points[-1][0]
        count = min(count, len(self.points))
        ranges = list[list[float]]([] for _ in range(count))
        for step, _, value in self.points:
            position = (step - first) / (last - first) if last > first else 0.0
            ranges[min(count - 1, math.floor(position * count))].append(value)
        middles = list[float]()
        for values in ranges:
            middles.append(min(values) / 2 + max(values) / 2 if values else middles[-1])
        return middles


class Intervals(StepSeries[Interval]):
    """The seconds of the logged intervals by cause, summed over each range of steps."""

    def __init__(self) -> None:
        super().__init__(MAX_INTERVALS)

    def merge_range(self, items: list[Interval]) -> list[Interval]:
        """Return one interval with the sums."""
        step, end, _, _ = items[-1]
        wall_s = sum(item[2] for item in items)
        seconds = {cause: sum(item[3][cause] for item in items) for cause in items[0][3]}
        return [(step, end, wall_s, seconds)]
