"""Makes batches of the examples of a source, and caches small deterministic sets."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.data import order, workers
from jaxlaunch.trainer.data.order import Indices
from jaxlaunch.trainer.data.source import (
    Source,
    as_data_source,
    describe_definition,
    source_name,
    unreadable_example_error,
)
from jaxlaunch.trainer.data.workers import Item, RandomPolicy, Request
from jaxlaunch.trainer.errors import DataError, TrainerError

Array = npt.NDArray[Any]
Batch = dict[str, Array]
# A function of a raw record and, if it has a parameter `rng`, of a generator.
Example = Callable[..., Mapping[str, Any]]
# Checks a batch without weights, and may correct it. Returns the row of a bad example and the
# problem, or None.
Check = Callable[[Batch], tuple[int, str] | None]

RETURN_TYPE_RULE = "the task's example() must return a dict of arrays by name"
# A deterministic set of at most this size is decoded once and cached.
MAX_CACHE_BYTES = 64 * 2**20
# JAX narrows 64-bit dtypes on a device. Narrowing them here halves the bytes that are copied there.
NARROWED_DTYPES = {
    np.dtype(wide): np.dtype(wide.replace("64", "32")) for wide in ("int64", "uint64", "float64")
}


class UnusableExampleError(ValueError):
    """Raised for a record that `example()` cannot use. The message continues "example 7 has"."""


class ArraySpec(NamedTuple):
    """Shape and dtype that every example has under one key."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class ReadSettings(NamedTuple):
    """Settings for reading the examples of a run."""

    seed: int = 0
    purpose: int = order.TRAIN
    # None if unknown: then only the sources and tasks of this package count as deterministic.
    deterministic: bool | None = None
    check: Check | None = None


DEFAULT_SETTINGS = ReadSettings()
ExampleMethod = TypeVar("ExampleMethod", bound=Callable[..., Any])
# Functions that make a batch of examples, by the method that makes one example.
_BATCH_FUNCTIONS: dict[Callable[..., Any], Callable[[Any, Batch], Batch]] = {}


def register_batch_function(
    batch_function: Callable[[Any, Batch], Batch],
) -> Callable[[ExampleMethod], ExampleMethod]:
    """Register a function that makes B examples at once from a task and its records [B, ...].

    If the function cannot use a record, `example` is called for each one to report its index.
    """

    def register(example: ExampleMethod) -> ExampleMethod:
        _BATCH_FUNCTIONS[example] = batch_function
        return example

    return register


class Examples:
    """The examples of a source, `example(source[i])`. Errors name the source and the index.

    Threads may share an instance. Examples that may be random are made again for every batch, with
    the generators of their positions (trainer/data/order).
    """

    def __init__(
        self, source: Source, example: Example, settings: ReadSettings = DEFAULT_SETTINGS
    ) -> None:
        self._source, self._example, self._settings = as_data_source(source), example, settings
        source = self._source
        self._length = len(source)
        if not self._length:
            raise DataError(f"{source_name(source)} has no examples")
        self._source_takes_rng, self._task_takes_rng = source.takes_rng, order.takes_rng(example)
        is_ours = str(example.__module__).startswith("jaxlaunch.trainer.")
        is_deterministic = settings.deterministic
        if is_deterministic is None:
            is_deterministic = is_ours and not source.may_draw
        self._is_random = not is_deterministic
        seeds_source = self._is_random and source.may_draw and not self._source_takes_rng
        seeds_task = self._is_random and not (is_ours or self._task_takes_rng)
        # Whether the global generators are seeded before each example.
        self._is_seeded = seeds_source or seeds_task
        returns_state = seeds_task or self._task_takes_rng
        self._draws = RandomPolicy(settings.seed, settings.purpose, self._is_seeded, returns_state)
        self.array_specs = self._read_array_specs()
        self._batch_function: Callable[[Batch], Batch] | None = None
        if isinstance(example, types.MethodType) and is_deterministic and source.has_rows:
            batch_function = _BATCH_FUNCTIONS.get(example.__func__)
            self._batch_function = batch_function and partial(batch_function, example.__self__)
        example_bytes = sum(
            math.prod(spec.shape) * narrow_dtype(spec.dtype).itemsize
            for spec in self.array_specs.values()
        )
        is_small = self._length * example_bytes <= MAX_CACHE_BYTES
        is_cached = is_deterministic and self._batch_function is None and is_small
        self._cache = self._allocate_batch(self._length) if is_cached else None
        self._is_cached_N = np.zeros(self._length, bool)

    def __len__(self) -> int:
        return self._length

    def reader_threads(self, max_threads: int) -> int:
        """Return the number of threads that read: one per worker process, or up to `max_threads`.

        One thread is used with a cache, with seeded global generators, and for light sources,
        because threads that only run Python code would wait for each other.
        """
        if self._source.workers:
            return self._source.workers
        is_single = self._cache is not None or self._is_seeded or self._source.is_light
        return 1 if is_single else max_threads

    @property
    def note(self) -> str | None:
        """The reason why examples are read one at a time, with a hint, or None."""
        if not self._is_seeded or self._source.workers:
            return None
        return (
            f"{source_name(self._source)} may use random numbers, so its examples are read one at "
            "a time, each with seeded generators. To read them with data.threads in parallel, set "
            "data.deterministic: true if it uses none, or give it a parameter rng, which gets a "
            "numpy Generator, or set data.workers"
        )

    def read(self, index_B: Indices, position_B: Indices) -> Batch:
        """Return the examples with these indexes as arrays [B, ...] by key.

        The random numbers of each example are those of its position.
        """
        batch = self._read_batch(index_B, position_B)
        self._check_values(batch, index_B)
        return batch

    def describe_not_finite(self, index_B: Indices, position_B: Indices) -> str | None:
        """Describe the first of these examples with a non-finite number, or return None."""
        batch = self._read_batch(index_B, position_B)
        faults = [
            (fault, key) for key, array in batch.items() if (fault := first_not_finite(array))
        ]
        if not faults:
            return None
        (row, value), key = min(faults, key=lambda item: item[0][0])
        description = f"example {index_B[row]}, at position {position_B[row]}"
        suffix = self._describe_location()
        return f"{source_name(self._source)}: {description}, has {key} {value}{suffix}"

    def _read_batch(self, index_B: Indices, position_B: Indices) -> Batch:
        if self._batch_function is not None:
            # If this fails, examples are made one by one below, so that the error can name the
            # invalid example.
            with contextlib.suppress(UnusableExampleError):
                batch = self._batch_function(self._source.read_rows(index_B))
                specs = {key: (array.shape[1:], array.dtype) for key, array in batch.items()}
                is_narrow = not any(dtype in NARROWED_DTYPES for _, dtype in specs.values())
                if specs == self.array_specs and is_narrow:
                    return batch
        if self._cache is None:
            batch = self._allocate_batch(len(index_B))
            self._fill_rows(batch, range(len(index_B)), index_B.tolist(), position_B.tolist())
            return batch
        # Two threads may make the same example and write the same bytes. An example counts as
        # cached once it is complete.
        missing = np.unique(index_B[~self._is_cached_N[index_B]])
        self._fill_rows(self._cache, missing.tolist(), missing.tolist(), missing.tolist())
        self._is_cached_N[missing] = True
        return {key: array[index_B] for key, array in self._cache.items()}

    def _check_values(self, batch: Batch, index_B: Indices) -> None:
        if self._settings.check is not None and (fault := self._settings.check(batch)) is not None:
            row, problem = fault
            raise self._data_error(int(index_B[row]), problem)

    def _fill_rows(
        self, target: Batch, slots: Sequence[int], indexes: list[int], positions: list[int]
    ) -> None:
        items: Sequence[Item | None] = [None] * len(indexes)
        if self._source.workers:
            request = Request(*self._source.opener, self._draws, indexes, positions)
            items = workers.shared_workers(self._source.workers).read_items(request)
        for slot, index, position, item in zip(slots, indexes, positions, items, strict=True):
            example = self._make_example(index, position, item)
            self._check_array_specs(index, example)
            for key, value in example.items():
                target[key][slot] = value
                is_narrowed = value.dtype.kind in "iu" and value.dtype in NARROWED_DTYPES
                if is_narrowed and not np.array_equal(target[key][slot], value):
                    problem = f"too large for the {target[key].dtype} it becomes"
                    raise self._data_error(index, f"{key} {value.max()}, {problem}")

    def _check_array_specs(self, index: int, example: Batch) -> None:
        if example.keys() != self.array_specs.keys():
            keys, first_keys = (", ".join(sorted(names)) for names in (example, self.array_specs))
            raise self._data_error(index, f"the keys {{{keys}}}, the first {{{first_keys}}}")
        for key, value in example.items():
            shape, dtype = self.array_specs[key]
            if value.shape != shape:
                hint = "pad to one shape in the task's example()"
                hint = f"set data.size of a source of images, or {hint}" if key == "image" else hint
                raise self._data_error(index, f"{key} {value.shape}, the first {shape}; {hint}")
            if value.dtype != dtype:
                raise self._data_error(index, f"{key} of {value.dtype}, the first of {dtype}")

    def _make_example(self, index: int, position: int, item: Item | None = None) -> Batch:
        try:
            # A source or task with a parameter `rng` always gets a generator, even if it draws
            # nothing.
            takes_rng = self._source_takes_rng or self._task_takes_rng
            if item is None and not self._is_random and not takes_rng:
                example = self._example(self._source[index])
            else:
                example = self._draw_example(index, position, item)
            if not isinstance(example, Mapping):
                kind = user_code.describe_kind(example)
                raise UnusableExampleError(f"become {kind}; {RETURN_TYPE_RULE}")
            return {key: np.asarray(value) for key, value in example.items()}
        except TrainerError:
            raise
        except UnusableExampleError as error:
            raise self._data_error(index, str(error)) from error
        except (Exception, SystemExit) as error:
            location = self._describe_location()
            raise unreadable_example_error(self._source, index, error, location) from error

    def _draw_example(self, index: int, position: int, item: Item | None) -> Mapping[str, Any]:
        """Make an example with the random numbers of its position, or those of a worker."""
        entropy = order.example_entropy(self._settings.seed, self._settings.purpose, position)
        takes_rng = self._source_takes_rng or self._task_takes_rng
        rng = np.random.default_rng(entropy) if takes_rng else None
        generators: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if item is not None:
            rng = rng if item.rng is None else item.rng
            if item.state is not None:
                generators = order.restore_generators(item.state)
        elif self._is_seeded:
            generators = order.seed_generators(entropy)
        keywords = {"rng": rng} if self._task_takes_rng else {}
        with generators:
            raw = self._source.read_example(index, rng) if item is None else item.value
            return self._example(raw, **keywords)

    def _read_array_specs(self) -> dict[str, ArraySpec]:
        first_example = self._make_example(0, 0)
        if not first_example:
            raise self._data_error(0, f"no arrays; {RETURN_TYPE_RULE}")
        for key, value in first_example.items():
            if not isinstance(key, str):
                raise self._data_error(0, f"the key {key!r}, not text; {RETURN_TYPE_RULE}")
            if value.dtype.kind in "OSUMm":
                problem = f"{key} of {value.dtype}"
                raise self._data_error(0, f"{problem}; the task's example() must return numbers")
        if "weight" in first_example:
            reason = "which the batch reserves for the weight of each example"
            raise self._data_error(0, f"a key weight, {reason}; rename it")
        batch = {key: value[None].copy() for key, value in first_example.items()}
        self._check_values(batch, np.zeros(1, np.int64))
        return {key: ArraySpec(value.shape, value.dtype) for key, value in first_example.items()}

    def _data_error(self, index: int, problem: str) -> DataError:
        location = self._describe_location()
        return DataError(f"{source_name(self._source)}: example {index} has {problem}{location}")

    def _describe_location(self) -> str:
        """Return the place of the user's task, or else of the dataset, as a suffix of a message."""
        location = user_code.find_place(self._example)
        return f" ({location})" if location else describe_definition(self._source)

    def _allocate_batch(self, rows: int) -> Batch:
        return {
            key: np.empty((rows, *spec.shape), narrow_dtype(spec.dtype))
            for key, spec in self.array_specs.items()
        }


def first_not_finite(array: Array) -> tuple[int, Any] | None:
    """Return the first row with a non-finite number, and that number, or None."""
    try:
        positions = np.argwhere(~np.isfinite(array))
    except TypeError:
        # np.isfinite does not support the dtypes of some other libraries.
        return None
    if not len(positions):
        return None
    return (int(positions[0][0]) if array.ndim else 0), array[tuple(positions[0])]


def narrow_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype with which an array is copied to a device."""
    return NARROWED_DTYPES.get(dtype, dtype)
