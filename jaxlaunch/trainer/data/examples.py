"""Examples of a source as arrays of one shape, stacked; small deterministic sets are read once and cached."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data import example_rng, workers
from jaxlaunch.trainer.data.messages import Draws, Item, Request
from jaxlaunch.trainer.data.order import Indices
from jaxlaunch.trainer.data.source import DataSource, Source, as_data_source, name_of
from jaxlaunch.trainer.errors import DataError, StorageError, TrainerError

Array = npt.NDArray[Any]
Batch = dict[str, Array]
Example = Callable[..., Mapping[str, Any]]  # of a raw record and, if it has a parameter `rng`, a generator
# Judges a batch without its weights, which it may mend: the row of an example and what is wrong with it, or None.
Check = Callable[[Batch], tuple[int, str] | None]

BY_NAME = "the task's example() must return a dict of arrays by name"
CACHE_BYTES = 64 * 2**20  # a deterministic set that takes no more than this is decoded once and cached
# What JAX makes of 64 bits on a device, done here so that half as much is copied there.
NARROW = {np.dtype(wide): np.dtype(wide.replace("64", "32")) for wide in ("int64", "uint64", "float64")}


class Unusable(ValueError):
    """What `example()` finds wrong with a record, to follow "example 7 has": "label 3.7, not a whole number"."""


class Form(NamedTuple):
    """Shape and dtype that every example has under one key."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Reading(NamedTuple):
    """How the examples of a run are read, beside from where."""

    seed: int = 0
    purpose: int = example_rng.TRAIN
    deterministic: bool | None = None  # None: only this program's own sources and tasks are known to be
    check: Check | None = None


ANYHOW = Reading()
Marked = TypeVar("Marked", bound=Callable[..., Any])
# The functions that make many examples at once, by the method that makes one.
_MANY: dict[Callable[..., Any], Callable[[Any, Batch], Batch]] = {}


def many_by(many: Callable[[Any, Batch], Batch]) -> Callable[[Marked], Marked]:
    """Name, for a task's `example`, the function of the task and of records [B, ...] that makes B examples at once.

    It raises Unusable where it cannot; `example` then says of which record that is.
    """

    def register(example: Marked) -> Marked:
        _MANY[example] = many
        return example

    return register


class Examples:
    """`example(source[i])` for many i at once. Raises DataError that names source and index; threads may share one.

    Examples that may be drawn at random are made anew each time, by their own generators (trainer/data/example_rng).
    """

    def __init__(self, source: Source, example: Example, reading: Reading = ANYHOW) -> None:
        self._source, self._example, self._reading = as_data_source(source), example, reading
        source = self._source
        self._length = len(source)
        if not self._length:
            raise DataError(f"{name_of(source)} has no examples")
        self._takes_rng = source.takes_rng, example_rng.takes_rng(example)
        ours = not source.may_draw, str(example.__module__).startswith("jaxlaunch.trainer.")
        is_known = all(ours) if reading.deterministic is None else reading.deterministic
        self._is_drawn = not is_known
        is_seeded = [self._is_drawn and not (a or b) for a, b in zip(ours, self._takes_rng, strict=True)]
        self._is_seeded = any(is_seeded)
        self._draws = Draws(reading.seed, reading.purpose, self._is_seeded, is_seeded[1] or self._takes_rng[1])
        self.forms = self._first()
        self._many: Callable[[Batch], Batch] | None = None
        if isinstance(example, types.MethodType) and is_known and source.has_rows:
            many = _MANY.get(example.__func__)
            self._many = None if many is None else partial(many, example.__self__)
        is_cached = is_known and self._many is None and self._bytes() <= CACHE_BYTES
        self._cache = self._allocated(self._length) if is_cached else None
        self._is_cached = np.zeros(self._length, bool)

    def __len__(self) -> int:
        return self._length

    def threads(self, most: int) -> int:
        """How many of `most` threads to read with: a cache, and the global generators, are one thread's at a time.

        One for each process that reads. One where an example takes longer to hand over than to read: two threads that
        do nothing but Python would wait for each other.
        """
        if self._source.workers:
            return self._source.workers
        return most if self._cache is None and not self._is_seeded and not self._source.is_light else 1

    @property
    def note(self) -> str | None:
        """Why they are read one at a time, and how that ends; None where they are not."""
        if not self._is_seeded or self._source.workers:
            return None
        return (
            f"{name_of(self._source)} may use random numbers, so its examples are read one at a time, each with "
            "seeded generators. To read them with data.threads in parallel, set data.deterministic: true if it uses "
            "none, or give it a parameter rng, which gets a numpy Generator, or set data.workers"
        )

    def read(self, index_B: Indices, position_B: Indices) -> Batch:
        """Examples under these indexes, stacked in their order: key -> [B, ...]; drawn as at these positions."""
        batch = self._read(index_B, position_B)
        self._judge(batch, index_B)
        return batch

    def not_finite(self, index_B: Indices, position_B: Indices) -> str | None:
        """The first of these examples that holds what is no finite number, in a sentence; None where none does."""
        batch = self._read(index_B, position_B)
        found = [(*at, key) for key, array in batch.items() if (at := first_not_finite(array)) is not None]
        if not found:
            return None
        row, value, key = min(found, key=lambda each: each[0])
        position, index = int(position_B[row]), int(index_B[row])
        return f"{name_of(self._source)}: example {index}, at position {position}, has {key} {value}{self._place()}"

    def _read(self, index_B: Indices, position_B: Indices) -> Batch:
        if (at_once := self._at_once(index_B)) is not None:
            return at_once
        if self._cache is None:
            batch = self._allocated(len(index_B))
            self._fill(batch, range(len(index_B)), index_B.tolist(), position_B.tolist())
            return batch
        # Two threads may make the same example and write the same bytes twice; it counts as cached once it is complete.
        missing = np.unique(index_B[~self._is_cached[index_B]])
        self._fill(self._cache, missing.tolist(), missing.tolist(), missing.tolist())
        self._is_cached[missing] = True
        return {key: array[index_B] for key, array in self._cache.items()}

    def _at_once(self, index_B: Indices) -> Batch | None:
        """All examples by one call; None where they cannot be, or one is odd: made one by one, that one is named."""
        if self._many is None:
            return None
        try:
            batch: Batch = self._many(self._source.rows(index_B))
        except Unusable:
            return None
        found = {key: Form(array.shape[1:], array.dtype) for key, array in batch.items()}
        return batch if found == self.forms and not any(form.dtype in NARROW for form in found.values()) else None

    def _judge(self, batch: Batch, index_B: Indices) -> None:
        if self._reading.check is not None and (found := self._reading.check(batch)) is not None:
            row, what = found
            raise self._fault(int(index_B[row]), what)

    def _fill(self, target: Batch, slots: Sequence[int], indexes: list[int], positions: list[int]) -> None:
        """Puts the examples into these slots; their items are read here, or by another process, all at once."""
        items: Sequence[Item | None] = [None] * len(indexes)
        if self._source.workers:
            request = Request(*self._source.opener, self._draws, indexes, positions)
            items = workers.shared(self._source.workers).items(request)
        for slot, index, position, item in zip(slots, indexes, positions, items, strict=True):
            self._put(target, slot, index, self._checked(index, position, item))

    def _put(self, target: Batch, slot: int, index: int, example: Batch) -> None:
        for key, value in example.items():
            target[key][slot] = value
            if value.dtype.kind in "iu" and value.dtype in NARROW and not np.array_equal(target[key][slot], value):
                raise self._fault(index, f"{key} {value.max()}, too large for the {target[key].dtype} it becomes")

    def _checked(self, index: int, position: int, item: Item | None) -> Batch:
        example = self._made(index, position, item)
        if example.keys() != self.forms.keys():
            raise self._fault(index, f"the keys {_listed(example)}, the first {_listed(self.forms)}")
        for key, value in example.items():
            shape, dtype = self.forms[key]
            if value.shape != shape:
                hint = "pad to one shape in the task's example()"
                hint = f"set data.size of a source of images, or {hint}" if key == "image" else hint
                raise self._fault(index, f"{key} {value.shape}, the first {shape}; {hint}")
            if value.dtype != dtype:
                raise self._fault(index, f"{key} of {value.dtype}, the first of {dtype}")
        return example

    def _made(self, index: int, position: int, item: Item | None = None) -> Batch:
        try:
            is_drawn = self._is_drawn or any(self._takes_rng)  # who takes a generator gets one, and may draw nothing
            if item is not None:
                made = self._finished(position, item)
            else:
                made = self._drawn(index, position) if is_drawn else self._example(self._source[index])
            if not isinstance(made, Mapping):
                raise Unusable(f"become {user_code.kind(made)}; {BY_NAME}")
            return {key: np.asarray(value) for key, value in made.items()}
        except TrainerError:
            raise
        except Unusable as error:
            raise self._fault(index, str(error)) from error
        except (Exception, SystemExit) as error:
            raise unreadable(self._source, index, error, self._place()) from error

    def _drawn(self, index: int, position: int) -> Mapping[str, Any]:
        """The example, its random numbers those of its position."""
        start = example_rng.entropy(self._reading.seed, self._reading.purpose, position)
        rng = np.random.default_rng(start) if any(self._takes_rng) else None
        of_example = {"rng": rng} if self._takes_rng[1] else {}
        with example_rng.seeded(start) if self._is_seeded else contextlib.nullcontext():
            return self._example(self._source.read_example(index, rng), **of_example)

    def _finished(self, position: int, item: Item) -> Mapping[str, Any]:
        """The example of an item that another process read, which draws on from where that left the generators."""
        rng: dict[str, Any] = {}
        if self._takes_rng[1]:
            start = example_rng.entropy(self._reading.seed, self._reading.purpose, position)
            rng["rng"] = np.random.default_rng(start) if item.rng is None else item.rng
        with contextlib.nullcontext() if item.state is None else example_rng.goes_on(item.state):
            return self._example(item.value, **rng)

    def _first(self) -> dict[str, Form]:
        first = self._made(0, 0)
        if not first or (odd := [key for key in first if not isinstance(key, str)]):
            what = f"the key {odd[0]!r}, not text" if first else "no arrays"
            raise self._fault(0, f"{what}; {BY_NAME}")
        forms = {key: Form(value.shape, value.dtype) for key, value in first.items()}
        for key, form in forms.items():
            if form.dtype.kind in "OSUMm":
                raise self._fault(0, f"{key} of {form.dtype}; the task's example() must return numbers")
        if "weight" in forms:
            raise self._fault(0, "a key weight, which the batch reserves for the weight of each example; rename it")
        self._judge({key: value[None].copy() for key, value in first.items()}, np.zeros(1, np.int64))
        return forms

    def _fault(self, index: int, what: str) -> DataError:
        return DataError(f"{name_of(self._source)}: example {index} has {what}{self._place()}")

    def _place(self) -> str:
        """Where a user defines what makes the examples, their task or else their dataset."""
        where = user_code.place(self._example)
        return f" ({where})" if where else _place_of(self._source)

    def _allocated(self, rows: int) -> Batch:
        return {key: np.empty((rows, *form.shape), narrow(form.dtype)) for key, form in self.forms.items()}

    def _bytes(self) -> int:
        return self._length * sum(
            int(np.prod(form.shape, dtype=np.int64)) * narrow(form.dtype).itemsize for form in self.forms.values()
        )


def first_not_finite(array: Array) -> tuple[int, Any] | None:
    """The first row with a number that is not finite, and that number; None where there is none."""
    try:
        wrong = np.argwhere(~np.isfinite(array))
    except TypeError:  # a dtype of another library that has no such numbers
        return None
    if not len(wrong):
        return None
    return (int(wrong[0][0]) if array.ndim else 0), array[tuple(wrong[0])]


def narrow(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What an array of this dtype is copied to a device as."""
    return NARROW.get(dtype, dtype)


def unreadable(source: DataSource, index: int, error: BaseException, place: str = "") -> DataError | StorageError:
    """What ends a run in which `error` was raised for example `index`: whose fault, and where in the user's files.

    `place` is said where the error came through none of them; by default it is that of the dataset.
    """
    fault = faults.unreadable(f"{name_of(source)}: example {index} cannot be read", error)
    where = user_code.raised_at(error)
    fault.args = (f"{fault}{f' ({where})' if where else place or _place_of(source)}",)
    return fault


def _place_of(source: DataSource) -> str:
    return f" ({source.place})" if source.place else ""


def _listed(keys: Mapping[str, Any]) -> str:
    return "{" + ", ".join(sorted(keys)) + "}"
