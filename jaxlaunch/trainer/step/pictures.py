"""What a task shows of its model after an evaluation: its `samples`, and `shown` where it makes texts of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import jax
import numpy as np

from jaxlaunch import reporting, shown
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.step.train_state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.task import Task


class Pictures:
    """The pictures and texts of a task, by name."""

    def __init__(self, name: str, step: Step, task: Task) -> None:
        self._name, self._step, self._task = name, step, task

    @classmethod
    def of(cls, spec: TrainSpec, task: Task, step: Step) -> Pictures | None:
        """Those of a task; None where it has no method `samples`."""
        has_samples = task.samples is not None and task.samples != MethodType(Task.samples, task)
        return cls(str(spec.task), step, task) if has_samples else None

    def compile(self) -> None:
        """Compiles them, and looks at what they would be. Raises SpecError where they cannot be shown."""
        abstract = self._step.compile_samples(self._task.samples)
        self._found(jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), abstract))

    def report(self, state: TrainState) -> None:
        """Reports those of a state from process 0. Every process takes part."""
        found = jax.device_get(self._step.samples(state))
        if jax.process_index() == 0:
            images, texts = self._found(found)
            reporting.report(image=images, text=texts)

    def _found(self, samples: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The pictures and the texts of a report. Raises SpecError where it would not take them."""
        found = self._task.shown(samples)
        if not isinstance(found, Mapping):
            method = "samples" if self._task.shown == MethodType(Task.shown, self._task) else "shown"
            raise SpecError(f"{self._name}: {method} returned {user_code.kind(found)}, not a dict of pictures by name")
        texts = {name: each for name, each in found.items() if isinstance(each, str)}
        images = {name: each for name, each in found.items() if name not in texts}
        try:
            shown.items(images, texts, is_kept=False)
        except (TypeError, ValueError) as error:
            raise SpecError(f"{self._name}: what it shows after an evaluation cannot be: {error}") from None
        return images, texts
