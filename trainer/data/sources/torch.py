"""Any map-style dataset class, as PyTorch's are; torch itself is imported only if the class imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer import plugin
from trainer.buckets import faults
from trainer.data import draws
from trainer.errors import SpecError
from trainer.plugin import load


class MapStyle:
    """`module:Class(**args)`: an item is a mapping, or a pair that becomes `image` and `label`.

    A dataset may draw at random: from the global generators, or from the numpy Generator that its `__getitem__` gets
    where that has a parameter `rng`.
    """

    may_draw = True

    def __init__(self, path: str, args: Mapping[str, Any]) -> None:
        self.name = path
        self._args = dict(args)
        built = load(path)
        self.place = plugin.place(built)
        with plugin.placed(built):
            self._dataset = self._built(built)
        self.takes_rng = draws.takes_rng(self._dataset.__getitem__)

    def _built(self, make: Any) -> Any:
        """The dataset. Raises SpecError where it is none, DataError or StorageError for what its class raises."""
        try:
            dataset = make(**self._args)
        except Exception as error:  # whatever the user's class raises
            raise faults.unreadable(f"{self.name} with args {self._args} cannot be built", error) from error
        missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
        if missing:
            raise SpecError(f"{self.name} has no {' and no '.join(missing)}; a map-style dataset has both")
        return dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        item = self._dataset.__getitem__(index, rng=rng) if self.takes_rng else self._dataset[index]
        if hasattr(item, "_asdict"):
            item = item._asdict()
        if isinstance(item, tuple | list) and len(item) == 2:
            item = {"image": item[0], "label": item[1]}
        if not isinstance(item, Mapping):
            raise TypeError(f"an item is a mapping or a pair (image, label), not {_described(item)}")
        return {str(key): _plain(value) for key, value in item.items()}

    def fingerprint(self) -> str:
        """Class, number of examples and arguments; not the content."""
        # Not the content: such classes often draw at random, and then no two readings are equal.
        return f"{self.name}, {len(self)} examples, args {self._args}"


def _plain(value: Any) -> Any:
    """Arrays for tensors (`.numpy()`) and for images (`__array_interface__`); all else unchanged."""
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "numpy"):
        return value.numpy()
    return np.asarray(value) if hasattr(value, "__array_interface__") else value


def _described(item: Any) -> str:
    return f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
