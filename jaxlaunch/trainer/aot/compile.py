"""Compiles a job's steps for its chips without having one, and says what their compiler found."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from jaxlaunch import contract
from jaxlaunch.accelerators import KNOWN
from jaxlaunch.trainer.aot import step_time
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.collectives import Collective, find_collectives
from jaxlaunch.trainer.aot.step_time import Rates
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import flops, precision
from jaxlaunch.trainer.numerics.hlo import Program
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import Mesh, TrainSpec
from jaxlaunch.trainer.step.executable import Executable
from jaxlaunch.trainer.step.state import Batch
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.task import Task

GIB = 1024**3
REPORT_INTERVAL_S = 15.0
MAX_COMPILATION_S = 3600.0
MAX_MEMORY_SHARE = 0.8  # of the memory that is free at the start


class TooLarge(Exception):
    """The compiler refuses the program: it does not fit the memory of a device. Its message is the compiler's."""


class AheadOfTime:
    """A training on chips that are not here. `batch` gives the shapes of a global batch of so many rows."""

    def __init__(self, task: Task, spec: TrainSpec, chips: Chips, batch: Batch, total_steps: int) -> None:
        self._task, self._spec, self._chips = task, spec, chips
        self._batch, self._total_steps = batch, total_steps
        self.devices = chips.devices()

    def to_dict(self) -> dict[str, Any]:
        """Return what the compiler says of the steps; where they do not fit, also of the nearest change that does."""
        try:
            return self.compile(self._spec)
        except TooLarge as error:
            nearest = None
            for change, spec in _smaller_specs(self._spec, len(self.devices)):
                with contextlib.suppress(TooLarge, SpecError):
                    nearest = {"set": change, **self.compile(spec)}
                    break
            return {
                "chips": str(self._chips),
                "compiler": self._chips.compiler,
                "fits": False,
                "says": str(error),
                "change": nearest,
            }

    def compile(self, spec: TrainSpec, *, is_measured: bool = False) -> dict[str, Any]:
        """Return what the compiler says of the steps of `spec`, a change of this training; with `is_measured` also what
        a train step takes, on devices that are here. Raises TooLarge, SpecError.
        """
        started = time.monotonic()
        step = Step(self._task, spec, mesh.build(spec.mesh, self.devices), self._total_steps)
        try:
            step.compile_train(self._batch)
            step.compile_eval(self._batch)
        except JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # The compiler's own first sentences, without the list of buffers behind them.
            raise TooLarge(re.sub(r"\s+", " ", str(error).split("\n\n")[0].splitlines()[0]).strip()) from None
        memory = {name: _memory_bytes(executable) for name, executable in step.compiled.items()}
        peak, sizes_gib = max(sizes["peak"] for sizes in memory.values()), KNOWN[self._chips.type].memory_gib
        if sizes_gib and peak > max(sizes_gib) * GIB:  # a GPU's compiler does not refuse
            device = f"a {self._chips.type} has {max(sizes_gib):g} GiB"
            raise TooLarge(f"the step's peak is {peak / GIB:.2f} GiB, and {device}")
        return {
            "chips": str(self._chips),
            "compiler": self._chips.compiler,
            "seconds": round(time.monotonic() - started, 1),
            "fits": True,
            "attention": step.attention,
            "notes": step.notes,
            "peak": peak,
            "memory": memory,
            **self._figures(step, self._rates if is_measured and KNOWN[self._chips.type].machine is None else None),
            **({"measured": step_time.measure_step_s(step, self._batch)} if is_measured else {}),
        }

    @cached_property
    def _rates(self) -> Rates:
        """What devices of which no table knows reach, such as a CPU's cores."""
        return step_time.measure_rates(self.devices, precision.policy(self._spec.precision).compute)

    def _figures(self, step: Step, rates: Rates | None) -> dict[str, Any]:
        """Return costs, collectives and the modelled time of a train step; without a program text only its costs."""
        train = step.compiled["train"]
        costs = train.costs()
        figures: dict[str, Any] = {"flops": costs.get("flops"), "bytes_accessed": costs.get("bytes accessed")}
        sizes, across = step.mesh.shape, _count_domains(step.mesh)
        try:
            program = Program.parse(train.text())
            collectives = find_collectives(program, list(sizes), tuple(sizes.values()), across)
        except (JaxRuntimeError, ValueError) as error:
            return {**figures, "program": f"the compiler's program cannot be read: {str(error).splitlines()[0]}"}
        moved = float(figures["bytes_accessed"] or step_time.program_bytes(program))  # GPUs' compiler counts none
        model = step_time.StepTimeModel(self._chips, across, rates)
        rows = model.with_exposed_shares(program, collectives)
        model_flops, in_kernels = step.flops(self._batch), 0.0
        kernels = sum(times for row, times in program.scheduled() if "tpu_custom_call" in row.attributes)
        if kernels:
            # Causal attention, which no estimate of the compiler's covers where a kernel computes it.
            forward = step.forward(self._batch)
            whole = flops.train_step(forward, trained=step.trained_arrays)
            half = flops.train_step(forward, 0.5, step.trained_arrays)
            in_kernels = 0.0 if whole is None or half is None else whole - half
        return {
            **figures,
            "bytes_accessed": moved,
            "kernels": kernels,
            "collectives": _sum_by_kind(rows),
            "recomputed": step_time.recomputed_share(program),
            "model_flops": model_flops,
            "modelled": model.estimate(program, rows, step_time.Computed(model_flops, in_kernels, moved)),
        }


def _memory_bytes(executable: Executable) -> dict[str, int]:
    """Return bytes on a device: what is handed in, what is computed meanwhile, and the largest sum at any time."""
    stats = executable.memory()
    parts = {
        "argument": stats.argument_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temp": stats.temp_size_in_bytes,
    }
    total = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
    peak = stats.peak_memory_in_bytes
    return {**parts, "peak": peak if peak > parts["temp"] else total}  # the CPU's leaves the temporaries out


def _sum_by_kind(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """Return collectives of one kind over the same axes as one row, the most bytes first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for row in collectives:
        if row.group > 1:
            groups[row.kind, row.axes].append(row)
    sums = [
        {
            "kind": kind,
            "axes": list(axes),
            "times": sum(row.times for row in group),
            "bytes": sum(row.bytes * row.times for row in group),
            "wire": sum(row.wire for row in group),
            "exposed": sum(row.wire * row.exposed for row in group),
        }
        for (kind, axes), group in groups.items()
    ]
    return sorted(sums, key=lambda row: -float(row["wire"]))


def _count_domains(device_mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Return over how many slices, or hosts of GPUs, the devices along an axis are, for axes with more than one."""
    counts = {}
    for axis, name in enumerate(device_mesh.axis_names):
        along = np.moveaxis(device_mesh.devices, axis, 0).reshape(device_mesh.devices.shape[axis], -1)[:, 0]
        domains = {mesh.slice_index(chip) if chip.platform == "tpu" else chip.process_index for chip in along}
        if len(domains) > 1:
            counts[name] = len(domains)
    return counts


def _smaller_specs(spec: TrainSpec, devices: int) -> Iterator[tuple[Mapping[str, Any], TrainSpec]]:
    """Yield what makes a step smaller, the cheapest first: rematerialization, smaller micro-batches, more sharding."""
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
        sizes = {"fsdp": dp * fsdp, "ep": ep, "mp": mp}
        yield {**base, "train.mesh": sizes}, spec.model_copy(update={"mesh": Mesh.model_validate(sizes)})


@contextlib.contextmanager
def limit_compilation() -> Iterator[None]:
    """End the process with a refusal when it takes longer, or holds more memory, than it may; report on the way.

    A compiler's call does not return before it is done, so nothing milder ends it.
    """
    done, max_bytes = threading.Event(), _proc_bytes("/proc/meminfo", "MemAvailable") * MAX_MEMORY_SHARE

    def watch() -> None:
        started = reported = time.monotonic()
        while not done.wait(1.0):
            now, held = time.monotonic(), _proc_bytes("/proc/self/status", "VmRSS")
            if held > max_bytes:
                share = f"{MAX_MEMORY_SHARE:.0%} of this machine's free memory"
                _refuse(f"the compiler needs more than {max_bytes / GIB:.1f} GiB, {share}")
            if now - started > MAX_COMPILATION_S:
                _refuse(f"the compiler is not done after {MAX_COMPILATION_S:.0f} s")
            if now - reported >= REPORT_INTERVAL_S:
                reported = now
                figures = f"{now - started:.0f} s, {held / GIB:.1f} GiB of this machine's memory"
                print(f"{contract.COMPILING}{figures}", file=sys.stderr)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _refuse(reason: str) -> None:
    contract.refuse(f"{reason}: compile a smaller model of the same kind", contract.BAD_SPEC)
    os._exit(contract.BAD_SPEC)


def _proc_bytes(path: str, key: str) -> int:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024  # /proc gives kB
