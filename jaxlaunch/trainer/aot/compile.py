"""Compiles a job's steps for its chips without having one, and says what their compiler found."""

from __future__ import annotations

import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.trainer.aot import collectives, measure, step_time, work
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.collectives import Collective
from jaxlaunch.trainer.aot.program import Program
from jaxlaunch.trainer.aot.step_time import Rates
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import flops, precision
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import Mesh, TrainSpec
from jaxlaunch.trainer.step.executable import Executable
from jaxlaunch.trainer.step.train_state import Batch
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.task import Task

GIB = 1024**3


class TooLarge(Exception):
    """The compiler refuses the program: it does not fit the memory of a device. Its message is the compiler's."""


class AheadOfTime:
    """A training on chips that are not here. `batch` gives the shapes of a global batch of so many rows."""

    def __init__(self, task: Task, spec: TrainSpec, chips: Chips, batch: Batch, total_steps: int) -> None:
        self._task, self._spec, self._chips = task, spec, chips
        self._batch, self._total = batch, total_steps
        self.devices = chips.devices()

    def to_dict(self) -> dict[str, Any]:
        """What the compiler says of the train and the eval step; where they do not fit, also the nearest change that
        makes them fit, which is compiled as well.
        """
        try:
            return self.compiled(self._spec)
        except TooLarge as error:
            return {
                "chips": str(self._chips),
                "compiler": self._chips.compiler,
                "fits": False,
                "says": str(error),
                "change": self._nearest(),
            }

    def compiled(self, spec: TrainSpec, *, is_measured: bool = False) -> dict[str, Any]:
        """What the compiler says of the steps of `spec`, a change of this training; `is_measured`: and what a train
        step takes, on devices that are here. Raises TooLarge, SpecError.
        """
        started = time.monotonic()
        step = Step(self._task, spec, mesh.build(spec.mesh, self.devices), self._total)
        with _refusals():
            step.compile_train(self._batch)
            step.compile_eval(self._batch)
        memory = {name: _memory(each) for name, each in step.compiled.items()}
        peak, has = max(each["peak"] for each in memory.values()), KNOWN[self._chips.type].memory_gib
        if has and peak > max(has) * GIB:  # a GPU's compiler does not refuse
            raise TooLarge(f"the step's peak is {peak / GIB:.2f} GiB, and a {self._chips.type} has {max(has):g} GiB")
        return {
            "chips": str(self._chips),
            "compiler": self._chips.compiler,
            "seconds": round(time.monotonic() - started, 1),
            "fits": True,
            "attention": step.attention,
            "notes": step.notes,
            "peak": peak,
            "memory": memory,
            **self._figures(step, self._reached if is_measured else None),
            **({"measured": measure.seconds(step, self._batch)} if is_measured else {}),
        }

    @cached_property
    def _reached(self) -> Rates | None:
        """What devices of which no table knows reach, such as a CPU's cores."""
        if KNOWN[self._chips.type].machine is not None:
            return None
        return measure.rates(self.devices, precision.policy(self._spec.precision).compute)

    def _figures(self, step: Step, reached: Rates | None) -> dict[str, Any]:
        """Costs, collectives and the modelled time of a train step; without a program text only its costs."""
        train = step.compiled["train"]
        costs = train.costs()
        found: dict[str, Any] = {"flops": costs.get("flops"), "bytes_accessed": costs.get("bytes accessed")}
        sizes = step.mesh.shape
        across = _between(step.mesh)
        try:
            program = Program.parse(train.text())
            found_in = collectives.find(program, list(sizes), tuple(sizes.values()), across)
        except (JaxRuntimeError, ValueError) as error:
            return {**found, "program": f"the compiler's program cannot be read: {str(error).splitlines()[0]}"}
        moved = float(found["bytes_accessed"] or work.of_program(program))  # GPUs' compiler counts none
        model = step_time.Model(self._chips, across, reached)
        listed = model.overlapped(program, found_in)
        whole = step.flops(self._batch)
        kernels = sum(times for each, times in program.scheduled() if "tpu_custom_call" in each.attributes)
        in_kernels = self._of_kernels(step) if kernels else 0.0
        modelled = model.estimate(program, listed, step_time.Computed(whole, in_kernels, moved))
        return {
            **found,
            "bytes_accessed": moved,
            "kernels": kernels,
            "collectives": _together(listed),
            "recomputed": work.recomputed_share(program),
            "model_flops": whole,
            "modelled": modelled,
        }

    def _of_kernels(self, step: Step) -> float:
        """FLOPs of causal attention, which no estimate of the compiler's covers where a kernel computes it."""
        forward = step.forward(self._batch)
        whole = flops.train_step(forward, trained=step.trained_arrays)
        half = flops.train_step(forward, 0.5, step.trained_arrays)
        return 0.0 if whole is None or half is None else whole - half

    def _nearest(self) -> dict[str, Any] | None:
        """The first of the changes that fits, with what the compiler says of it."""
        for change, spec in _changes(self._spec, len(self.devices)):
            try:
                return {"set": change, **self.compiled(spec)}
            except (TooLarge, SpecError):
                continue
        return None


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Within it a program that the compiler finds too large raises TooLarge."""
    try:
        yield
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TooLarge(_sentence(str(error))) from None


def _sentence(text: str) -> str:
    """The compiler's own first sentences, without the list of buffers behind them."""
    return re.sub(r"\s+", " ", text.split("\n\n")[0].splitlines()[0]).strip()


def _memory(executable: Executable) -> dict[str, int]:
    """Bytes on a device: what is handed in, what is computed meanwhile, and the largest sum at any time."""
    stats = executable.memory()
    parts = {
        "argument": stats.argument_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temp": stats.temp_size_in_bytes,
    }
    together = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
    peak = stats.peak_memory_in_bytes
    return {**parts, "peak": peak if peak > parts["temp"] else together}  # the CPU's leaves the temporaries out


def _together(listed: Sequence[Collective]) -> list[dict[str, Any]]:
    """Collectives of one kind over the same axes as one row, the most bytes first."""
    rows: dict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for each in listed:
        if each.group > 1:
            rows[each.kind, each.axes].append(each)
    found = [
        {
            "kind": kind,
            "axes": list(axes),
            "times": sum(each.times for each in group),
            "bytes": sum(each.bytes * each.times for each in group),
            "wire": sum(each.wire for each in group),
            "exposed": sum(each.wire * each.exposed for each in group),
        }
        for (kind, axes), group in rows.items()
    ]
    return sorted(found, key=lambda row: -float(row["wire"]))


def _between(on: jax.sharding.Mesh) -> dict[str, int]:
    """Of the axes of a mesh along which devices are in other slices, or GPUs in other hosts: in how many."""
    found = {}
    for axis, name in enumerate(on.axis_names):
        along = np.moveaxis(on.devices, axis, 0).reshape(on.devices.shape[axis], -1)[:, 0]
        if (count := len({_domain(device) for device in along})) > 1:
            found[name] = count
    return found


def _domain(device: jax.Device) -> int:
    return mesh.slice_index(device) if device.platform == "tpu" else device.process_index


def _changes(spec: TrainSpec, devices: int) -> Iterator[tuple[Mapping[str, Any], TrainSpec]]:
    """What makes a step smaller, the cheapest first: rematerialization, smaller micro-batches, state split further."""
    base: dict[str, Any] = {}
    if spec.remat != "full":
        base = {"train.remat": "full"}
        spec = spec.model_copy(update={"remat": "full"})
        yield base, spec
    for times in (2, 4, 8):
        count = spec.accumulate * times
        yield {**base, "train.accumulate": count}, spec.model_copy(update={"accumulate": count})
    dp, fsdp, ep, mp = spec.mesh.resolve(devices)
    if dp > 1:
        split = Mesh(fsdp=dp * fsdp, ep=ep, mp=mp)
        sizes = {"fsdp": dp * fsdp, "ep": ep, "mp": mp}
        yield {**base, "train.mesh": sizes}, spec.model_copy(update={"mesh": split})
