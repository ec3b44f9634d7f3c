"""Which of n items are held out for evaluation: an even, fixed share, without a list of them."""

from __future__ import annotations

from fractions import Fraction


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

    def held_out_index(self, k: int) -> int:
        """Index of the k-th that is held out: k q / p, rounded up, for a share of p / q."""
        return -(-k * self._q // self._p)

    def kept_index(self, j: int) -> int:
        """Index of the j-th that is not held out: they fill the gaps between those that are."""
        return j * self._q // (self._q - self._p) + 1 if self._p else j
