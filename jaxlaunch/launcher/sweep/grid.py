"""The runs of a sweep: all combinations of the values, or a random part. Pure."""

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
_WHOLE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
# A range whose ends differ by this factor is sampled on a logarithmic scale.
_LOGARITHMIC = 10.0
_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "'\""

# Overrides, as `launcher run` takes them.
Point = tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """A key and its possible values: a list, or any number of a range."""

    key: str
    values: Sequence[str] = ()
    range: tuple[float, float] | None = None

    def draw_value(self, rng: random.Random) -> str:
        """Return a random value as an override."""
        if self.range is None:
            return f"{self.key}={rng.choice(self.values)}"
        low, high = self.range
        if low > 0 and high >= _LOGARITHMIC * low:
            return f"{self.key}={math.exp(rng.uniform(math.log(low), math.log(high))):.4g}"
        return f"{self.key}={rng.uniform(low, high):.4g}"


def parse_axes(arguments: Sequence[str]) -> list[Axis]:
    """Return the keys with their values. Raises UserError for invalid and duplicate keys."""
    axes = [_parse_axis(argument) for argument in arguments]
    for key in {axis.key for axis in axes}:
        if sum(axis.key == key for axis in axes) > 1:
            message = f"{key} is given twice."
            raise UserError(message, f"write its values in one argument: {key}=a,b")
    return axes


def make_grid(axes: Sequence[Axis], limit: int | None) -> list[Point]:
    """Return the first `limit` combinations, the last key varying fastest."""
    for axis in axes:
        if axis.range is not None:
            message = f"{axis.key} has a range of numbers, which no grid has."
            raise UserError(message, "add --random N.")
    size = _grid_size(axes)
    if limit is None and size > MAX_RUNS:
        message = f"The grid has {size} runs, more than {MAX_RUNS}."
        raise UserError(message, "take some by --random N, or the first by --max N.")
    overrides = ([f"{axis.key}={value}" for value in axis.values] for axis in axes)
    return list(itertools.islice(itertools.product(*overrides), limit))


def draw_points(axes: Sequence[Axis], count: int, seed: int) -> list[Point]:
    """Return `count` different random combinations, or all if there are fewer.

    A larger count begins with the same combinations.
    """
    rng = random.Random(seed)
    if all(axis.range is None for axis in axes):
        count = min(count, _grid_size(axes))
    points: dict[Point, None] = {}
    for _ in range(100 * count):
        if len(points) == count:
            break
        points[tuple(axis.draw_value(rng) for axis in axes)] = None
    return list(points)


def _grid_size(axes: Sequence[Axis]) -> int:
    return math.prod(len(axis.values) for axis in axes)


def _parse_axis(argument: str) -> Axis:
    key, equals, text = argument.partition("=")
    key, shown = key.strip(), shorten_text(argument)
    if not equals or not key or key.startswith("-"):
        raise UserError(f"{shown} is not of the form key=a,b or key=0..3.")
    pieces = list(_split_values(text))
    match = _RANGE.fullmatch(pieces[0])
    if len(pieces) == 1 and match is not None and not _WHOLE.fullmatch(pieces[0]):
        low, high = map(float, match.groups())
        if not low < high or math.isinf(high - low):
            raise UserError(f"The range {shown} is empty.", "write the lower number first.")
        return Axis(key, range=(low, high))
    if len(pieces) > 1 and not all(pieces):
        raise UserError(f"{shown} has an empty value.", "leave out the comma.")
    values: dict[str, None] = {}
    for piece in pieces:
        if (match := _WHOLE.fullmatch(piece)) is None:
            values[piece] = None
            continue
        # Both ends are included.
        first, last = map(int, match.groups())
        if not first <= last < first + MAX_RUNS:
            message = f"The range {piece} of {shown} has no number, or more than {MAX_RUNS}."
            raise UserError(message)
        values |= dict.fromkeys(map(str, range(first, last + 1)))
    return Axis(key, list(values))


def _split_values(text: str) -> Iterator[str]:
    """Yield the parts between commas that are outside of brackets and quotes."""
    depth, quote, begin = 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        elif letter in _OPEN + _CLOSE:
            depth += 1 if letter in _OPEN else -1
        elif letter == "," and depth <= 0:
            yield text[begin:at].strip()
            begin = at + 1
    yield text[begin:].strip()
