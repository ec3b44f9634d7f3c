"""The parameters that schedule-free training evaluates, out of a checkpoint: x = (y - (1 - b1) z) / b1."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlaunch.trainer.checkpoint.reader import StoredArray


@dataclasses.dataclass
class Averaged:
    """An array x of the stored arrays y, z and b1. Slicing it reads them; the last x is `held`. Raises StorageError."""

    y: StoredArray
    z: StoredArray
    b1: StoredArray
    held: dict[tuple[str, str], np.ndarray[Any, Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.y.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the parameter."""
        return self.y.dtype

    def __getitem__(self, where: Any) -> np.ndarray[Any, Any]:
        place = self.y.place
        if place not in self.held:  # a parameter is read slice by slice, one layer after the other
            self.held.clear()
            b1 = np.float32(self.b1[()])
            whole = self.y[...].astype(np.float32)
            whole -= (np.float32(1) - b1) * self.z[...]
            whole /= b1
            self.held[place] = whole.astype(self.dtype)
        found: np.ndarray[Any, Any] = self.held[place][where]
        return found


def averaged(params: Mapping[str, StoredArray], opt: Mapping[str, StoredArray]) -> Mapping[str, StoredArray | Averaged]:
    """`params` with those replaced that the optimizer's state `opt` averages; as they are without schedule-free."""
    free = [name.removesuffix("b1") for name in opt if name.rpartition(".")[2] == "b1"]
    held: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    parts = {name: prefix for prefix in free for name in params if f"{prefix}z.{name}" in opt}
    return {
        name: Averaged(y, opt[f"{parts[name]}z.{name}"], opt[f"{parts[name]}b1"], held) if name in parts else y
        for name, y in params.items()
    }
