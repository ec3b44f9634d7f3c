"""From a source to batches. Position is a function of the step: nothing else is ever saved.

Example i of step s is at position p = s × B + i of an endless sequence: epoch p // N, index shuffle(seed, epoch)(p
mod N). Batches run across epoch ends, so each example comes once per epoch and none is dropped; a process reads a
contiguous range of rows, so the same step holds the same examples on any number of them.

grain reads and prefetches (trainer/data/reader); the order is ours (trainer/data/order), for grain's shuffle takes one
index at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from jaxlaunch.trainer.data import example_rng, reader
from jaxlaunch.trainer.data.examples import Batch, Check, Example, Examples, Form, Reading, narrow
from jaxlaunch.trainer.data.order import Indices
from jaxlaunch.trainer.data.prefetch import Prefetcher
from jaxlaunch.trainer.data.source import Source, as_data_source

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
        deterministic: bool | None = None,
        check: Check | None = None,
    ) -> None:
        self._source = as_data_source(source)
        self._examples = Examples(self._source, example, Reading(seed, example_rng.TRAIN, deterministic, check))
        self._batch, self._rows = batch, _contiguous(rows, batch)
        self._seed, self._shuffle = seed, shuffle
        self._prefetch, self._threads = prefetch, self._examples.threads(threads)

    @property
    def forms(self) -> Mapping[str, Form]:
        """Shape and dtype of every example by key, as `example` makes them."""
        return self._examples.forms

    def like(self, count: int = 1) -> Mapping[str, Form]:
        """Shape and dtype of a global batch of `count` steps by key, its `weight` included."""
        return _like(self.forms, (self._batch,) if count == 1 else (self._batch, count))

    @property
    def note(self) -> str | None:
        """What a user should know of how the examples are read, or None."""
        return self._examples.note

    def batch(self, step: int, count: int = 1) -> Batch:
        """The rows of `count` steps from `step` on, shaped as by `iterate`, and their `weight`, float32 ones."""
        steps = [range(step, step + count)]
        batches = reader.iterate(self._read, steps, self._rows, threads=self._threads)
        with contextlib.closing(batches):
            batch: Batch = next(batches)
        return batch

    def not_finite(self, step: int) -> str | None:
        """The first example of `step` that is not finite, in a sentence: of this process's rows, else of all."""
        for rows in (self._rows, range(self._batch)):
            position_B = np.arange(rows.start, rows.stop) + step * self._batch
            if (found := self._examples.not_finite(self._indexes(step, rows), position_B)) is not None:
                return found
        return None

    def ids(self, step: int) -> list[int]:
        """Source indexes of the rows of `step`, in order."""
        return [int(index) for index in self._indexes(step, self._rows)]

    @overload
    def iterate(self, spans: Sequence[range]) -> Prefetcher[Batch]: ...
    @overload
    def iterate(self, spans: Sequence[range], put: Callable[[Batch], T]) -> Prefetcher[T]: ...
    def iterate(self, spans: Sequence[range], put: Callable[[Batch], Any] | None = None) -> Prefetcher[Any]:
        """The batch of each span of steps, drawn ahead; `get` waits with a time limit.

        A single step has key -> [rows, ...], several have key -> [rows, steps, ...]. `put` is called on each in the
        thread that draws them: there it sends the batch to the device.
        """
        batches = reader.iterate(self._read, spans, self._rows, threads=self._threads, put=put)
        return Prefetcher(batches, ahead=self._prefetch)

    def _read(self, steps: range, rows: range) -> Batch:
        index_BK = np.stack([self._indexes(step, rows) for step in steps], axis=1)
        position_BK = np.stack([np.arange(rows.start, rows.stop) + step * self._batch for step in steps], axis=1)
        batch = self._examples.read(index_BK.reshape(-1), position_BK.reshape(-1))
        batch["weight"] = np.ones(index_BK.size, np.float32)
        if len(steps) == 1:
            return batch
        return {key: array.reshape(*index_BK.shape, *array.shape[1:]) for key, array in batch.items()}

    def _indexes(self, step: int, rows: range) -> Indices:
        start, stop = (step * self._batch + row for row in (rows.start, rows.stop))
        return self._source.indexes(start, stop, seed=self._seed, shuffle=self._shuffle)


class Evaluation:
    """This process's rows of the whole set, once, in order; may be iterated again and again.

    A batch is of one part of a set that has several. The last one of each is filled up with examples of weight 0: every
    process has equally many batches, all of one shape. Of fewer `batches` than the whole set each part has its share by
    its examples, but one at least.
    """

    def __init__(
        self,
        source: Source,
        example: Example,
        *,
        batch: int,
        rows: range,
        batches: int | None = None,
        threads: int,
        seed: int = 0,
        deterministic: bool | None = None,
        check: Check | None = None,
    ) -> None:
        self.source = as_data_source(source)
        self._examples = Examples(self.source, example, Reading(seed, example_rng.EVAL, deterministic, check))
        self._batch, self._rows = batch, _contiguous(rows, batch)
        self._threads = self._examples.threads(threads)
        parts: Mapping[Any, range] = self.source.evaluated_parts or {None: range(len(self._examples))}
        whole = [-(-len(part) // batch) for part in parts.values()]
        counts = whole if batches is None else _shared(batches, whole)
        self._batches = [  # of each batch: its part, and its number there
            (name, part, number)
            for (name, part), count in zip(parts.items(), counts, strict=True)
            for number in range(count)
        ]

    def __len__(self) -> int:
        """Batches of one pass."""
        return len(self._batches)

    @property
    def parts(self) -> list[str | None]:
        """The part of each batch; None of a set without parts."""
        return [name for name, _, _ in self._batches]

    def __iter__(self) -> Prefetcher[Batch]:
        return self.iterate()

    @overload
    def iterate(self) -> Prefetcher[Batch]: ...
    @overload
    def iterate(self, put: Callable[[Batch], T]) -> Prefetcher[T]: ...
    def iterate(self, put: Callable[[Batch], Any] | None = None) -> Prefetcher[Any]:
        """One pass, drawn ahead; `put` as in Pipeline.iterate."""
        batches = reader.iterate(self._read, range(len(self)), self._rows, threads=self._threads, put=put)
        return Prefetcher(batches, ahead=1)

    def like(self) -> Mapping[str, Form]:
        """Shape and dtype of a global batch by key, its `weight` included."""
        return _like(self._examples.forms, (self._batch,))

    def indexes(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers in the set of all examples of a batch, [B], those that fill it up included."""
        return self._placed(number, range(self._batch))[1]

    def _placed(self, number: int, rows: range) -> tuple[range, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The part of a batch, and the numbers of some of its rows: in the set, and counted on beyond its end."""
        _, part, within = self._batches[number]
        position_B = within * self._batch + np.arange(rows.start, rows.stop)
        # Real examples, not zeros: a model may make something that is not finite of zeros, and 0 × nan is nan.
        return part, part.start + position_B % len(part), position_B

    def _read(self, number: int, rows: range) -> Batch:
        part, index_B, position_B = self._placed(number, rows)
        batch = self._examples.read(index_B, index_B)  # drawn by index: each evaluation sees the same
        batch["weight"] = (position_B < len(part)).astype(np.float32)
        return batch


def _like(forms: Mapping[str, Form], batch: tuple[int, ...]) -> Mapping[str, Form]:
    """Shape and dtype by key of `batch` examples of these forms."""
    made = {key: Form((*batch, *form.shape), narrow(form.dtype)) for key, form in forms.items()}
    return made | {"weight": Form(batch, np.dtype(np.float32))}


def _shared(batches: int, whole: Sequence[int]) -> list[int]:
    """So many batches over parts that have `whole`, at most: one each, and of the others each its share."""
    left, more = max(0, batches - len(whole)), max(1, sum(whole) - len(whole))
    counts = [min(each, 1 + left * (each - 1) // more) for each in whole]
    for at in sorted(range(len(whole)), key=lambda at: -whole[at]):  # what rounding left, the largest part first
        counts[at] += min(whole[at] - counts[at], max(0, batches - sum(counts)))
    return counts


def _contiguous(rows: range, batch: int) -> range:
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= batch:
        raise ValueError(f"rows {rows} are not a contiguous part of a batch of {batch}")
    return rows
