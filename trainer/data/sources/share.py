"""Which of n things are held out for evaluation: an even, fixed share, without a list of them."""

from __future__ import annotations

from fractions import Fraction


class Share:
    """Holds out `share` of 0 … n − 1, evenly spread, the first among them; the order of both parts is kept."""

    def __init__(self, share: float, n: int) -> None:
        part = Fraction(share).limit_denominator(1000)
        self._p, self._q = part.numerator, part.denominator
        self.held_out = (n - 1) * self._p // self._q + 1 if n and self._p else 0
        self.kept = n - self.held_out

    def held_out_index(self, k: int) -> int:
        """The k-th that is held out: the i with i p / q = k, rounded up."""
        return -(-k * self._q // self._p)

    def kept_index(self, j: int) -> int:
        """The j-th that is not: they fill the gaps, q of them to every q − p."""
        return j * self._q // (self._q - self._p) + 1 if self._p else j
