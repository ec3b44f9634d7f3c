"""Examples of a source as arrays of one shape, stacked; small sets are read once and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.order import Indexes
from trainer.data.source import Source, called
from trainer.errors import DataError, StorageError, TrainerError

Array = npt.NDArray[Any]
Batch = dict[str, Array]
Example = Callable[[dict[str, Any]], Mapping[str, Any]]

KEEP_BYTES = 64 * 2**20  # a set that takes no more than this is decoded once and kept
TRIALS = 16  # examples made twice before a set is kept: what is drawn at random must not be frozen
# What JAX makes of 64 bits on a device, done here so that half as much is copied there.
NARROW = {np.dtype(wide): np.dtype(wide.replace("64", "32")) for wide in ("int64", "uint64", "float64")}


class Form(NamedTuple):
    """What every example has under one key."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Examples:
    """`example(source[i])` for many i at once. Raises DataError that names source and index; threads may share one."""

    def __init__(self, source: Source, example: Example) -> None:
        self._source, self._example = source, example
        self._length = len(source)
        if not self._length:
            raise DataError(f"{called(source)} has no examples")
        self._forms = self._first()
        self._kept = self._allocated(self._length) if self._bytes() <= KEEP_BYTES and self._repeats() else None
        self._is_kept = np.zeros(self._length, bool)

    def __len__(self) -> int:
        return self._length

    def threads(self, most: int) -> int:
        """How many to read with, of `most`: copying what is kept gains nothing from a second."""
        return most if self._kept is None else 1

    def read(self, index_B: Indexes) -> Batch:
        """Examples under these indexes, stacked in their order: key -> [B, ...]."""
        if self._kept is None:
            batch = self._allocated(len(index_B))
            for slot, index in enumerate(index_B.tolist()):
                self._put(batch, slot, index)
            return batch
        # Two threads may make the same example and write the same bytes twice; it counts as kept when it is whole.
        for index in np.unique(index_B[~self._is_kept[index_B]]).tolist():
            self._put(self._kept, index, index)
            self._is_kept[index] = True
        return {key: array[index_B] for key, array in self._kept.items()}

    def _put(self, target: Batch, slot: int, index: int) -> None:
        for key, value in self._checked(index).items():
            target[key][slot] = value
            if value.dtype.kind in "iu" and value.dtype in NARROW and not np.array_equal(target[key][slot], value):
                raise self._fault(index, f"{key} {value.max()}, too large for the {target[key].dtype} it becomes")

    def _checked(self, index: int) -> Batch:
        example = self._made(index)
        if example.keys() != self._forms.keys():
            raise self._fault(index, f"the keys {_listed(example)}, the first {_listed(self._forms)}")
        for key, value in example.items():
            shape, dtype = self._forms[key]
            if value.shape != shape:
                hint = "pad to one shape in the task's example()"
                raise self._fault(index, f"{key} {value.shape}, the first {shape}; {hint}")
            if value.dtype != dtype:
                raise self._fault(index, f"{key} of {value.dtype}, the first of {dtype}")
        return example

    def _made(self, index: int) -> Batch:
        try:
            made = self._example(self._source[index])
            return {key: np.asarray(value) for key, value in made.items()}
        except TrainerError:
            raise
        except Exception as error:
            kind = StorageError if _is_storage(error) else DataError
            raise kind(
                f"{called(self._source)}: example {index} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _first(self) -> dict[str, Form]:
        forms = {key: Form(value.shape, value.dtype) for key, value in self._made(0).items()}
        for key, form in forms.items():
            if form.dtype.kind in "OSUMm":
                raise self._fault(0, f"{key} of {form.dtype}; the task's example() must return numbers")
        if "weight" in forms:
            raise self._fault(0, "a key weight, which the batch uses for what an example counts; name it otherwise")
        return forms

    def _fault(self, index: int, what: str) -> DataError:
        return DataError(f"{called(self._source)}: example {index} has {what}")

    def _repeats(self) -> bool:
        """Whether a sample comes out equal twice; that of a set which draws at random does not.

        An example that cannot be read is no reason to end here: it is raised with its batch.
        """
        for index in np.linspace(0, self._length - 1, min(TRIALS, self._length), dtype=int).tolist():
            try:
                once, again = ({key: value.tobytes() for key, value in self._made(index).items()} for _ in range(2))
            except TrainerError:
                return False
            if once != again:
                return False
        return True

    def _allocated(self, rows: int) -> Batch:
        return {key: np.empty((rows, *form.shape), _narrow(form.dtype)) for key, form in self._forms.items()}

    def _bytes(self) -> int:
        return self._length * sum(
            int(np.prod(form.shape, dtype=np.int64)) * _narrow(form.dtype).itemsize for form in self._forms.values()
        )


def _narrow(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return NARROW.get(dtype, dtype)


def _listed(keys: Mapping[str, Any]) -> str:
    return "{" + ", ".join(sorted(keys)) + "}"


def _is_storage(error: Exception) -> bool:
    """Whether the disk or the network failed, so that trying again may help; a missing file stays missing."""
    lasting = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, lasting)
