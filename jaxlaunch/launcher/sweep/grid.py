"""Combinations of values for a sweep: the whole grid, or a random sample of it."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.wording import shorten_text

# The largest number of runs without an explicit limit.
MAX_RUNS = 1000
_WHOLE_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
# A range whose ends differ by this factor or more is sampled on a logarithmic scale.
_MIN_LOG_FACTOR = 10.0
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "'\""

# Overrides, as `launcher run` takes them.
Point = tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """A key and its possible values: those of a list, or all numbers in a range."""

    key: str
    values: Sequence[str] = ()
    range: tuple[float, float] | None = None

    def draw_value(self, rng: random.Random) -> str:
        """Return a random value as an override."""
        if self.range is None:
            return f"{self.key}={rng.choice(self.values)}"
        low, high = self.range
        if low > 0 and high >= _MIN_LOG_FACTOR * low:
            return f"{self.key}={math.exp(rng.uniform(math.log(low), math.log(high))):.4g}"
        return f"{self.key}={rng.uniform(low, high):.4g}"


def parse_axes(arguments: Sequence[str]) -> list[Axis]:
    """Parse arguments such as `key=a,b`. Raises UserError for invalid and duplicate keys."""
    axes = [_parse_axis(argument) for argument in arguments]
    for key in {axis.key for axis in axes}:
        if sum(axis.key == key for axis in axes) > 1:
            message = f"{key} is given twice."
            raise UserError(message, f"write its values in one argument: {key}=a,b")
    return axes


def make_grid(axes: Sequence[Axis], limit: int | None) -> list[Point]:
    """Return the first `limit` combinations. The last key varies fastest."""
    for axis in axes:
        if axis.range is not None:
            message = f"{axis.key} has a range of numbers, which only random draws can have."
            raise UserError(message, "add --random N.")
    size = _grid_size(axes)
    if limit is None and size > MAX_RUNS:
        message = f"The grid has {size} runs, more than {MAX_RUNS}."
        raise UserError(message, "take some by --random N, or the first by --max N.")
    overrides = ([f"{axis.key}={value}" for value in axis.values] for axis in axes)
    return list(itertools.islice(itertools.product(*overrides), limit))


def draw_points(axes: Sequence[Axis], count: int, seed: int) -> list[Point]:
    """Return `count` different random combinations, or all if there are fewer.

    With the same seed, a larger count begins with the same combinations.
    """
    rng = random.Random(seed)
    if all(axis.range is None for axis in axes):
        count = min(count, _grid_size(axes))
    points: dict[Point, None] = {}
    # A combination that was drawn before is drawn again, but not without end.
    for _ in range(100 * count):
        if len(points) == count:
            break
        points[tuple(axis.draw_value(rng) for axis in axes)] = None
    return list(points)


def _grid_size(axes: Sequence[Axis]) -> int:
    return math.prod(len(axis.values) for axis in axes)


def _parse_axis(argument: str) -> Axis:
    """Parse a range of numbers, or a list of values and of ranges of whole numbers."""
    key, equals, text = argument.partition("=")
    key, short_argument = key.strip(), shorten_text(argument)
    if not equals or not key or key.startswith("-"):
        raise UserError(f"{short_argument} is not of the form key=a,b or key=0..3.")
    parts = list(_split_values(text))
    match = _NUMBER_RANGE.fullmatch(parts[0])
    if len(parts) == 1 and match is not None and not _WHOLE_RANGE.fullmatch(parts[0]):
        low, high = map(float, match.groups())
        if not low < high or math.isinf(high - low):
            raise UserError(
                f"The range {short_argument} is empty.", "write the lower number first."
            )
        return Axis(key, range=(low, high))
    if len(parts) > 1 and not all(parts):
        raise UserError(f"{short_argument} has an empty value.", "leave out the comma.")
    values: dict[str, None] = {}
    for part in parts:
        if (match := _WHOLE_RANGE.fullmatch(part)) is None:
            values[part] = None
            continue
        # Both ends are included.
        first, last = map(int, match.groups())
        if not first <= last < first + MAX_RUNS:
            message = (
                f"The range {part} of {short_argument} has no number, or more than {MAX_RUNS}."
            )
            raise UserError(message)
        values |= dict.fromkeys(map(str, range(first, last + 1)))
    return Axis(key, list(values))


def _split_values(text: str) -> Iterator[str]:
    """Split a text at the commas that are outside of brackets and quotes."""
    depth, quote, start = 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPENING + _CLOSING:
            depth += 1 if character in _OPENING else -1
        elif character == "," and depth <= 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()
