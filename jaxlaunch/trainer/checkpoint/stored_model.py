"""What a step on storage was trained as: its model, its adapters, and the parameters that its training evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from jaxlaunch.trainer.checkpoint.reader import StoredArray, StoredStep
from jaxlaunch.trainer.checkpoint.schedule_free import Averaged, averaged
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
