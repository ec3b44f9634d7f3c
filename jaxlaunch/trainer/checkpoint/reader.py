"""Reads a committed step without owning the folder, one array at a time. Changes nothing in the folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from etils import epath

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.checkpoint import arrays, manifest
from jaxlaunch.trainer.checkpoint.manifest import Damaged, is_remote
from jaxlaunch.trainer.errors import CheckpointError, StorageError, first_line

BEST = "best"  # the name of the step that evaluated best


def find(path: str, step: int | Literal["best"] | None = None, note: Callable[[str], None] = print) -> StoredStep:
    """Step `step` of the folder, the `best`, or its newest undamaged step; `note` gets a sentence about each damaged
    newer one.

    Raises CheckpointError when there is none that is whole, StorageError when storage fails.
    """
    folder = epath.Path(path) if is_remote(epath.Path(path)) else epath.Path(path).expanduser().absolute()
    with _reading(path):
        steps = manifest.committed(folder)
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint: there is no folder here with finished steps in it")
    if step == BEST:
        step = _best(folder, steps, path)
    if step is not None and step not in steps:
        raise CheckpointError(f"{path} holds no finished step {step}; it holds {', '.join(map(str, steps))}")
    bad: dict[int, str] = {}
    for each in reversed(steps) if step is None else [step]:
        damage = _damage(folder / str(each), each)
        if not damage:
            for worse, why in bad.items():
                note(f"step {worse}: {why}; using step {each}")
            with _reading(f"step {each} of {path}"):
                return StoredStep(folder / str(each), each)
        bad[each] = damage
    raise CheckpointError(f"no valid checkpoint in {path}: " + "; ".join(f"step {n}: {why}" for n, why in bad.items()))


def _best(folder: epath.Path, steps: list[int], path: str) -> int:
    """The step that evaluated best, as the newest step that can be read says; its training recorded it."""
    for each in reversed(steps):
        try:
            meta = arrays.meta(folder / str(each))
        except Exception:  # Orbax has no type of its own for what it cannot read; `find` verifies the one that is named
            continue
        named = [int(step) for step, _ in (meta.get(BEST) or {}).get("steps", [])]
        if found := [step for step in named if step in steps]:
            return found[0]
        if named:
            gone, there = ", ".join(map(str, named)), ", ".join(map(str, steps))
            raise CheckpointError(f"{path} records {gone} as best, but holds no such step; name one: it holds {there}")
        break
    raise CheckpointError(f"{path} records no best step: its training had no train.checkpoint.best; name a step")


def _damage(folder: epath.Path, step: int) -> str:
    """How a step is damaged, as a sentence; "" where every file is as it was written."""
    try:
        with _reading(f"step {step} of {folder.parent}"):
            written = manifest.read(folder)
            if written is None or written.step != step:
                return "its manifest is that of another step"
            return next(iter(manifest.find_damage(folder, written)), "")
    except Damaged as error:
        return str(error)


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turns what a disk or a store raises into a StorageError."""
    try:
        yield
    except Exception as error:
        if not faults.is_from_store(error):
            raise
        raise StorageError(f"reading {what} failed: {first_line(error)}") from error


class StoredStep:
    """One step on storage. Holds the array that was read last until another is read."""

    def __init__(self, folder: epath.Path, step: int) -> None:
        self.step = step
        self.meta: Mapping[str, Any] = arrays.meta(folder)
        self._folder, self._shapes = folder, arrays.shapes(folder)
        self._last: tuple[tuple[str, str], np.ndarray[Any, Any]] | None = None

    def part(self, name: str) -> Mapping[str, StoredArray]:
        """The arrays of a part of the state, `params` or `ema`, read when they are sliced; empty without that part."""
        found = self._shapes.get(name) or {}
        return {
            each: StoredArray(self, (name, each), tuple(at.shape), np.dtype(at.dtype)) for each, at in found.items()
        }

    def read(self, place: tuple[str, str]) -> np.ndarray[Any, Any]:
        """An array by its part and name. Raises StorageError."""
        if self._last is None or self._last[0] != place:
            self._last = None  # freed before the next one is read
            try:
                self._last = place, arrays.one(self._folder, *place)
            except Exception as error:  # tensorstore's failures come as ValueError, RuntimeError and bare Exception
                raise StorageError(f"reading {place[1]} of {self._folder} failed: {error}") from error
        return self._last[1]


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array on storage: slicing it reads it, as a numpy array of `dtype`. Raises StorageError."""

    step: StoredStep
    place: tuple[str, str]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, where: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.step.read(self.place)[where]
        return found
