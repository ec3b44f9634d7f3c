"""From a source to batches. Position is a function of the step: nothing else is ever saved.

Example i of step s stands at position p = s × B + i of an endless sequence: epoch p // N, index shuffle(seed, epoch)(p
mod N). Batches run across epoch ends, so each example comes once per epoch and none is dropped; a process reads a
contiguous range of rows, so the same step holds the same examples on any number of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import numpy as np

from trainer.data import order
from trainer.data.examples import Batch, Example, Examples
from trainer.data.prefetch import Prefetcher
from trainer.data.source import Source

T = TypeVar("T")


class Pipeline:
    """This process's rows of every training batch. Raises DataError when the first example cannot be read."""

    def __init__(
        self,
        source: Source,
        example: Example,
        *,
        batch: int,
        rows: range,
        seed: int,
        shuffle: bool,
        prefetch: int,
        threads: int,
    ) -> None:
        self._examples = Examples(source, example, threads=threads)
        self._batch, self._rows = batch, _contiguous(rows, batch)
        self._seed, self._shuffle, self._prefetch = seed, shuffle, prefetch

    def batch(self, step: int) -> Batch:
        """The rows of `step`, key -> [rows, ...], and `weight` float32 [rows] of ones."""
        batch = self._examples.read(self._indexes(step))
        batch["weight"] = np.ones(len(self._rows), np.float32)
        return batch

    def ids(self, step: int) -> list[int]:
        """Source indexes of the rows of `step`, in order."""
        return [int(index) for index in self._indexes(step)]

    @overload
    def iterate(self, start: int) -> Prefetcher[Batch]: ...
    @overload
    def iterate(self, start: int, put: Callable[[Batch], T]) -> Prefetcher[T]: ...
    def iterate(self, start: int, put: Callable[[Batch], Any] | None = None) -> Prefetcher[Any]:
        """Batches of `start`, `start` + 1, … without end, read ahead; `get` waits with a time limit.

        `put` is called on each in the reading thread: there it sends the batch to the device.
        """
        return Prefetcher(_then(self.batch, put), itertools.count(start), ahead=self._prefetch)

    def _indexes(self, step: int) -> order.Indexes:
        first = step * self._batch
        return order.indexes(
            first + self._rows.start,
            first + self._rows.stop,
            length=len(self._examples),
            seed=self._seed,
            shuffle=self._shuffle,
        )


class Evaluation:
    """This process's rows of the whole set, once, in order; may be iterated again and again.

    The last batch is filled up with examples of weight 0: every process has equally many batches, all of one shape.
    """

    def __init__(
        self, source: Source, example: Example, *, batch: int, rows: range, batches: int | None = None, threads: int
    ) -> None:
        self._examples = Examples(source, example, threads=threads)
        self._batch, self._rows = batch, _contiguous(rows, batch)
        whole = -(-len(self._examples) // batch)
        self._batches = whole if batches is None else min(batches, whole)

    def __len__(self) -> int:
        """Batches of one pass."""
        return self._batches

    def __iter__(self) -> Prefetcher[Batch]:
        return self.iterate()

    @overload
    def iterate(self) -> Prefetcher[Batch]: ...
    @overload
    def iterate(self, put: Callable[[Batch], T]) -> Prefetcher[T]: ...
    def iterate(self, put: Callable[[Batch], Any] | None = None) -> Prefetcher[Any]:
        """One pass, read ahead; `put` as in Pipeline.iterate."""
        return Prefetcher(_then(self._read, put), iter(range(self._batches)), ahead=1)

    def _read(self, number: int) -> Batch:
        position_B = number * self._batch + np.arange(self._rows.start, self._rows.stop)
        # Real examples, not zeros: a model may make something that is not finite of zeros, and 0 × nan is nan.
        batch = self._examples.read(position_B % len(self._examples))
        batch["weight"] = (position_B < len(self._examples)).astype(np.float32)
        return batch


def _then(read: Callable[[int], Batch], put: Callable[[Batch], Any] | None) -> Callable[[int], Any]:
    return read if put is None else lambda step: put(read(step))


def _contiguous(rows: range, batch: int) -> range:
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= batch:
        raise ValueError(f"rows {rows} are not a contiguous part of a batch of {batch}")
    return rows
