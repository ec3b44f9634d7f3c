"""Mixes several sources in fixed proportions, as a function of the position alone.

The endless sequence of examples is divided into blocks of a thousand positions, or more if that
would round a small weight by more than 1 %. In each block the number of examples of a part is
proportional to its weight, rounded by less than one example, and these examples are spread evenly
in a fixed pattern. Each part has its own shuffled order, in which an example occurs once per epoch.

P positions, S parts.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.order import Indices
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError, SpecError

# Lengths of a block, in positions, that are tried in order.
BLOCK_LENGTHS = (1000, 10_000, 100_000)
# A weight is rounded by at most this share of itself if a larger block allows it.
MAX_ROUNDING = 0.01


@contextlib.contextmanager
def report_part(name: str) -> Iterator[None]:
    """Prefix a DataError with the name of a part of the mixture."""
    try:
        yield
    except DataError as error:
        raise DataError(f"train.data.parts.{name}: {error}") from error


class Mixture(DataSource):
    """A source whose indices enumerate the examples of all parts, drawn in fixed proportions.

    Raises SpecError if a weight is less than one example in a block.
    """

    def __init__(self, parts: Mapping[str, DataSource], weights: Mapping[str, float]) -> None:
        self.name = f"mixture of {', '.join(parts)}"
        self._parts, self._names = list(parts.values()), list(parts)
        self.notes = [f"parts.{name}: {note}" for name in parts for note in parts[name].notes]
        self.is_light = all(part.is_light for part in self._parts)
        self.takes_rng = self.may_draw = any(part.may_draw for part in self._parts)
        self._ends = list(itertools.accumulate(len(part) for part in self._parts))
        # Use the first length that rounds every weight accurately enough, or else the last one.
        part_weights = [weights[name] for name in parts]
        share_S = np.array(part_weights) / sum(part_weights)
        for block_length in BLOCK_LENGTHS:
            count_S = block_counts(part_weights, block_length)
            if np.all(
                np.abs(count_S - share_S * block_length) <= MAX_ROUNDING * share_S * block_length
            ):
                break
        self._block_length, self._count_S = block_length, count_S
        for name, count in zip(parts, count_S.tolist(), strict=True):
            if not count and weights[name]:
                problem = f"is less than one example in {self._block_length}"
                hint = "leave the part out, or raise its weight"
                key = f"train.data.parts.{name}.weight"
                raise SpecError(f"{key} = {weights[name]} {problem}; {hint}")
        # The part at each position of a block, spread as evenly as possible.
        part_P = np.repeat(np.arange(len(parts)), count_S)
        number_P = np.arange(len(part_P)) - np.repeat(np.cumsum(count_S) - count_S, count_S)
        self._part_P = part_P[np.argsort((number_P + 0.5) / count_S[part_P], kind="stable")]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        part, part_index = self._locate_part(index)
        return part.read_example(part_index, rng)

    def locate_example(self, index: int) -> str | None:
        """Return the file of an example and the place in it, or None if it is unknown."""
        part, part_index = self._locate_part(index)
        return part.locate_example(part_index)

    def fingerprint(self) -> str:
        """Return each part's fingerprint and its number of examples in a block."""
        parts = zip(self._names, self._count_S.tolist(), self._parts, strict=True)
        fingerprints = (f"{name} {count}: {part.fingerprint()}" for name, count, part in parts)
        return f"mixture of {self._block_length}: {'; '.join(fingerprints)}"

    @property
    def evaluated_parts(self) -> dict[str, range]:
        """The indexes of each part by name."""
        starts = [0, *self._ends]
        return dict(zip(self._names, map(range, starts, self._ends), strict=True))

    def example_indices(self, start: int, stop: int, *, seed: int, shuffle: bool) -> Indices:
        """Return the indices of the examples at positions `start` to `stop - 1`."""
        part_P = self._part_P[np.arange(start, stop) % self._block_length]
        index_P = np.empty(stop - start, np.int64)
        for number, part in enumerate(self._parts):
            is_part_P = part_P == number
            first = self._count_before(number, start)
            last = first + int(is_part_P.sum())
            if last > first:
                part_seed = seed * 2**16 + number
                part_index_P = part.example_indices(first, last, seed=part_seed, shuffle=shuffle)
                index_P[is_part_P] = part_index_P + (self._ends[number - 1] if number else 0)
        return index_P

    def epochs_by_part(self, positions: int) -> dict[str, float]:
        """Return the epochs of each part in the first `positions`, by name."""
        counts = (self._count_before(number, positions) for number in range(len(self._parts)))
        parts = zip(self._names, counts, self._parts, strict=True)
        return {name: count / len(part) for name, count, part in parts}

    def _locate_part(self, index: int) -> tuple[DataSource, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)

    def _count_before(self, part: int, position: int) -> int:
        blocks, remainder = divmod(position, self._block_length)
        return blocks * int(self._count_S[part]) + int((self._part_P[:remainder] == part).sum())


def block_counts(weights: list[float], block_length: int) -> npt.NDArray[np.int64]:
    """Return the number of examples of each part in a block, [S], by the largest remainders."""
    exact_S = np.array(weights) / sum(weights) * block_length
    count_S = np.floor(exact_S).astype(np.int64)
    rounded_up = np.argsort(count_S - exact_S, kind="stable")[: block_length - int(count_S.sum())]
    count_S[rounded_up] += 1
    return count_S
