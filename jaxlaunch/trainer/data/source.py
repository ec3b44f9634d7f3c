"""The interface of datasets: random access, a length and a fingerprint.

Users implement `Source`. The trainer reads a `DataSource`, whose optional features are methods with
defaults; `as_data_source` adapts the source of a user where it is opened.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data import order
from jaxlaunch.trainer.data.order import Indices, example_indices
from jaxlaunch.trainer.errors import DataError, StorageError

Split = Literal["train", "eval"]
"""A split of the data: the examples of the training, or those held out for evaluation."""
SPLITS: tuple[Split, Split] = ("train", "eval")
# Number of hexadecimal digits of the digest of an argument.
DIGEST_DIGITS = 12
_ARGUMENTS_MARK = "args sha256 "


class Source:
    """The interface of a dataset, which a task's `source` returns.

    It has examples with the indexes 0 to len − 1, and each can be read at any time, in any
    order. A source of your own inherits from this class. A class that has these methods
    without inheriting them also works.

    A source may also have a `name`, one or two words that error messages use for it (by default its
    class), and `is_light`, which is true if one thread reads faster than several.

    **Example:**

    ```python
    import jaxlaunch
    import numpy as np


    class Squares(jaxlaunch.Source):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return {"x": np.float32(index), "y": np.float32(index**2)}

        def fingerprint(self):
            return "the squares of 0 to 99"


    assert Squares()[3]["y"] == 9
    ```
    """

    name: str = ""
    is_light: bool = False

    def __len__(self) -> int:
        """Return the number of examples."""
        raise NotImplementedError

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Return the stored example with this index, a dict by name.

        The task's `example` turns it into arrays. Several threads call this method at the same
        time.
        """
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return the identity of the data in one readable line.

        It stays the same as long as the examples and their order do. A run that resumes with
        different data ends with exit code 65.
        """
        raise NotImplementedError


class DataSource(Source):
    """The interface through which the trainer reads a source.

    Attributes:
        takes_rng: Whether `__getitem__` has a parameter `rng`, a numpy Generator from which this
            read of the example draws.
        may_draw: Whether an example may differ each time it is read.
        workers: Number of processes that may read the examples, 0 for none. Each calls `opener` to
            open the source.
        opener: Name of the function that opens the source, `module:function`, and its arguments.
        has_rows: Whether `read_rows` is implemented.
        is_user_defined: Whether a user has written the class of the source.
        place: Where a user's dataset is defined, such as "data.py:12".
        notes: Sentences that a run prints about the data when it starts.
    """

    takes_rng: bool = False
    may_draw: bool = False
    workers: int = 0
    opener: tuple[str, tuple[Any, ...]]
    has_rows: bool = False
    is_user_defined: bool = False
    place: str = ""
    notes: Sequence[str] = ()

    def read_example(self, index: int, rng: np.random.Generator | None) -> dict[str, Any]:
        """Return the example with this index, drawn with `rng` if the source takes it."""
        if rng is None or not self.takes_rng:
            return self[index]
        example: dict[str, Any] = self.__getitem__(index, rng=rng)  # type: ignore[call-arg]
        return example

    def read_rows(self, index_B: Indices) -> dict[str, npt.NDArray[Any]]:
        """Return the stacked values of `self[index]` by key, [B, ...], as a copy."""
        raise NotImplementedError

    def example_indices(self, start: int, stop: int, *, seed: int, shuffle: bool) -> Indices:
        """Return the indexes at positions `start` to `stop - 1` of the endless sequence."""
        return example_indices(start, stop, length=len(self), seed=seed, shuffle=shuffle)

    def epochs_by_part(self, positions: int) -> dict[str, float]:
        """Return the number of epochs of each part in the first `positions`, by name."""
        return {}

    @property
    def evaluated_parts(self) -> Mapping[str, range]:
        """The indexes of each part by name, if the source has several parts."""
        return {}

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata that `launcher prepare` stored with the data, such as the class names."""
        return {}

    def locate_example(self, index: int) -> str | None:
        """Return the file of an example and the place in it, or None if it is unknown."""
        return None

    def baseline_metrics(self, held_out: DataSource | None) -> Mapping[str, float]:
        """Return metrics of baseline models on `held_out`, which evaluations also report."""
        return {}


class DerivedSource(DataSource):
    """A source with examples derived from another source, whose fingerprint it has."""

    def __init__(self, source: Source) -> None:
        self._source, self.name = as_data_source(source), source_name(source)
        self.notes = self._source.notes

    def __len__(self) -> int:
        return len(self._source)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the underlying source."""
        return self._source.metadata

    def fingerprint(self) -> str:
        """Return the fingerprint of the underlying source."""
        return self._source.fingerprint()


@runtime_checkable
class _SourceMethods(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def fingerprint(self) -> str: ...


class _UserSource(DataSource):
    """Adapter of a user's source, whose examples may be random."""

    may_draw = is_user_defined = True

    def __init__(self, source: _SourceMethods) -> None:
        # A source that does not inherit from Source may lack `name` and `is_light`.
        self._source, self.name = source, str(getattr(source, "name", "") or type(source).__name__)
        self.is_light = bool(getattr(source, "is_light", False))
        self.takes_rng = order.takes_rng(source.__getitem__)

    @functools.cached_property
    def _length(self) -> int:
        # The length is read once, because it determines the order of the examples on every process,
        # and a user's __len__ may be slow or change.
        return len(self._source)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, **rng: np.random.Generator) -> dict[str, Any]:
        return self._source.__getitem__(index, **rng)

    def fingerprint(self) -> str:
        """Return the fingerprint of the user's source."""
        return self._source.fingerprint()


def is_source(value: object) -> TypeGuard[Source]:
    """Return whether an object has the methods of a source, inherited or not."""
    return isinstance(value, _SourceMethods)


def as_data_source(source: Source) -> DataSource:
    """Return the source as a DataSource, adapting the source of a user."""
    return source if isinstance(source, DataSource) else _UserSource(source)


def source_name(source: Source) -> str:
    """Return the name of a source in error messages."""
    return str(source.name or type(source).__name__)


def describe_definition(source: DataSource) -> str:
    """Return the place of a user's dataset as the suffix of a message, or an empty string."""
    return f" ({source.place})" if source.place else ""


def unreadable_example_error(
    source: DataSource, index: int, error: BaseException, place: str = ""
) -> DataError | StorageError:
    """Return the error that ends a run after `error` was raised while an example was read.

    The message ends with the line of user code that raised `error`, or else with `place`, whose
    default is the definition of the dataset.
    """
    location = user_code.error_place(error)
    suffix = f" ({location})" if location else place or describe_definition(source)
    read_error = faults.read_error(f"{source_name(source)}: example {index} cannot be read", error)
    return type(read_error)(f"{read_error}{suffix}")


# --- arguments of a user's dataset ----------------------------------------------------------------
#
# Checkpoints, logs and verdicts have more readers than the job, and an argument may be a secret
# token. Therefore only a digest of each value is stored.


def fingerprint_arguments(args: Mapping[str, Any]) -> str:
    """Return a text that identifies the arguments without containing their values."""
    if args:
        return f"{_ARGUMENTS_MARK}{json.dumps(dict(_digest_arguments(args)), sort_keys=True)}"
    return "args {}"


def changed_arguments(old_fingerprint: Any, new_fingerprint: Any) -> list[str]:
    """Return the keys whose values differ between two fingerprints, with dots for nested keys."""
    digests: list[dict[str, str]] = []
    for fingerprint in (old_fingerprint, new_fingerprint):
        match = re.search(rf"{_ARGUMENTS_MARK}(\{{[^{{}}]*\}})", str(fingerprint))
        digests.append(json.loads(match[1]) if match else {})
    old, new = digests
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _digest_arguments(args: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in args.items():
        if isinstance(value, Mapping) and value:
            yield from _digest_arguments(value, f"{prefix}{key}.")
        else:
            text = json.dumps([f"{prefix}{key}", value], sort_keys=True, default=repr)
            digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
            yield f"{prefix}{key}", digest[:DIGEST_DIGITS]
