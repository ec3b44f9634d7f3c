"""Batches of consecutive steps, read by grain: its threads read the parts of a batch and begin the next one.

What grain moves is a part of a batch, not an example: each thing it moves costs it about 50 µs. The threads share every
batch, so one of slow rows is ready sooner than if each read its own, and fewer batches are in memory at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grain
import numpy as np
from absl import flags

from jaxlaunch.trainer.data.examples import Batch

Steps = TypeVar("Steps")  # a step, or several that make one batch

# Without this grain cuts the traceback of what reading raises and notes on it a flag that we do not have. It ignores
# `grain.config.update` where, as here, absl's flags are not parsed.
flags.FLAGS.set_default("grain_py_traceback_filtering", "off")


def iterate(
    read: Callable[[Steps, range], Batch],
    steps: Sequence[Steps],
    rows: range,
    *,
    threads: int,
    put: Callable[[Batch], Any] | None = None,
) -> grain.DatasetIterator[Any]:
    """The batch of each of `steps`, as `read` makes it of them and of rows; `threads` share each batch.

    `put` runs in the thread that draws.

    While a batch is drawn the next is begun; one thread is the thread that draws itself, which begins nothing. What
    `read` raises comes out as it is, where its batch is drawn.
    """
    parts = _cut(rows, min(threads, len(rows)))
    beside = len(parts) if len(parts) > 1 else 0
    options = grain.ReadOptions(num_threads=beside, prefetch_buffer_size=beside)
    batches = grain.MapDataset.source(_Parts(read, steps, parts)).to_iter_dataset(options)
    if beside:
        batches = batches.batch(len(parts), batch_fn=_joined)
    return iter(batches if put is None else batches.map(put))


class _Parts(Generic[Steps]):
    """What grain reads: element s × parts + k is the k-th part of the batch of the s-th step."""

    def __init__(self, read: Callable[[Steps, range], Batch], steps: Sequence[Steps], parts: list[range]) -> None:
        self._read, self._steps, self._parts = read, steps, parts

    def __len__(self) -> int:
        return len(self._steps) * len(self._parts)

    def __getitem__(self, number: int) -> Batch:
        step, part = divmod(number, len(self._parts))
        return self._read(self._steps[step], self._parts[part])


def _cut(rows: range, count: int) -> list[range]:
    edges = [rows.start + len(rows) * part // count for part in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def _joined(parts: Sequence[Batch]) -> Batch:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
