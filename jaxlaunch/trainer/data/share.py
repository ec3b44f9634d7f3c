"""Which of n items are held out for evaluation: an even, fixed share, without a list of them."""

from __future__ import annotations

from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt

SMALL = 1000  # a denominator that is no larger leaves room in 64 bits
Whole = TypeVar("Whole", int, npt.NDArray[np.int64])


class Share:
    """Holds out `share` of 0 … n − 1, evenly spread, the first among them; the order of both parts is kept.

    Of a share above 0 that is at least one item, and of a share below 1 not every one, if n is above 1.
    """

    def __init__(self, share: float, n: int) -> None:
        part = Fraction(share).limit_denominator(1000)
        if part in (0, 1):  # closer to it than a thousandth: what is held out is then as exact as the number itself
            part = Fraction(share)
        self._p, self._q = part.numerator, part.denominator
        self.held_out = (n - 1) * self._p // self._q + 1 if n and self._p else 0
        self.kept = n - self.held_out

    def held_out_index(self, k: Whole) -> Whole:
        """Index of the k-th that is held out: k q / p, rounded up, for a share of p / q."""
        return -(-k * self._q // self._p)

    def kept_index(self, j: int) -> int:
        """Index of the j-th that is not held out: they fill the gaps between those that are."""
        return j * self._q // (self._q - self._p) + 1 if self._p else j

    def is_held_out(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each of these items is held out."""
        if not self._p:
            return np.zeros(index.shape, bool)
        wide = index.astype(object) if self._q > SMALL else index  # of a share below a thousandth: 64 bits are too few
        return np.asarray(self.held_out_index(wide * self._p // self._q) == wide, bool)
