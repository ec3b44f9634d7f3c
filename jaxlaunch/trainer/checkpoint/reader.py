"""Reads a committed step one array at a time, for programs that do not own the folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pydantic
from etils import epath

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.checkpoint import arrays, manifest
from jaxlaunch.trainer.checkpoint.manifest import DamagedManifestError, is_remote
from jaxlaunch.trainer.errors import CheckpointError, SpecError, StorageError, first_line
from jaxlaunch.trainer.spec import Lora, Model

# Name of the best step, by `train.checkpoint.best`, in options and in a step's meta.
BEST = "best"


def find_step(
    path: str, step: int | Literal["best"] | None = None, note: Callable[[str], None] = print
) -> StoredStep:
    """Return a step of the folder, by default the newest undamaged one, and note damaged ones.

    Raises CheckpointError if there is no such step, StorageError if storage fails.
    """
    folder = epath.Path(path)
    if not is_remote(folder):
        folder = folder.expanduser().absolute()
    with _storage_errors(path):
        steps = manifest.committed_steps(folder)
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint: it is not a folder with finished steps")
    if step == BEST:
        step = _best_step(folder, steps, path)
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{path} holds no finished step {step}; it holds {', '.join(map(str, steps))}"
        )
    damages: dict[int, str] = {}
    for candidate in reversed(steps) if step is None else [step]:
        step_folder = folder / str(candidate)
        if damage := _find_damage(step_folder, candidate):
            damages[candidate] = damage
            continue
        for damaged_step, reason in damages.items():
            note(f"step {damaged_step}: {reason}; using step {candidate}")
        with _storage_errors(f"step {candidate} of {path}"):
            return StoredStep(step_folder, candidate)
    listed = "; ".join(f"step {damaged_step}: {reason}" for damaged_step, reason in damages.items())
    raise CheckpointError(f"no valid checkpoint in {path}: {listed}; restore a step from a copy")


def _best_step(folder: epath.Path, steps: list[int], path: str) -> int:
    """Return the best step according to the newest step with readable meta."""
    for step in reversed(steps):
        try:
            meta = arrays.read_meta(folder / str(step))
        except Exception:
            # Orbax has no exception type for unreadable data. `find_step` verifies the step.
            continue
        best_steps = [int(best) for best, _ in (meta.get(BEST) or {}).get("steps", [])]
        if present_steps := [best for best in best_steps if best in steps]:
            return present_steps[0]
        if best_steps:
            recorded_text = ", ".join(map(str, best_steps))
            present_text = ", ".join(map(str, steps))
            raise CheckpointError(
                f"{path} records {recorded_text} as best, but holds no such step; name one: it "
                f"holds {present_text}"
            )
        break
    raise CheckpointError(
        f"{path} records no best step: its training had no train.checkpoint.best; name a step"
    )


def _find_damage(folder: epath.Path, step: int) -> str:
    """Describe the first damage of a step; "" if all files match the manifest."""
    try:
        with _storage_errors(f"step {step} of {folder.parent}"):
            step_manifest = manifest.read_manifest(folder)
            if step_manifest is None or step_manifest.step != step:
                return "its manifest is that of another step"
            return next(iter(manifest.find_damage(folder, step_manifest)), "")
    except DamagedManifestError as error:
        return str(error)


@contextlib.contextmanager
def _storage_errors(subject: str) -> Iterator[None]:
    """Turn an exception of a disk or a store into a StorageError."""
    try:
        yield
    except Exception as error:
        if not faults.is_from_store(error):
            raise
        raise StorageError(f"reading {subject} failed: {first_line(error)}") from error


class StoredStep:
    """One step on storage. It caches the array that was read last."""

    def __init__(self, folder: epath.Path, step: int) -> None:
        self.step = step
        self.meta: Mapping[str, Any] = arrays.read_meta(folder)
        self._folder, self._shapes = folder, arrays.read_shapes(folder)
        self._cached: tuple[tuple[str, str], np.ndarray[Any, Any]] | None = None

    def part_arrays(self, name: str) -> Mapping[str, StoredArray]:
        """Return the arrays of a part of the state, such as `params`, by name."""
        shapes = self._shapes.get(name) or {}
        return {
            key: StoredArray(self, (name, key), tuple(info.shape), np.dtype(info.dtype))
            for key, info in shapes.items()
        }

    def read_array(self, key: tuple[str, str]) -> np.ndarray[Any, Any]:
        """Return the array of a (part, name). Raises StorageError."""
        if self._cached is None or self._cached[0] != key:
            # The memory of the previous array is freed before the next one is read.
            self._cached = None
            try:
                self._cached = key, arrays.load_array(self._folder, *key)
            except Exception as error:
                # tensorstore raises ValueError, RuntimeError and bare Exception.
                raise StorageError(f"reading {key[1]} of {self._folder} failed: {error}") from error
        return self._cached[1]


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array on storage, read when it is sliced. Slicing may raise StorageError."""

    step: StoredStep
    key: tuple[str, str]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        result: np.ndarray[Any, Any] = self.step.read_array(self.key)[index]
        return result


# --- the training record of a step ----------------------------------------------------------------


def recorded_model(step: StoredStep) -> Any:
    """Return the model that a step records. Raises CheckpointError if it records no model."""
    if "model" not in step.meta:
        raise CheckpointError(
            f"step {step.step} does not record its model, because an older version saved it; "
            "resume the run, and use a step that it then saves"
        )
    return pydantic.TypeAdapter(Model).validate_python(step.meta["model"])


def recorded_lora(step: StoredStep) -> Lora | None:
    """Return the LoRA settings of a step that holds only adapters; None if it holds a model."""
    recorded = step.meta.get("lora")
    return None if recorded is None else Lora.model_validate(recorded)


def evaluated_parameters(step: StoredStep, ema: bool) -> Mapping[str, StoredArray | AveragedArray]:
    """Return the parameters that the training evaluates, or with `ema` their moving average."""
    params = step.part_arrays("params")
    if not ema:
        return average_parameters(params, step.part_arrays("opt"))
    if not (moving_average := step.part_arrays("ema")):
        raise SpecError(
            f"step {step.step} holds no moving average: the training had no train.optimizer.ema"
        )
    # The average has no frozen parameters, and it also has the model's statistics.
    return {**params, **{name: array for name, array in moving_average.items() if name in params}}


def evaluated_buffers(step: StoredStep, ema: bool) -> Mapping[str, StoredArray]:
    """Return the model's other arrays, such as batch statistics; with `ema` their averages."""
    buffers = step.part_arrays("rest")
    averages = step.part_arrays("ema") if ema else {}
    return {name: averages.get(name, array) for name, array in buffers.items()}


@dataclasses.dataclass
class AveragedArray:
    """The average x of a schedule-free parameter, computed when it is sliced.

    x = (y - (1 - b1) z) / b1, from the stored y, z and b1. Slicing may raise StorageError.

    Attributes:
        y: The trained parameter.
        z: The sequence of the base optimizer.
        b1: The interpolation between x and z.
        cache: The last x, shared by all averages of a step.
    """

    y: StoredArray
    z: StoredArray
    b1: StoredArray
    cache: dict[tuple[str, str], np.ndarray[Any, Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the average."""
        return self.y.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the average."""
        return self.y.dtype

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        key = self.y.key
        if key not in self.cache:
            # A parameter is read slice by slice before the next one, so one average is enough.
            self.cache.clear()
            b1 = np.float32(self.b1[()])
            average = self.y[...].astype(np.float32)
            average -= (np.float32(1) - b1) * self.z[...]
            average /= b1
            self.cache[key] = average.astype(self.dtype)
        return self.cache[key][index]  # type: ignore[no-any-return]


def average_parameters(
    params: Mapping[str, StoredArray], opt: Mapping[str, StoredArray]
) -> Mapping[str, StoredArray | AveragedArray]:
    """Return `params` with averages in place of those that schedule-free trains."""
    prefixes = [name.removesuffix("b1") for name in opt if name.rpartition(".")[2] == "b1"]
    cache: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    averaged: dict[str, StoredArray | AveragedArray] = dict(params)
    for prefix in prefixes:
        for name, y in params.items():
            if (z := opt.get(f"{prefix}z.{name}")) is not None:
                averaged[name] = AveragedArray(y, z, opt[f"{prefix}b1"], cache)
    return averaged
