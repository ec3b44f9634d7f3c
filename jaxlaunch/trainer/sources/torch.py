"""Datasets as in PyTorch: a class, an object, a DataLoader. Torch is imported only if the user's module does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data import order
from jaxlaunch.trainer.data.source import DataSource, fingerprint_arguments
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.user_code import load


def source(path: str, args: Mapping[str, Any], *, shuffle: bool = False, workers: int | None = 0) -> MapStyle:
    """The dataset that `path`, a `module:name`, names: of a class with `args`, an object, or that of a DataLoader.

    `workers` processes read it; None: as many as the DataLoader has. Raises SpecError for what is none, and for an
    iterable one whose order is not stated, or that processes are to read.
    """
    found = load(path)
    with user_code.placed(found):
        built = _built(path, found, args)
        dataset = _dataset(path, built)
        if hasattr(dataset, "__getitem__"):
            asked = getattr(built, "num_workers", 0) if workers is None and dataset is not built else workers
            return MapStyle(path, args, dataset, user_code.place(found), asked or 0)
        if workers:
            raise SpecError(
                f"{path} is iterable: no example can be read without those before it, so {workers} processes would "
                "each read all of it. Leave data.workers out, or give the dataset a __getitem__"
            )
        if shuffle:
            raise SpecError(
                f"{path} is iterable: it has one order, its own, and no example can be read without those before it. "
                "Set data.shuffle: false to have it in that order; each process then reads all of it and keeps its own "
                "rows, and a run that resumes reads what it has seen again to skip it"
            )
        return Stream(path, args, dataset, user_code.place(found))


def _built(path: str, found: Any, args: Mapping[str, Any]) -> Any:
    """What the class or function `found` makes of `args`; an object as it is."""
    if not (isinstance(found, type) or callable(found) and not hasattr(found, "__len__")):
        if args:
            raise SpecError(f"{path} is {user_code.kind(found)}, not a class, so it takes no args; leave data.args out")
        return found
    try:
        return found(**args)
    except (Exception, SystemExit) as error:  # whatever the user's class raises
        given = f" with args {', '.join(args)}" if args else ""  # not their values, which may be secret
        raise faults.unreadable(f"{path}{given} cannot be built", error) from error


def _dataset(path: str, found: Any) -> Any:
    """`found`, or the dataset that it loads. Raises SpecError for a loader with ways of its own, and for no dataset."""
    if all(hasattr(found, key) for key in ("dataset", "batch_size", "sampler", "collate_fn")):
        sampler = type(found.sampler).__name__
        if sampler not in ("SequentialSampler", "RandomSampler", "_InfiniteConstantSampler"):
            raise SpecError(f"{path} uses a {sampler}; here the run's seed orders the examples: leave the sampler out")
        if not str(found.collate_fn.__module__).startswith("torch."):
            raise SpecError(f"{path} has a collate_fn of its own; make each example whole in its dataset's __getitem__")
        found = found.dataset
    by = "__getitem__" if hasattr(found, "__getitem__") or not hasattr(found, "__iter__") else "__iter__"
    if missing := [method for method in ("__len__", by) if not hasattr(found, method)]:
        raise SpecError(f"{path} has no {' and no '.join(missing)}; a map-style dataset has both")
    return found


class MapStyle(DataSource):
    """A map-style dataset: an item is a mapping, or a pair that becomes `image` and `label`.

    A dataset may draw at random: from the global generators, or from the numpy Generator that its `__getitem__` gets
    where that has a parameter `rng`.
    """

    may_draw = True
    # Asked once: the order of a run follows from it, on every process, and a dataset's may take long or grow.
    _length: int | None = None

    def __init__(self, path: str, args: Mapping[str, Any], dataset: Any, place: str, workers: int = 0) -> None:
        self.name, self.place, self.workers = path, place, workers
        self._args, self._dataset = dict(args), dataset
        self.opener = f"{source.__module__}:{source.__name__}", (path, self._args)
        self.takes_rng = hasattr(dataset, "__getitem__") and order.takes_rng(dataset.__getitem__)

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        try:
            self._length = len(self._dataset)
            return self._length
        except (TypeError, ValueError) as error:  # what Python says of a length that is not a whole number, or negative
            where = f" ({self.place})" if self.place else ""
            raise DataError(
                f"{self.name}: its __len__ must return the number of its examples: {error}{where}"
            ) from error

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        return _mapping(self._dataset.__getitem__(index, rng=rng) if self.takes_rng else self._dataset[index])

    def fingerprint(self) -> str:
        """Class, number of examples and digests of the arguments; not the content."""
        # Not the content: such classes often draw at random, and then no two readings are equal.
        return f"{self.name}, {len(self)} examples, {fingerprint_arguments(self._args)}"


class Stream(MapStyle):
    """An iterable dataset with a length, read in its own order; to read before the last example is to begin again."""

    def __init__(self, path: str, args: Mapping[str, Any], dataset: Any, place: str) -> None:
        super().__init__(path, args, dataset, place)
        self._lock, self._next = threading.Lock(), 0
        self._items: Iterator[Any] = iter(())

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        with self._lock:
            if index < self._next or not self._next:
                self._next, self._items = 0, self._begun()
            for item in self._items:
                self._next += 1
                if self._next > index:
                    return _mapping(item)
        raise IndexError(f"it ended after {self._next} examples, and its __len__ is {len(self)}")

    def _begun(self) -> Iterator[Any]:
        return iter(self._dataset)


def _mapping(item: Any) -> dict[str, Any]:
    """An item of a dataset by keys, tensors as arrays of the same memory where they can be."""
    if hasattr(item, "_asdict"):
        item = item._asdict()
    if isinstance(item, tuple | list) and len(item) == 2:
        item = {"image": item[0], "label": item[1]}
    if not isinstance(item, Mapping):
        raise TypeError(f"an item is a mapping or a pair (image, label), not {_described(item)}")
    return {str(key): _plain(value) for key, value in item.items()}


def _plain(value: Any) -> Any:
    """Arrays for tensors (`.numpy()`) and for images (`__array_interface__`); all else unchanged."""
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "numpy"):
        return value.numpy()
    return np.asarray(value) if hasattr(value, "__array_interface__") else value


def _described(item: Any) -> str:
    return f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
