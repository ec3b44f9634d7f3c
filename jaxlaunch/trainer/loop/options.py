"""The options of `jaxlaunch.run`, checked before anything of JAX runs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError, said
from jaxlaunch.trainer.loop import trees


@dataclasses.dataclass(frozen=True)
class Options:
    """How a loop runs; jaxlaunch.run says what each means. Raises SpecError for what is none."""

    steps: int
    every: int | None = 500
    log_every: int = 10
    keep: int = 3
    batch: int | None = None
    shuffle: bool = True
    seed: int = 0
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    mesh: Mapping[str, int] | None = None
    sharding: Mapping[str, Sequence[str | None]] | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "log_every", "keep", *(name for name in ("every", "batch") if getattr(self, name))):
            self._check_count(name, 1)
        self._check_count("seed", 0)
        for name in ("every", "batch"):
            if getattr(self, name) == 0:
                raise SpecError(f"jaxlaunch.run({name}=0): a whole number above 0, or None")
        if self.evaluate is not None and not callable(self.evaluate):
            raise SpecError(
                f"jaxlaunch.run(evaluate=…) is {trees.kind(self.evaluate)}, not a function of the state that returns "
                "a dict of numbers"
            )
        _ = self.axes

    @property
    def axes(self) -> spec.Mesh:
        """The mesh that is asked for, by default all devices as dp."""
        try:
            return spec.Mesh(dp=-1) if self.mesh is None else spec.Mesh.model_validate(dict(self.mesh))
        except (pydantic.ValidationError, TypeError, ValueError) as error:
            why = said(error.errors()[0]) if isinstance(error, pydantic.ValidationError) else "is not a dict"
            raise SpecError(
                f"jaxlaunch.run(mesh={self.mesh!r}): {why}; give devices per axis, such as {{'dp': 4, 'mp': 2}}"
            ) from None

    def _check_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        try:
            is_right = not isinstance(value, bool) and operator.index(value) >= least
        except TypeError:
            is_right = False
        if not is_right:
            raise SpecError(f"jaxlaunch.run({name}={value!r}): a whole number from {least} on")
