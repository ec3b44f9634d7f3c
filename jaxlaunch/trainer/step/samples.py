"""The pictures and texts that a task shows after an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import jax
import numpy as np

from jaxlaunch import reporting
from jaxlaunch.samples import check_items
from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.task import Task


class TaskSamples:
    """Reports the pictures and texts of a task after an evaluation.

    The task's `samples` computes arrays on the devices, and its `shown` turns them into pictures
    and texts by name.
    """

    def __init__(self, name: str, step: Step, task: Task) -> None:
        self._name, self._step, self._task = name, step, task

    @classmethod
    def for_task(cls, spec: TrainSpec, task: Task, step: Step) -> TaskSamples | None:
        """Return an instance for a task; None if the task does not override `samples`."""
        has_samples = task.samples is not None and task.samples != MethodType(Task.samples, task)
        return cls(str(spec.task), step, task) if has_samples else None

    def compile(self) -> None:
        """Compile the samples and check their shapes. Raises SpecError if they cannot be shown."""
        abstract = self._step.compile_samples()
        self._shown_items(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract))

    def report(self, state: TrainState) -> None:
        """Report the samples of a state from process 0. Every process takes part."""
        samples = jax.device_get(self._step.make_samples(state))
        if jax.process_index() == 0:
            images, texts = self._shown_items(samples)
            reporting.report(image=images, text=texts)

    def _shown_items(self, samples: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the pictures and the texts of a report. Raises SpecError for invalid ones."""
        items = self._task.shown(samples)
        if not isinstance(items, Mapping):
            is_default = self._task.shown == MethodType(Task.shown, self._task)
            method = "samples" if is_default else "shown"
            raise SpecError(
                f"{self._name}: {method} returned {user_code.describe_kind(items)}, not a dict of "
                "pictures by name"
            )
        texts = {name: item for name, item in items.items() if isinstance(item, str)}
        images = {name: item for name, item in items.items() if name not in texts}
        try:
            check_items(images, texts, is_kept=False)
        except (TypeError, ValueError) as error:
            raise SpecError(f"{self._name}: its samples cannot be shown: {error}") from None
        return images, texts
