"""Reads the batches of a source, as a function of the step, so that a reader has no state to save.

Example i of step s is at position p = s × B + i of an endless sequence: epoch p // N, index
shuffle(seed, epoch)(p mod N). Batches run across the ends of epochs, so each example occurs once
per epoch and none is dropped. A process reads a contiguous range of rows, so a step has the same
examples on any number of processes.

grain reads and prefetches; the order comes from trainer/data/order, because grain's shuffle takes
one index at a time. The elements of grain's dataset are parts of a batch and not examples, because
each element costs about 50 µs. All threads share every batch, so that a batch of slow rows is ready
sooner and fewer batches are in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar, overload

import grain
import numpy as np
from absl import flags

from jaxlaunch import regular_files
from jaxlaunch.trainer.data import order
from jaxlaunch.trainer.data.examples import (
    ArraySpec,
    Batch,
    Check,
    Example,
    Examples,
    ReadSettings,
    narrow_dtype,
)
from jaxlaunch.trainer.data.order import Indices
from jaxlaunch.trainer.data.source import Source, as_data_source

T = TypeVar("T")
# A step, or several steps that make one batch.
Steps = TypeVar("Steps")

# By default grain filters the tracebacks of read errors and adds a note on a flag that this program
# does not have. It ignores `grain.config.update` if absl's flags are not parsed, as here.
flags.FLAGS.set_default("grain_py_traceback_filtering", "off")


class Pipeline:
    """The rows of training batches that this process reads.

    Raises DataError if example 0 cannot be read.
    """

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
        settings = ReadSettings(seed, order.TRAIN, deterministic, check)
        self._examples = Examples(self._source, example, settings)
        self._batch, self._rows = batch, _check_contiguous(rows, batch)
        self._seed, self._shuffle = seed, shuffle
        self._prefetch, self._threads = prefetch, self._examples.reader_threads(threads)

    @property
    def array_specs(self) -> Mapping[str, ArraySpec]:
        """Shape and dtype of the arrays of every example, by key."""
        return self._examples.array_specs

    def batch_specs(self, count: int = 1) -> Mapping[str, ArraySpec]:
        """Return shape and dtype of the arrays of a global batch for `count` steps."""
        shape = (self._batch,) if count == 1 else (self._batch, count)
        return _batch_specs(self.array_specs, shape)

    @property
    def note(self) -> str | None:
        """A hint on how to read the examples faster, or None."""
        return self._examples.note

    def read_batch(self, step: int, count: int = 1) -> Batch:
        """Return this process's rows of `count` steps from `step` on, in the shape of `iterate`."""
        steps = [range(step, step + count)]
        batches = iterate_batches(self._read_rows, steps, self._rows, threads=self._threads)
        with contextlib.closing(batches):
            batch: Batch = next(batches)
        return batch

    def describe_not_finite(self, step: int) -> str | None:
        """Describe the first non-finite example of `step`, if possible one of this process."""
        for rows in (self._rows, range(self._batch)):
            index_B, position_B = self._row_indexes(step, rows), self._row_positions(step, rows)
            if fault := self._examples.describe_not_finite(index_B, position_B):
                return fault
        return None

    def example_ids(self, step: int) -> list[int]:
        """Return the indexes of this process's examples of `step`, in order."""
        ids: list[int] = self._row_indexes(step, self._rows).tolist()
        return ids

    @overload
    def iterate(self, spans: Sequence[range]) -> Prefetcher[Batch]: ...
    @overload
    def iterate(self, spans: Sequence[range], put: Callable[[Batch], T]) -> Prefetcher[T]: ...
    def iterate(
        self, spans: Sequence[range], put: Callable[[Batch], Any] | None = None
    ) -> Prefetcher[Any]:
        """Prefetch the batch of each span of steps; `get` waits with a time limit.

        The batch of a single step is key -> [rows, ...], that of several steps key -> [rows, steps,
        ...]. `put` is called on each batch in the prefetching thread, to send it to the device.
        """
        threads = self._threads
        batches = iterate_batches(self._read_rows, spans, self._rows, threads=threads, put=put)
        return Prefetcher(batches, ahead=self._prefetch)

    def _read_rows(self, steps: range, rows: range) -> Batch:
        index_BK = np.stack([self._row_indexes(step, rows) for step in steps], axis=1)
        position_BK = np.stack([self._row_positions(step, rows) for step in steps], axis=1)
        batch = self._examples.read(index_BK.reshape(-1), position_BK.reshape(-1))
        batch["weight"] = np.ones(index_BK.size, np.float32)
        shape = index_BK.shape if len(steps) > 1 else (len(rows),)
        return {key: array.reshape(*shape, *array.shape[1:]) for key, array in batch.items()}

    def _row_positions(self, step: int, rows: range) -> Indices:
        return np.arange(rows.start, rows.stop) + step * self._batch

    def _row_indexes(self, step: int, rows: range) -> Indices:
        start, stop = (step * self._batch + row for row in (rows.start, rows.stop))
        return self._source.example_indices(start, stop, seed=self._seed, shuffle=self._shuffle)


class Evaluation:
    """The rows of the evaluation set that this process reads, in order. May be iterated repeatedly.

    If the set has several parts, each batch belongs to one part. The last batch of a part is filled
    up with examples of weight 0, so that every process has the same number of batches of the same
    shape. If `batches` limits their number, each part gets a share in proportion to its size, and
    at least one batch.
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
        settings = ReadSettings(seed, order.EVAL, deterministic, check)
        self._examples = Examples(self.source, example, settings)
        self._batch, self._rows = batch, _check_contiguous(rows, batch)
        self._threads = self._examples.reader_threads(threads)
        whole = {None: range(len(self._examples))}
        parts: Mapping[Any, range] = self.source.evaluated_parts or whole
        counts = [-(-len(part) // batch) for part in parts.values()]
        if batches is not None:
            counts = _divide_batches(batches, counts)
        # The part of each batch, and the number of the batch in its part.
        self._batches: list[tuple[Any, range, int]] = []
        for (name, part), count in zip(parts.items(), counts, strict=True):
            self._batches += ((name, part, number) for number in range(count))

    def __len__(self) -> int:
        """Return the number of batches in one pass."""
        return len(self._batches)

    @property
    def batch_parts(self) -> list[str | None]:
        """The part of each batch, None for a set without parts."""
        return [name for name, _, _ in self._batches]

    def __iter__(self) -> Prefetcher[Batch]:
        return self.iterate()

    @overload
    def iterate(self) -> Prefetcher[Batch]: ...
    @overload
    def iterate(self, put: Callable[[Batch], T]) -> Prefetcher[T]: ...
    def iterate(self, put: Callable[[Batch], Any] | None = None) -> Prefetcher[Any]:
        """Prefetch one pass, with `put` as in Pipeline.iterate."""
        numbers, threads = range(len(self)), self._threads
        batches = iterate_batches(self._read_rows, numbers, self._rows, threads=threads, put=put)
        return Prefetcher(batches, ahead=1)

    def batch_specs(self) -> Mapping[str, ArraySpec]:
        """Return shape and dtype of the arrays of a global batch."""
        return _batch_specs(self._examples.array_specs, (self._batch,))

    def example_indices(self, number: int) -> Indices:
        """Return the indexes of all examples of a batch, [B], including those that fill it up."""
        return self._locate_rows(number, range(self._batch))[1]

    def _locate_rows(self, number: int, rows: range) -> tuple[range, Indices, Indices]:
        """Return the part of a batch, and the indexes and positions of its `rows`.

        Positions beyond the end of the part wrap around to its first indexes.
        """
        _, part, batch_number = self._batches[number]
        position_B = batch_number * self._batch + np.arange(rows.start, rows.stop)
        # Fill up with real examples, because a model may produce NaN for zeros, and 0 × NaN is NaN.
        return part, part.start + position_B % len(part), position_B

    def _read_rows(self, number: int, rows: range) -> Batch:
        part, index_B, position_B = self._locate_rows(number, rows)
        # The position is the index, so that every evaluation draws the same random numbers.
        batch = self._examples.read(index_B, index_B)
        batch["weight"] = (position_B < len(part)).astype(np.float32)
        return batch


def _batch_specs(
    example_specs: Mapping[str, ArraySpec], batch_shape: tuple[int, ...]
) -> Mapping[str, ArraySpec]:
    specs = {
        key: ArraySpec((*batch_shape, *spec.shape), narrow_dtype(spec.dtype))
        for key, spec in example_specs.items()
    }
    return specs | {"weight": ArraySpec(batch_shape, np.dtype(np.float32))}


def _divide_batches(batches: int, capacities: Sequence[int]) -> list[int]:
    """Divide batches among parts: at least one each, the others in proportion to `capacities`."""
    extra_batches = max(0, batches - len(capacities))
    extra_capacity = max(1, sum(capacities) - len(capacities))
    counts = [min(count, 1 + extra_batches * (count - 1) // extra_capacity) for count in capacities]
    for part in sorted(range(len(capacities)), key=lambda part: -capacities[part]):
        # Give the batches that rounding left over to the largest parts first.
        counts[part] += min(capacities[part] - counts[part], max(0, batches - sum(counts)))
    return counts


def _check_contiguous(rows: range, batch: int) -> range:
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= batch:
        raise ValueError(f"rows {rows} are not a contiguous part of a batch of {batch}")
    return rows


# --- reading ahead --------------------------------------------------------------------------------


def iterate_batches(
    read: Callable[[Steps, range], Batch],
    steps: Sequence[Steps],
    rows: range,
    *,
    threads: int,
    put: Callable[[Batch], Any] | None = None,
) -> grain.DatasetIterator[Any]:
    """Iterate over `read(step, rows)` for each of `steps`, with `threads` that share each batch.

    Several threads read the next batch while one is consumed; a single thread is the consuming
    thread itself, which also calls `put`. The exceptions of `read` are raised unchanged where the
    batch is consumed.
    """
    part_count = min(threads, len(rows))
    edges = [rows.start + len(rows) * part // part_count for part in range(part_count + 1)]
    parts = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    prefetched = part_count if part_count > 1 else 0
    options = grain.ReadOptions(num_threads=prefetched, prefetch_buffer_size=prefetched)

    def read_part(number: int) -> Batch:
        """Read part k of the batch of step s, which is element s × parts + k of the dataset."""
        step, part = divmod(number, part_count)
        return read(steps[step], parts[part])

    def join_parts(batches: Sequence[Batch]) -> Batch:
        return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}

    numbers = grain.MapDataset.range(len(steps) * part_count)
    batches = numbers.map(read_part).to_iter_dataset(options)
    if prefetched:
        batches = batches.batch(part_count, batch_fn=join_parts)
    return iter(batches if put is None else batches.map(put))


class Prefetcher(Iterator[T]):
    """An iterator whose thread prefetches the next `ahead` items of `batches`.

    The consumer may wait with a time limit, which grain does not support. `get` and `next` raise
    the exceptions of `batches` in order, and an exception ends the iteration. Like grain's threads,
    this one makes an exiting interpreter wait for the read in progress; the trainer therefore exits
    with os._exit.
    """

    def __init__(self, batches: grain.DatasetIterator[T], *, ahead: int) -> None:
        self._batches, self._ahead = batches, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data-prefetch")
        self._futures: deque[Future[T]] = deque()
        self._submit_reads(ahead)

    def get(self, timeout_s: float | None = None) -> T | None:
        """Return the next batch, or None if it is not ready within `timeout_s`.

        Raises StopIteration after the last batch, and the exceptions of reading.
        """
        self._submit_reads(max(self._ahead, 1))
        future = self._futures[0]
        if not future.done() and wait([future], timeout_s).not_done:
            return None
        # A future that raises stays first, so that the next call raises again.
        batch = future.result()
        self._futures.popleft()
        self._submit_reads(self._ahead)
        return batch

    def __next__(self) -> T:
        batch = self.get()
        assert batch is not None, "a wait without a limit ends with a batch"
        return batch

    def close(self) -> None:
        """Stop reading after the batch in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._batches.close()

    def _submit_reads(self, count: int) -> None:
        while len(self._futures) < count:
            self._futures.append(self._thread.submit(next, self._batches))


class ExampleLog:
    """A log of the examples that a process used, `examples/process-N.jsonl` in the run folder.

    Each step has a line, `{"step": 7, "ids": [3, 1, 4]}`; the ids are indexes of the source, in the
    order of the rows. A run that resumes at step s first drops the lines of s and later steps, also
    from the files of processes that no longer exist. Raises OSError if the folder is not writable.
    """

    def __init__(
        self, folder: str | Path, process: int, start_step: int, *, processes: int
    ) -> None:
        folder = Path(folder) / "examples"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"process-{process}.jsonl"
        path.touch()
        _drop_steps(path, start_step)
        if process == 0:
            for other_path in folder.glob("process-*.jsonl"):
                match = re.fullmatch(r"process-(\d+)\.jsonl", other_path.name)
                if match and int(match[1]) >= processes:
                    _drop_steps(other_path, start_step)
        # `close` closes it.
        self._file = open(path, "a", opener=regular_files.open_regular)  # noqa: SIM115

    def write_step(self, step: int, ids: list[int]) -> None:
        """Append the ids of `step` and flush, so that a killed process leaves whole lines."""
        self._file.write(json.dumps({"step": step, "ids": ids}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _drop_steps(path: Path, start_step: int) -> None:
    """Truncate the file before its first line that is incomplete or of `start_step` or later."""
    size = 0
    with open(path, "rb+", opener=regular_files.open_regular) as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= start_step:
                break
            size += len(line)
        file.truncate(size)
