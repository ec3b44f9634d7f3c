"""Sources of PyTorch datasets. Torch is imported only if the user's module imports it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data import order
from jaxlaunch.trainer.data.source import (
    DataSource,
    Split,
    describe_definition,
    fingerprint_arguments,
)
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.spec import Torch, TrainSpec


def open_source(data: Torch, split: Split, spec: TrainSpec | None = None) -> MapDataset | None:
    """Open the dataset of a split, or None if the job sets no eval_dataset or eval_args."""
    if split == "train":
        return open_dataset(data.dataset, data.args, shuffle=data.shuffle, workers=data.workers)
    if data.eval_dataset is None and data.eval_args is None:
        return None
    dataset, args = data.eval_dataset or data.dataset, data.eval_args or {}
    return open_dataset(dataset, args, workers=data.workers)


def open_dataset(
    path: str, args: Mapping[str, Any], *, shuffle: bool = False, workers: int | None = 0
) -> MapDataset:
    """Open the dataset `path`, which is the `module:name` of an object, or of a class to call.

    Args:
        path: Name of the object, or of the class or function.
        args: Arguments with which the class or function is called.
        shuffle: Whether the job shuffles the examples.
        workers: Number of processes that read the dataset; None for the workers of the DataLoader.

    Raises SpecError for other objects, and for an iterable dataset with shuffling or workers.
    """
    target = user_code.load_object(path)
    with user_code.append_place(target):
        built = _build_dataset(path, target, args)
        dataset = _find_dataset(path, built)
        if hasattr(dataset, "__getitem__"):
            if workers is None and dataset is not built:
                workers = getattr(built, "num_workers", 0)
            return MapDataset(path, args, dataset, user_code.find_place(target), workers or 0)
        if workers:
            raise SpecError(
                f"{path} is iterable: no example can be read without those before it, so {workers} "
                "processes would each read all of it. Leave data.workers out, or give the dataset "
                "a __getitem__"
            )
        if shuffle:
            raise SpecError(
                f"{path} is iterable: it has one order, its own, and no example can be read "
                "without those before it. Set data.shuffle: false to have it in that order; each "
                "process then reads all of it and keeps its own rows, and a run that resumes reads "
                "what it has seen again to skip it"
            )
        return IterableDataset(path, args, dataset, user_code.find_place(target))


def _build_dataset(path: str, target: Any, args: Mapping[str, Any]) -> Any:
    """Call a class or function with `args`, or return an object unchanged."""
    if not (isinstance(target, type) or callable(target) and not hasattr(target, "__len__")):
        if args:
            problem = f"is {user_code.describe_kind(target)}, not a class, so it takes no args"
            raise SpecError(f"{path} {problem}; leave data.args out")
        return target
    try:
        return target(**args)
    except (Exception, SystemExit) as error:
        # The user's class may raise anything. The values of arguments may be secret, so only their
        # names are printed.
        names = f" with args {', '.join(args)}" if args else ""
        raise faults.read_error(f"{path}{names} cannot be built", error) from error


def _find_dataset(path: str, built: Any) -> Any:
    if all(hasattr(built, key) for key in ("dataset", "batch_size", "sampler", "collate_fn")):
        sampler = type(built.sampler).__name__
        if sampler not in ("SequentialSampler", "RandomSampler", "_InfiniteConstantSampler"):
            raise SpecError(
                f"{path} uses a {sampler}; here the run's seed orders the examples: leave the "
                "sampler out"
            )
        if not str(built.collate_fn.__module__).startswith("torch."):
            hint = "make each example whole in its dataset's __getitem__"
            raise SpecError(f"{path} has a collate_fn of its own; {hint}")
        built = built.dataset
    is_iterable = hasattr(built, "__iter__") and not hasattr(built, "__getitem__")
    reader = "__iter__" if is_iterable else "__getitem__"
    if missing := [method for method in ("__len__", reader) if not hasattr(built, method)]:
        raise SpecError(f"{path} has no {' and no '.join(missing)}; a map-style dataset has both")
    return built


class MapDataset(DataSource):
    """A map-style dataset, whose items are mappings, or pairs that become `image` and `label`.

    A dataset may draw from the global generators, or from a numpy Generator if its `__getitem__`
    has a parameter `rng`.
    """

    may_draw = True

    def __init__(
        self, path: str, args: Mapping[str, Any], dataset: Any, place: str, workers: int = 0
    ) -> None:
        self.name, self.place, self.workers = path, place, workers
        self._args, self._dataset = dict(args), dataset
        self.opener = f"{__name__}:{open_dataset.__name__}", (path, self._args)
        self.takes_rng = hasattr(dataset, "__getitem__") and order.takes_rng(dataset.__getitem__)

    @functools.cached_property
    def _length(self) -> int:
        # The length is read once, because it determines the order of the examples on every process,
        # and a user's __len__ may be slow or change.
        try:
            return len(self._dataset)
        except (TypeError, ValueError) as error:
            # Python raises these for a length that is negative or not an integer.
            problem = f"its __len__ must return the number of its examples: {error}"
            raise DataError(f"{self.name}: {problem}{describe_definition(self)}") from error

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        if self.takes_rng:
            return _as_mapping(self._dataset.__getitem__(index, rng=rng))
        return _as_mapping(self._dataset[index])

    def fingerprint(self) -> str:
        """Return the name, the number of examples, and digests of the arguments."""
        # The content is not hashed, because such datasets are often random.
        return f"{self.name}, {len(self)} examples, {fingerprint_arguments(self._args)}"


class IterableDataset(MapDataset):
    """An iterable dataset with a length; reading an earlier example restarts the iteration."""

    def __init__(self, path: str, args: Mapping[str, Any], dataset: Any, place: str) -> None:
        super().__init__(path, args, dataset, place)
        self._lock, self._next = threading.Lock(), 0
        self._items: Iterator[Any] = iter(())

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        with self._lock:
            if index < self._next or not self._next:
                self._next, self._items = 0, iter(self._dataset)
            for item in self._items:
                self._next += 1
                if self._next > index:
                    return _as_mapping(item)
        raise IndexError(f"it ended after {self._next} examples, and its __len__ is {len(self)}")


def _as_mapping(item: Any) -> dict[str, Any]:
    """Convert an item of a dataset to a dict.

    Tensors (`.numpy()`) and images (`__array_interface__`) become arrays, without a copy if
    possible.
    """
    if hasattr(item, "_asdict"):
        item = item._asdict()
    if isinstance(item, tuple | list) and len(item) == 2:
        item = {"image": item[0], "label": item[1]}
    if not isinstance(item, Mapping):
        count = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        kind = f"{type(item).__name__}{count}"
        raise TypeError(f"an item is a mapping or a pair (image, label), not {kind}")
    example: dict[str, Any] = {}
    for key, value in item.items():
        value = value.detach() if hasattr(value, "detach") else value
        if hasattr(value, "numpy"):
            value = value.numpy()
        elif hasattr(value, "__array_interface__"):
            value = np.asarray(value)
        example[str(key)] = value
    return example
