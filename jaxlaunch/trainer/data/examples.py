"""Batches of a source's examples, stacked from arrays of one shape; small deterministic sets are cached."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.data import order, workers
from jaxlaunch.trainer.data.order import Indices
from jaxlaunch.trainer.data.source import Source, as_data_source, describe_place, name_of, unreadable_example
from jaxlaunch.trainer.data.workers import Draws, Item, Request
from jaxlaunch.trainer.errors import DataError, TrainerError

Array = npt.NDArray[Any]
Batch = dict[str, Array]
# A function of a raw record and, if it has a parameter `rng`, of a generator.
Example = Callable[..., Mapping[str, Any]]
# Checks a batch without its weights, which it may correct. Returns the row of a bad example and the problem, or None.
Check = Callable[[Batch], tuple[int, str] | None]

BY_NAME = "the task's example() must return a dict of arrays by name"
# A deterministic set that is not larger than this is decoded once and cached.
CACHE_BYTES = 64 * 2**20
# JAX narrows 64-bit dtypes on a device. Narrowing them here halves the bytes that are copied there.
NARROW = {np.dtype(wide): np.dtype(wide.replace("64", "32")) for wide in ("int64", "uint64", "float64")}


class Unusable(ValueError):
    """A record that `example()` cannot use. The message continues "example 7 has": "label 3.7, not a whole number"."""


class Form(NamedTuple):
    """Shape and dtype that every example has under one key."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Reading(NamedTuple):
    """Settings for reading the examples of a run."""

    seed: int = 0
    purpose: int = order.TRAIN
    # None: only the sources and tasks of this package are known to be deterministic.
    deterministic: bool | None = None
    check: Check | None = None


DEFAULT = Reading()
Method = TypeVar("Method", bound=Callable[..., Any])
# Functions that make many examples at once, by the method that makes one.
_MANY: dict[Callable[..., Any], Callable[[Any, Batch], Batch]] = {}


def many_by(many: Callable[[Any, Batch], Batch]) -> Callable[[Method], Method]:
    """Register, for a task's `example`, a function of the task and of records [B, ...] that makes B examples at once.

    If the function cannot use a record, `example` is called for each record to report the index.
    """

    def register(example: Method) -> Method:
        _MANY[example] = many
        return example

    return register


class Examples:
    """Makes `example(source[i])` for many i at once, and raises DataError naming the source and the index.

    Threads may share an instance. Examples that may be random are made again for every batch, with the generators of
    their positions (trainer/data/order).
    """

    def __init__(self, source: Source, example: Example, reading: Reading = DEFAULT) -> None:
        self._source, self._example, self._reading = as_data_source(source), example, reading
        source = self._source
        self._length = len(source)
        if not self._length:
            raise DataError(f"{name_of(source)} has no examples")
        self._takes_rng = source.takes_rng, order.takes_rng(example)
        is_ours = not source.may_draw, str(example.__module__).startswith("jaxlaunch.trainer.")
        is_known = all(is_ours) if reading.deterministic is None else reading.deterministic
        self._is_drawn = not is_known
        is_seeded = [self._is_drawn and not (is_ours[part] or self._takes_rng[part]) for part in (0, 1)]
        self._is_seeded = any(is_seeded)
        self._draws = Draws(reading.seed, reading.purpose, self._is_seeded, is_seeded[1] or self._takes_rng[1])
        self.forms = self._read_forms()
        self._many: Callable[[Batch], Batch] | None = None
        if isinstance(example, types.MethodType) and is_known and source.has_rows and example.__func__ in _MANY:
            self._many = partial(_MANY[example.__func__], example.__self__)
        size_bytes = self._length * sum(
            int(np.prod(form.shape, dtype=np.int64)) * narrow(form.dtype).itemsize for form in self.forms.values()
        )
        is_cached = is_known and self._many is None and size_bytes <= CACHE_BYTES
        self._cache = self._allocate(self._length) if is_cached else None
        self._is_cached = np.zeros(self._length, bool)

    def __len__(self) -> int:
        return self._length

    def threads(self, most: int) -> int:
        """Return the number of threads to read with, at most `most` unless worker processes read.

        Each worker process needs a thread. One thread is used with a cache, with seeded global generators, and for
        light sources: threads that only run Python code would wait for each other.
        """
        if self._source.workers:
            return self._source.workers
        return most if self._cache is None and not self._is_seeded and not self._source.is_light else 1

    @property
    def note(self) -> str | None:
        """The reason why examples are read one at a time and how to change that, or None if they are not."""
        if not self._is_seeded or self._source.workers:
            return None
        return (
            f"{name_of(self._source)} may use random numbers, so its examples are read one at a time, each with "
            "seeded generators. To read them with data.threads in parallel, set data.deterministic: true if it uses "
            "none, or give it a parameter rng, which gets a numpy Generator, or set data.workers"
        )

    def read(self, index_B: Indices, position_B: Indices) -> Batch:
        """Return the examples with these indexes, drawn as at these positions: key -> [B, ...]."""
        batch = self._read(index_B, position_B)
        self._check(batch, index_B)
        return batch

    def not_finite(self, index_B: Indices, position_B: Indices) -> str | None:
        """Describe the first of these examples with a non-finite number, or return None."""
        batch = self._read(index_B, position_B)
        faults = [(*fault, key) for key, array in batch.items() if (fault := first_not_finite(array)) is not None]
        if not faults:
            return None
        row, value, key = min(faults, key=lambda fault: fault[0])
        position, index = int(position_B[row]), int(index_B[row])
        return f"{name_of(self._source)}: example {index}, at position {position}, has {key} {value}{self._place()}"

    def _read(self, index_B: Indices, position_B: Indices) -> Batch:
        if self._many is not None:
            # If this fails, examples are made one by one below, so that the error names the bad one.
            with contextlib.suppress(Unusable):
                batch = self._many(self._source.rows(index_B))
                forms = {key: Form(array.shape[1:], array.dtype) for key, array in batch.items()}
                if forms == self.forms and not any(form.dtype in NARROW for form in forms.values()):
                    return batch
        if self._cache is None:
            batch = self._allocate(len(index_B))
            self._fill(batch, range(len(index_B)), index_B.tolist(), position_B.tolist())
            return batch
        # Two threads may make the same example and write the same bytes. It counts as cached once it is complete.
        missing = np.unique(index_B[~self._is_cached[index_B]])
        self._fill(self._cache, missing.tolist(), missing.tolist(), missing.tolist())
        self._is_cached[missing] = True
        return {key: array[index_B] for key, array in self._cache.items()}

    def _check(self, batch: Batch, index_B: Indices) -> None:
        if self._reading.check is not None and (fault := self._reading.check(batch)) is not None:
            row, what = fault
            raise self._fault(int(index_B[row]), what)

    def _fill(self, target: Batch, slots: Sequence[int], indexes: list[int], positions: list[int]) -> None:
        items: Sequence[Item | None] = [None] * len(indexes)
        if self._source.workers:
            request = Request(*self._source.opener, self._draws, indexes, positions)
            items = workers.shared(self._source.workers).items(request)
        for slot, index, position, item in zip(slots, indexes, positions, items, strict=True):
            example = self._make(index, position, item)
            self._check_forms(index, example)
            for key, value in example.items():
                target[key][slot] = value
                if value.dtype.kind in "iu" and value.dtype in NARROW and not np.array_equal(target[key][slot], value):
                    raise self._fault(index, f"{key} {value.max()}, too large for the {target[key].dtype} it becomes")

    def _check_forms(self, index: int, example: Batch) -> None:
        if example.keys() != self.forms.keys():
            keys, first_keys = ("{" + ", ".join(sorted(keys)) + "}" for keys in (example, self.forms))
            raise self._fault(index, f"the keys {keys}, the first {first_keys}")
        for key, value in example.items():
            shape, dtype = self.forms[key]
            if value.shape != shape:
                hint = "pad to one shape in the task's example()"
                hint = f"set data.size of a source of images, or {hint}" if key == "image" else hint
                raise self._fault(index, f"{key} {value.shape}, the first {shape}; {hint}")
            if value.dtype != dtype:
                raise self._fault(index, f"{key} of {value.dtype}, the first of {dtype}")

    def _make(self, index: int, position: int, item: Item | None = None) -> Batch:
        try:
            # A source or task with a parameter `rng` always gets a generator, even if it draws nothing.
            if item is None and not self._is_drawn and not any(self._takes_rng):
                example = self._example(self._source[index])
            else:
                example = self._draw(index, position, item)
            if not isinstance(example, Mapping):
                raise Unusable(f"become {user_code.describe_kind(example)}; {BY_NAME}")
            return {key: np.asarray(value) for key, value in example.items()}
        except TrainerError:
            raise
        except Unusable as error:
            raise self._fault(index, str(error)) from error
        except (Exception, SystemExit) as error:
            raise unreadable_example(self._source, index, error, self._place()) from error

    def _draw(self, index: int, position: int, item: Item | None) -> Mapping[str, Any]:
        """Make an example with the random numbers of its position, continuing the generators of a worker's item."""
        start = order.example_entropy(self._reading.seed, self._reading.purpose, position)
        rng = np.random.default_rng(start) if any(self._takes_rng) else None
        if item is None:
            generators = order.seed_generators(start) if self._is_seeded else contextlib.nullcontext()
        else:
            rng = rng if item.rng is None else item.rng
            generators = contextlib.nullcontext() if item.state is None else order.restore_generators(item.state)
        keywords = {"rng": rng} if self._takes_rng[1] else {}
        with generators:
            return self._example(self._source.read_example(index, rng) if item is None else item.value, **keywords)

    def _read_forms(self) -> dict[str, Form]:
        first = self._make(0, 0)
        if not first or (odd := [key for key in first if not isinstance(key, str)]):
            what = f"the key {odd[0]!r}, not text" if first else "no arrays"
            raise self._fault(0, f"{what}; {BY_NAME}")
        forms = {key: Form(value.shape, value.dtype) for key, value in first.items()}
        for key, form in forms.items():
            if form.dtype.kind in "OSUMm":
                raise self._fault(0, f"{key} of {form.dtype}; the task's example() must return numbers")
        if "weight" in forms:
            raise self._fault(0, "a key weight, which the batch reserves for the weight of each example; rename it")
        self._check({key: value[None].copy() for key, value in first.items()}, np.zeros(1, np.int64))
        return forms

    def _fault(self, index: int, what: str) -> DataError:
        return DataError(f"{name_of(self._source)}: example {index} has {what}{self._place()}")

    def _place(self) -> str:
        """Return the place of the user's task, or else of the dataset, as a suffix of a message."""
        where = user_code.find_place(self._example)
        return f" ({where})" if where else describe_place(self._source)

    def _allocate(self, rows: int) -> Batch:
        return {key: np.empty((rows, *form.shape), narrow(form.dtype)) for key, form in self.forms.items()}


def first_not_finite(array: Array) -> tuple[int, Any] | None:
    """Return the first row with a non-finite number, and that number, or None."""
    try:
        wrong = np.argwhere(~np.isfinite(array))
    except TypeError:
        # A dtype of another library may have no such numbers.
        return None
    if not len(wrong):
        return None
    return (int(wrong[0][0]) if array.ndim else 0), array[tuple(wrong[0])]


def narrow(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype with which an array is copied to a device."""
    return NARROW.get(dtype, dtype)
