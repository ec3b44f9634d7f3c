"""Compiles a job's steps for chips that are not present.

The results are the memory, the collectives and the modelled time of a step. If the steps do not fit
into the memory of a device, the first change of the job with which they fit is compiled, too.
"""

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
from jaxlaunch.accelerators import ACCELERATORS
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
# The share of the machine's free memory that the compiler may use.
MAX_MEMORY_SHARE = 0.8


class ProgramTooLargeError(Exception):
    """The program does not fit into the memory of a device. The message is the compiler's."""


class AheadOfTimeCompiler:
    """Compiles a training for chips that are not present.

    `batch` has the shapes and dtypes of a global batch.
    """

    def __init__(
        self, task: Task, spec: TrainSpec, chips: Chips, batch: Batch, total_steps: int
    ) -> None:
        self._task, self._spec, self._chips = task, spec, chips
        self._batch, self._total_steps = batch, total_steps
        self.devices = chips.make_devices()

    def compile_or_shrink(self) -> dict[str, Any]:
        """Return the results of the job; if it does not fit, also those of a change that does."""
        try:
            return self.compile_spec(self._spec)
        except ProgramTooLargeError as error:
            nearest = None
            for change, spec in _smaller_specs(self._spec, len(self.devices)):
                with contextlib.suppress(ProgramTooLargeError, SpecError):
                    nearest = {"set": change, **self.compile_spec(spec)}
                    break
            return {
                "chips": str(self._chips),
                "compiler": self._chips.compiler_version,
                "fits": False,
                "says": str(error),
                "change": nearest,
            }

    def compile_spec(self, spec: TrainSpec, *, is_measured: bool = False) -> dict[str, Any]:
        """Compile the steps of `spec`, a variation of this training, and return the results.

        If `is_measured` the time of a train step is measured on devices that are present. Raises
        ProgramTooLargeError if the steps do not fit into the memory of a device, SpecError if the
        spec is not valid for these devices.
        """
        start_s = time.monotonic()
        step = Step(self._task, spec, mesh.build_mesh(spec.mesh, self.devices), self._total_steps)
        try:
            step.compile_train(self._batch)
            step.compile_eval(self._batch)
        except JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # The other lines of the compiler's message are a list of buffers.
            reason = re.sub(r"\s+", " ", str(error).splitlines()[0]).strip()
            raise ProgramTooLargeError(reason) from None
        memory = {name: _memory_bytes(program) for name, program in step.compiled_steps.items()}
        peak = max(sizes["peak"] for sizes in memory.values())
        accelerator = ACCELERATORS[self._chips.type]
        # The compiler for GPUs does not refuse a program that is too large.
        if accelerator.memory_gib and peak > max(accelerator.memory_gib) * GIB:
            device = f"a {self._chips.type} has {max(accelerator.memory_gib):g} GiB"
            raise ProgramTooLargeError(f"the step's peak is {peak / GIB:.2f} GiB, and {device}")
        rates = self._measured_rates if is_measured and accelerator.machine is None else None
        return {
            "chips": str(self._chips),
            "compiler": self._chips.compiler_version,
            "seconds": round(time.monotonic() - start_s, 1),
            "fits": True,
            "attention": step.attention_implementation,
            "notes": step.notes,
            "peak": peak,
            "memory": memory,
            **self._program_figures(step, rates),
            **({"measured": step_time.measure_step_s(step, self._batch)} if is_measured else {}),
        }

    @cached_property
    def _measured_rates(self) -> Rates:
        """The measured rates of devices that are in no table, such as CPU cores."""
        dtype = precision.resolve_precision(self._spec.precision).compute
        return step_time.measure_rates(self.devices, dtype)

    def _program_figures(self, step: Step, rates: Rates | None) -> dict[str, Any]:
        """Return costs, collectives and modelled time of a train step.

        If the text of the program cannot be read, the result says so and has only the costs.
        """
        train = step.compiled_steps["train"]
        costs = train.cost_analysis()
        figures: dict[str, Any] = {"flops": costs.get("flops")}
        figures["bytes_accessed"] = costs.get("bytes accessed")
        sizes, domains = step.mesh.shape, _count_domains(step.mesh)
        try:
            program = Program.from_text(train.hlo_text())
            collectives = find_collectives(program, list(sizes), tuple(sizes.values()), domains)
        except (JaxRuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            return {**figures, "program": f"the compiler's program cannot be read: {reason}"}
        # The compiler for GPUs does not count bytes.
        moved_bytes = float(figures["bytes_accessed"] or step_time.program_bytes(program))
        model = step_time.StepTimeModel(self._chips, domains, rates)
        rows = model.with_exposed_shares(program, collectives)
        model_flops, kernel_flops = step.count_flops(self._batch), 0.0
        kernels = sum(
            times
            for operation, times in program.scheduled_operations()
            if "tpu_custom_call" in operation.attributes
        )
        if kernels:
            # The compiler's cycle estimates do not include causal attention in a kernel.
            forward = step.forward_jaxpr(self._batch)
            full_flops = flops.train_step_flops(forward, trained=step.trained_count)
            causal_flops = flops.train_step_flops(forward, 0.5, step.trained_count)
            if full_flops is not None and causal_flops is not None:
                kernel_flops = full_flops - causal_flops
        cost = step_time.ComputeCost(model_flops, kernel_flops, moved_bytes)
        return {
            **figures,
            "bytes_accessed": moved_bytes,
            "kernels": kernels,
            "collectives": _sum_by_kind(rows),
            "recomputed": step_time.recomputed_share(program),
            "model_flops": model_flops,
            "modelled": model.estimate_step(program, rows, cost),
        }


def _memory_bytes(executable: Executable) -> dict[str, int]:
    """Return the bytes of arguments, outputs and temporaries on a device, and their peak."""
    stats = executable.memory_analysis()
    parts = {
        "argument": stats.argument_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temp": stats.temp_size_in_bytes,
    }
    total = parts["argument"] + parts["output"] - parts["alias"] + parts["temp"]
    peak = stats.peak_memory_in_bytes
    # The peak that the CPU's compiler reports does not include the temporaries.
    return {**parts, "peak": peak if peak > parts["temp"] else total}


def _sum_by_kind(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """Return one row for all collectives of a kind over the same axes, most bytes first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for collective in collectives:
        if collective.group_size > 1:
            groups[collective.kind, collective.axes].append(collective)
    sums = [
        {
            "kind": kind,
            "axes": list(axes),
            "times": sum(row.executions for row in group),
            "bytes": sum(row.size_bytes * row.executions for row in group),
            "wire": sum(row.wire_bytes for row in group),
            "exposed": sum(row.wire_bytes * row.exposed_share for row in group),
        }
        for (kind, axes), group in groups.items()
    ]
    return sorted(sums, key=lambda row: -float(row["wire"]))


def _count_domains(device_mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Return the number of slices, or hosts of GPUs, along each axis that spans more than one."""
    counts = {}
    for axis, name in enumerate(device_mesh.axis_names):
        axis_first = np.moveaxis(device_mesh.devices, axis, 0)
        domains = {
            mesh.slice_index(device) if device.platform == "tpu" else device.process_index
            for device in axis_first.reshape(len(axis_first), -1)[:, 0]
        }
        if len(domains) > 1:
            counts[name] = len(domains)
    return counts


def _smaller_specs(spec: TrainSpec, devices: int) -> Iterator[tuple[Mapping[str, Any], TrainSpec]]:
    """Yield changes that save memory, cheapest first, and the changed specs."""
    remat_change: dict[str, Any] = {}
    if spec.remat != "full":
        remat_change = {"train.remat": "full"}
        spec = spec.model_copy(update={"remat": "full"})
        yield remat_change, spec
    for factor in (2, 4, 8):
        count = spec.accumulate * factor
        smaller = spec.model_copy(update={"accumulate": count})
        yield {**remat_change, "train.accumulate": count}, smaller
    dp, fsdp, ep, mp = spec.mesh.resolve(devices)
    if dp > 1:
        sizes = {"fsdp": dp * fsdp, "ep": ep, "mp": mp}
        smaller = spec.model_copy(update={"mesh": Mesh.model_validate(sizes)})
        yield {**remat_change, "train.mesh": sizes}, smaller


@contextlib.contextmanager
def limit_compilation() -> Iterator[None]:
    """Report progress, and end the process if it takes too long or too much memory.

    The whole process must end, because a call of the compiler cannot be interrupted.
    """
    is_done = threading.Event()
    max_bytes = _proc_bytes("/proc/meminfo", "MemAvailable") * MAX_MEMORY_SHARE

    def watch_limits() -> None:
        start_s = last_report_s = time.monotonic()
        while not is_done.wait(1.0):
            now_s, resident_bytes = time.monotonic(), _proc_bytes("/proc/self/status", "VmRSS")
            if resident_bytes > max_bytes:
                _exit_with_refusal(
                    f"the compiler needs more than {max_bytes / GIB:.1f} GiB, "
                    f"{MAX_MEMORY_SHARE:.0%} of this machine's free memory"
                )
            if now_s - start_s > MAX_COMPILATION_S:
                _exit_with_refusal(f"the compiler is not done after {MAX_COMPILATION_S:.0f} s")
            if now_s - last_report_s >= REPORT_INTERVAL_S:
                last_report_s = now_s
                used = f"{resident_bytes / GIB:.1f} GiB of this machine's memory"
                seconds = f"{now_s - start_s:.0f} s"
                print(f"{contract.COMPILING_PREFIX}{seconds}, {used}", file=sys.stderr)

    thread = threading.Thread(target=watch_limits, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _exit_with_refusal(reason: str) -> None:
    contract.refuse(f"{reason}: compile a smaller model of the same kind", contract.BAD_SPEC)
    os._exit(contract.BAD_SPEC)


def _proc_bytes(path: str, key: str) -> int:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(f"{key}:"))
    # /proc gives kB.
    return int(line.split()[1]) * 1024
