"""Which steps are dispatched together. A tiny model's step is shorter than the time the host needs to dispatch one.

Evaluations and saves come between dispatches, so the steps between them are cut into spans of `steps_per_dispatch`, and
the rest is dispatched one by one: two shapes, hence two programs, on any run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload


class Spans(Sequence[range]):
    """Spans of consecutive steps by their edges; span i is the steps from edge i to edge i + 1."""

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = edges

    def __len__(self) -> int:
        return len(self._edges) - 1

    @overload
    def __getitem__(self, number: int) -> range: ...
    @overload
    def __getitem__(self, number: slice) -> Spans: ...
    def __getitem__(self, number: int | slice) -> range | Spans:
        if isinstance(number, slice):
            raise TypeError("one span at a time")
        number = range(len(self))[number]
        return range(self._edges[number], self._edges[number + 1])


def spans(start: int, total: int, size: int = 1, every: Iterable[int | None] = ()) -> Spans:
    """The steps from `start` to `total`, `size` or 1 at a time; a span begins at each multiple of one of `every`."""
    if size == 1:
        return Spans(range(start, total + 1))
    edges, periods = [start], [period for period in every if period is not None]
    while (done := edges[-1]) < total:
        pause = min([total, *(done - done % period + period for period in periods)])
        whole = done + (pause - done) // size * size
        edges += [*range(done + size, whole + 1, size), *range(whole + 1, pause + 1)]
    return Spans(edges)
