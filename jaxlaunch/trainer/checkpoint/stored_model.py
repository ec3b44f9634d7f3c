"""What a step on storage was trained as: its model, its adapters, and the parameters that its training evaluates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic

from jaxlaunch.trainer.checkpoint.reader import StoredArray, StoredStep
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.spec import Lora, Model


def model(found: StoredStep) -> Any:
    """The model that a step records. Raises CheckpointError where it records none."""
    if "model" not in found.meta:
        raise CheckpointError(f"step {found.step} does not record its model; steps that this version saves do")
    return pydantic.TypeAdapter(Model).validate_python(found.meta["model"])


def lora(found: StoredStep) -> Lora | None:
    """The adapters that a step holds in place of a whole model; None of a whole one."""
    recorded = found.meta.get("lora")
    return None if recorded is None else Lora.model_validate(recorded)


def parameters(found: StoredStep, ema: bool) -> Mapping[str, StoredArray | Averaged]:
    """The parameters that the training evaluates, by name; with `ema` their moving average.

    Raises SpecError where the step holds none.
    """
    params = found.part("params")
    if not ema:
        return averaged(params, found.part("opt"))
    if not (average := found.part("ema")):
        raise SpecError(f"step {found.step} holds no moving average: the training had no train.optimizer.ema")
    # It lacks what was frozen, and holds the model's statistics besides.
    return {**params, **{name: array for name, array in average.items() if name in params}}


def rest(found: StoredStep, ema: bool) -> Mapping[str, StoredArray]:
    """The model's other arrays, such as batch statistics, by name; with `ema` the average of those that have one."""
    other = found.part("rest")
    return {**other, **{name: array for name, array in found.part("ema").items() if ema and name in other}}


@dataclasses.dataclass
class Averaged:
    """An array x of the stored arrays y, z and b1. Slicing it reads them; the last x is `held`. Raises StorageError."""

    y: StoredArray
    z: StoredArray
    b1: StoredArray
    held: dict[tuple[str, str], np.ndarray[Any, Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.y.shape

    @property
    def dtype(self) -> np.dtype[Any]:
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
