"""The runs of a sweep: every combination of the values that are given, or some of them by chance. Pure."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.wording import cut

MOST = 1000  # runs that nobody asked for by a number
_WHOLE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_LOGARITHMIC = 10.0  # a range whose ends are that factor apart is drawn from by its logarithm
_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "'\""

Point = tuple[str, ...]  # overrides, as `launcher run` takes them


@dataclass(frozen=True)
class Axis:
    """A key, and what it may be: some values, or any number of a range."""

    key: str
    values: Sequence[str] = ()
    range: tuple[float, float] | None = None

    def drawn(self, chance: random.Random) -> str:
        """One of them, as an override."""
        if self.range is None:
            return f"{self.key}={chance.choice(self.values)}"
        low, high = self.range
        if low > 0 and high >= _LOGARITHMIC * low:
            return f"{self.key}={math.exp(chance.uniform(math.log(low), math.log(high))):.4g}"
        return f"{self.key}={chance.uniform(low, high):.4g}"


def axes(arguments: Sequence[str]) -> list[Axis]:
    """The keys with their values. Raises UserError for what cannot be read, or is there twice."""
    found = [_axis(argument) for argument in arguments]
    for key in {axis.key for axis in found}:
        if sum(axis.key == key for axis in found) > 1:
            raise UserError(f"{key} is given twice.", f"write its values in one argument: {key}=a,b")
    return found


def grid(found: Sequence[Axis], most: int | None) -> list[Point]:
    """Every combination, the last key first; the first `most` of them. Raises UserError for more than MOST unasked."""
    for axis in found:
        if axis.range is not None:
            raise UserError(f"{axis.key} has a range of numbers, which no grid has.", "add --random N.")
    size = _size(found)
    if most is None and size > MOST:
        raise UserError(
            f"The grid has {size} runs, more than {MOST}.", "take some by --random N, or the first by --max N."
        )
    combinations = itertools.product(*([f"{axis.key}={value}" for value in axis.values] for axis in found))
    return list(itertools.islice(combinations, most))


def drawn(found: Sequence[Axis], count: int, seed: int) -> list[Point]:
    """`count` different combinations by chance, or all there are. With a larger count the first ones are the same."""
    chance = random.Random(seed)
    if all(axis.range is None for axis in found):
        count = min(count, _size(found))
    points: dict[Point, None] = {}
    for _ in range(100 * count):
        if len(points) == count:
            break
        points[tuple(axis.drawn(chance) for axis in found)] = None
    return list(points)


def _size(found: Sequence[Axis]) -> int:
    return math.prod(len(axis.values) for axis in found)


def _axis(argument: str) -> Axis:
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not key or key.startswith("-"):
        raise UserError(f"{cut(argument)} is not of the form key=a,b or key=0..3.")
    pieces = list(_pieces(text))
    if len(pieces) == 1 and (found := _RANGE.fullmatch(pieces[0])) and not _WHOLE.fullmatch(pieces[0]):
        low, high = map(float, found.groups())
        if not low < high or math.isinf(high - low):
            raise UserError(f"The range {cut(argument)} is empty.", "write the lower number first.")
        return Axis(key, range=(low, high))
    if len(pieces) > 1 and not all(pieces):
        raise UserError(f"{cut(argument)} has an empty value.", "leave out the comma.")
    values = list(itertools.chain.from_iterable(_values(argument, piece) for piece in pieces))
    return Axis(key, list(dict.fromkeys(values)))


def _values(argument: str, piece: str) -> Iterator[str]:
    """What a piece between commas stands for: itself, or whole numbers, both ends included."""
    if (found := _WHOLE.fullmatch(piece)) is None:
        yield piece
        return
    low, high = map(int, found.groups())
    if not low <= high < low + MOST:
        raise UserError(f"The range {piece} of {cut(argument)} has no number, or more than {MOST}.")
    yield from map(str, range(low, high + 1))


def _pieces(text: str) -> Iterator[str]:
    """What stands between the commas that are in no brackets and no quotes."""
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
