"""The time of a compiled step, either modelled (docs/plan.md) or measured on devices.

The model takes the time of an operation from the FLOPs of its matrix products and the bytes that it
reads and writes. It walks through the schedule with two clocks, one for compute and one for the
links, to find the communication that compute does not hide. The result is a range from optimistic
to pessimistic assumptions, because much of what decides the time is not in the program.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlaunch.accelerators import ACCELERATORS, MachineSpeed
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.collectives import Collective
from jaxlaunch.trainer.numerics.hlo import (
    Computation,
    Operation,
    Program,
    array_bytes,
    parse_dimensions,
)
from jaxlaunch.trainer.step.state import Batch
from jaxlaunch.trainer.step.train_step import Step

# Name -> operation of one computation.
Operations = Mapping[str, Operation]


class ComputeCost(NamedTuple):
    """Costs of a step without its collectives.

    Attributes:
        flops: The model FLOPs on all devices.
        kernel_flops: The part of these FLOPs that the compiler's cycle estimates do not include.
        moved_bytes: Bytes that a device reads and writes.
    """

    flops: float | None
    kernel_flops: float
    moved_bytes: float


class _Assumptions(NamedTuple):
    """The assumptions for one end of the range.

    Attributes:
        peak_share: Share of the peak FLOP/s that matrix products reach.
        bandwidth_share: Share of the memory bandwidth that is reached.
        is_best: Whether collectives use all links and are hidden as the schedule allows.
    """

    peak_share: float
    bandwidth_share: float
    is_best: bool


_OPTIMISTIC, _PESSIMISTIC = _Assumptions(0.75, 1.0, True), _Assumptions(0.35, 0.8, False)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates that a device reaches.

    Attributes:
        flops_per_s: FLOP/s of matrix products.
        bytes_per_s: Memory bandwidth.
        start_s: Additional seconds of each operation.
        meeting_s: Additional seconds of each collective, whose devices wait for each other.
    """

    flops_per_s: float
    bytes_per_s: float
    start_s: float = 0.0
    meeting_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTimeModel:
    """Estimates step times of programs on the chips of a job.

    Attributes:
        chips: Chips of the job.
        domains_by_axis: Number of slices, or hosts of GPUs, along each mesh axis that spans more
            than one.
        measured_rates: Rates of devices whose machine is unknown.
    """

    chips: Chips
    domains_by_axis: Mapping[str, int]
    measured_rates: Rates | None = None

    def with_exposed_shares(
        self, program: Program, collectives: Sequence[Collective]
    ) -> Sequence[Collective]:
        """Return the collectives with exposed shares by the model's optimistic timeline.

        They are unchanged if the compiler estimates cycles, or if the machine is unknown.
        """
        machine = ACCELERATORS[self.chips.type].machine
        if machine is None or machine.clock_hz is not None:
            return collectives
        sends = self._send_seconds(machine, collectives, _OPTIMISTIC)
        wait_seconds = self._make_timeline(machine, program, sends, _OPTIMISTIC).wait_seconds
        results = []
        for row in collectives:
            share = wait_seconds[row.name] / (sends[row.name] * row.executions or 1.0)
            results.append(dataclasses.replace(row, exposed_share=min(1.0, share)))
        return results

    def estimate_step(
        self, program: Program, collectives: Sequence[Collective], cost: ComputeCost
    ) -> dict[str, Any] | None:
        """Return the seconds of a step, [lowest, highest], and their parts; None if unknown."""
        machine = ACCELERATORS[self.chips.type].machine
        operations = program.scheduled_operations()
        cycles = sum(operation.cycles * times for operation, times in operations)
        if machine is not None:
            ends = [
                self._estimate_end(machine, program, collectives, cost, cycles, assumptions)
                for assumptions in (_OPTIMISTIC, _PESSIMISTIC)
            ]
        elif self.measured_rates is not None:
            # CPU devices share their memory, so a collective reads and writes what it sends.
            rates = self.measured_rates
            sends = {
                row.name: rates.meeting_s + 2 * row.wire_bytes / row.executions / rates.bytes_per_s
                for row in collectives
            }
            timeline = Timeline(program, rates, sends)
            min_s = (cost.flops or 0.0) / self._device_count / rates.flops_per_s
            ends = [(max(min_s, timeline.compute_s), timeline.total_wait_s)] * 2
        else:
            return None
        compute, exposed = (list(part) for part in zip(*ends, strict=True))
        seconds = [sum(end) for end in ends]
        return {"seconds": seconds, "compute": compute, "cycles": cycles, "exposed": exposed}

    def _estimate_end(
        self,
        machine: MachineSpeed,
        program: Program,
        collectives: Sequence[Collective],
        cost: ComputeCost,
        cycles: float,
        assumptions: _Assumptions,
    ) -> tuple[float, float]:
        """Return the seconds of computation and of exposed communication."""
        peak = self._device_count * self._device_peak * assumptions.peak_share
        sends = self._send_seconds(machine, collectives, assumptions)
        if machine.clock_hz is None or not cycles:
            timeline = self._make_timeline(machine, program, sends, assumptions)
            # The timeline only counts matrix products. The model FLOPs include convolutions, too.
            move_s = cost.moved_bytes / machine.hbm_bytes_per_s / assumptions.bandwidth_share
            min_s = max((cost.flops or 0.0) / peak, move_s)
            return max(min_s, timeline.compute_s), timeline.total_wait_s
        compute_s = cycles / machine.clock_hz + cost.kernel_flops / peak
        send_s = sum(sends[row.name] * row.executions for row in collectives)
        wait_s = sum(sends[row.name] * row.executions * row.exposed_share for row in collectives)
        # Communication that takes longer than all of the computation cannot be hidden entirely.
        excess_s = 0.0 if assumptions.is_best else max(0.0, send_s - wait_s - compute_s)
        return compute_s, wait_s + excess_s

    def _make_timeline(
        self,
        machine: MachineSpeed,
        program: Program,
        sends: Mapping[str, float],
        assumptions: _Assumptions,
    ) -> Timeline:
        flops_per_s = self._device_peak * assumptions.peak_share
        rates = Rates(flops_per_s, machine.hbm_bytes_per_s * assumptions.bandwidth_share)
        return Timeline(program, rates, sends)

    def _send_seconds(
        self,
        machine: MachineSpeed,
        collectives: Sequence[Collective],
        assumptions: _Assumptions,
    ) -> dict[str, float]:
        """Return the seconds of one execution of each collective by name.

        At best a device sends over all of its links, at worst over one ring. Between hosts of GPUs
        a collective uses one network port for each of its GPUs on a host, and at worst reaches half
        of their bandwidth.
        """
        seconds = {}
        for row in collectives:
            domains = math.prod(self.domains_by_axis.get(axis, 1) for axis in row.axes)
            if domains == 1:
                bytes_per_s = machine.ring_bytes_per_s
                if assumptions.is_best:
                    bytes_per_s = machine.links_bytes_per_s
            else:
                ports = max(1, row.group_size // domains)
                ports_bytes_per_s = ports * machine.network_bytes_per_s
                bytes_per_s = min(machine.links_bytes_per_s, ports_bytes_per_s)
                if not assumptions.is_best:
                    bytes_per_s /= 2
            seconds[row.name] = row.wire_bytes / row.executions / bytes_per_s
        return seconds

    @property
    def _device_peak(self) -> float:
        return ACCELERATORS[self.chips.type].peak_flops or float("inf")

    @property
    def _device_count(self) -> int:
        chips = self.chips.hosts * self.chips.per_host
        return chips * ACCELERATORS[self.chips.type].devices_per_chip


class Timeline:
    """The time of a program at fixed rates; `sends` are seconds of a collective by its name.

    Attributes:
        seconds: Time of the program.
        compute_s: Time without the waits for collectives.
        wait_seconds: Seconds of waits by collective, for all of its executions.
        total_wait_s: Their sum.
    """

    def __init__(self, program: Program, rates: Rates, sends: Mapping[str, float]) -> None:
        self._program, self._rates, self._sends = program, rates, sends
        self.wait_seconds: defaultdict[str, float] = defaultdict(float)
        self.seconds = self._run_computation(program.entry, 1.0)
        self.total_wait_s = sum(self.wait_seconds.values())
        self.compute_s = self.seconds - self.total_wait_s

    def _run_computation(self, name: str, times: float) -> float:
        """Return the seconds of one execution of a computation that runs `times` times."""
        operations = self._program.computations[name]
        by_name = {operation.name: operation for operation in operations}
        # Seconds at which the device is done with the operations so far, the links are free again,
        # and each collective ends.
        clock, link_clock, ends = 0.0, 0.0, dict[str, float]()
        for operation in operations:
            if operation.name in self._sends:
                link_clock = max(clock, link_clock) + self._sends[operation.name]
                ends[operation.name] = link_clock
            else:
                clock += self._run_called(operation, name, times)
                if not is_free(operation):
                    flops = operation_flops(self._program, operation, operations)
                    moved_bytes = touched_bytes(self._program, operation, by_name)
                    compute_s = flops / self._rates.flops_per_s
                    move_s = moved_bytes / self._rates.bytes_per_s
                    clock += self._rates.start_s + max(compute_s, move_s)
            # A done operation waits for the collective that it ends. A synchronous collective waits
            # for itself.
            collective = None
            if operation.name in ends and not operation.kind.endswith("-start"):
                collective = operation.name
            elif operation.kind.endswith("-done"):
                collective = next((name for name in operation.operands if name in ends), None)
            if collective is not None:
                wait_s = max(0.0, ends.pop(collective) - clock)
                self.wait_seconds[collective] += wait_s * times
                clock += wait_s
        return clock

    def _run_called(self, operation: Operation, caller: str, times: float) -> float:
        """Return the seconds of the computations that a loop, call or branch runs."""
        computations, trips = self._program.computations, 1.0
        names: Sequence[str] = ()
        if operation.kind == "while":
            trips = self._program.loop_trips(operation, caller)
            names = (operation.read_attribute("body") or "",)
        elif operation.kind in ("call", "conditional"):
            names = operation.called_computations
        runs = (
            self._run_computation(name, times * trips) for name in names if name in computations
        )
        return trips * sum(runs)


# --- the work of an operation ---------------------------------------------------------------------

# Opcodes that move no data: they name existing values, or run computations whose operations count
# themselves.
_FREE_KINDS = frozenset(
    {
        *("after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element"),
        *("parameter", "partition-id", "tuple", "while"),
    }
)
# Opcodes that read only as much of their operand as they return.
_SLICE_KINDS = ("dynamic-slice", "gather", "slice")
_VIEW_KINDS = ("bitcast", "copy", "get-tuple-element", "reshape")
# Number of products, such as that of queries and keys, in an attention kernel of cuDNN.
_ATTENTION_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
# The scope of jax.checkpoint, which XLA keeps in the metadata of operations.
_RECOMPUTED_SCOPE = "rematted_computation"


def is_free(operation: Operation) -> bool:
    """Return whether an operation takes no time itself, such as the start of a transfer."""
    return operation.kind in _FREE_KINDS or operation.kind.endswith(("-start", "-done"))


def matrix_products(
    program: Program, operation: Operation, computation: Computation
) -> Iterator[tuple[Operation, float]]:
    """Yield the matrix products inside an operation, at any depth, with their FLOPs."""
    if operation.kind == "dot":
        # Two FLOPs for each element of the result and each element of the contracted axes.
        left_operand = next((row for row in computation if row.name == operation.operands[0]), None)
        contraction = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.attributes)
        flops = 0.0
        if left_operand is not None and contraction is not None:
            sides = parse_dimensions(left_operand.result)
            depth = math.prod(sides[int(index)] for index in contraction[1].split(",") if index)
            flops = 2.0 * math.prod(parse_dimensions(operation.result)) * depth
        yield operation, flops
    elif operation.kind == "fusion":
        for name in operation.called_computations:
            parts = program.computations.get(name, ())
            for part in parts:
                yield from matrix_products(program, part, parts)


def operation_flops(program: Program, operation: Operation, computation: Computation) -> float:
    """Return the FLOPs of an operation's matrix products, or of cuDNN's attention."""
    target = re.search(r'custom_call_target="([^"]+)"', operation.attributes)
    if operation.kind != "custom-call" or target is None or target[1] not in _ATTENTION_PRODUCTS:
        return sum(flops for _, flops in matrix_products(program, operation, computation))
    # Queries are [B, L, H, K] and keys [B, S, G, K]. A causal mask leaves half of each product.
    by_name = {row.name: row for row in computation}
    query, key = (parse_dimensions(by_name[name].result) for name in operation.operands[:2])
    (batch, length, heads, size), keys = query, key[1]
    share = 0.5 if re.search(r'mask_type": ?"\w*CAUSAL', operation.attributes) else 1.0
    return _ATTENTION_PRODUCTS[target[1]] * 2.0 * batch * length * heads * size * keys * share


def program_bytes(program: Program) -> float:
    """Return the bytes that one execution of a program reads and writes."""
    total = 0.0
    for name, times in program.executions.items():
        by_name = {operation.name: operation for operation in program.computations[name]}
        total += times * sum(touched_bytes(program, row, by_name) for row in by_name.values())
    return total


def touched_bytes(program: Program, operation: Operation, by_name: Operations) -> float:
    """Return the bytes that one execution of an operation reads and writes.

    `by_name` are the operations of its computation.
    """
    if is_free(operation):
        return 0.0
    written = sum(array_bytes(operation.result))
    read = [
        sum(array_bytes(by_name[name].result)) if name in by_name else 0
        for name in operation.operands
    ]
    if operation.kind in _SLICE_KINDS:
        return 2.0 * written
    if operation.kind == "dynamic-update-slice":
        return 2.0 * read[1]
    if operation.kind == "fusion" and operation.called_computations:
        fused = program.computations.get(operation.called_computations[0], ())
        parts = {part.name: part for part in fused}
        read_bytes = (_fusion_read_bytes(parts, *operand) for operand in enumerate(read))
        return _fusion_written_bytes(parts, written) + sum(read_bytes)
    return float(written + sum(read))


def _fusion_read_bytes(parts: Operations, index: int, operand_bytes: int) -> float:
    """Return the bytes that a fusion reads of an operand.

    These are the slices if it only takes slices, nothing if it only updates the operand in place,
    and otherwise the whole operand.
    """
    parameters = (part for part in parts.values() if part.kind == "parameter")
    parameter = next((part for part in parameters if part.arguments == str(index)), None)
    if parameter is None:
        return float(operand_bytes)
    sliced_bytes = 0.0
    for name, user in _find_users(parts, parameter.name):
        if user.kind in _SLICE_KINDS and user.operands[0] == name:
            sliced_bytes += sum(array_bytes(user.result))
        elif user.kind != "dynamic-update-slice" or user.operands[0] != name:
            return float(operand_bytes)
    return min(sliced_bytes, float(operand_bytes))


def _find_users(parts: Operations, name: str) -> Iterator[tuple[str, Operation]]:
    """Yield the operations that read `name` or a view of it, each after the name that it reads."""
    for user in parts.values():
        if name in user.operands:
            if user.kind in _VIEW_KINDS and not user.is_root:
                yield from _find_users(parts, user.name)
            else:
                yield name, user


def _fusion_written_bytes(parts: Operations, result_bytes: int) -> float:
    """Return the bytes that a fusion writes: its results, or only their updates in place."""
    root = next((part for part in parts.values() if part.is_root), None)
    if root is None:
        return float(result_bytes)
    total, results = 0.0, [root]
    if root.kind == "tuple":
        results = [parts[name] for name in root.operands if name in parts]
    for result in results:
        while result.kind in _VIEW_KINDS and result.operands[0] in parts:
            result = parts[result.operands[0]]
        if result.kind == "dynamic-update-slice" and result.operands[1] in parts:
            result = parts[result.operands[1]]
        total += sum(array_bytes(result.result))
    return total


def recomputed_share(program: Program) -> float | None:
    """Return the share of a step that is recomputed in the backward pass.

    It is the share of the compiler's estimated cycles or, without estimates, of the FLOPs of matrix
    products. The metadata of a fusion is that of its main operation. Returns None if the program
    has neither cycles nor products.
    """
    # Computations that a recomputed loop, call or branch runs. JAX traces a function only once if
    # both passes call it, so that its operations have the scopes of the first pass. A computation
    # comes after the one that runs it.
    recomputed_names: set[str | None] = set()
    for name in program.executions:
        for operation in program.computations[name]:
            is_recomputed = name in recomputed_names or _RECOMPUTED_SCOPE in operation.attributes
            if is_recomputed and operation.kind in ("while", "call", "conditional"):
                recomputed_names |= {
                    operation.read_attribute("body"),
                    operation.read_attribute("condition"),
                    *operation.called_computations,
                }
    weights = {False: 0.0, True: 0.0}
    has_cycles = any(operation.cycles for operation, _ in program.scheduled_operations())
    for name, times in program.executions.items():
        computation, is_recomputed = program.computations[name], name in recomputed_names
        for operation in computation:
            products = matrix_products(program, operation, computation)
            rows = [(operation, operation.cycles)] if has_cycles else products
            for row, cost in rows:
                weights[is_recomputed or _RECOMPUTED_SCOPE in row.attributes] += cost * times
    total = sum(weights.values())
    return weights[True] / total if total else None


# --- measurements ---------------------------------------------------------------------------------

_WARMUP_RUNS, _MIN_RUNS = 2, 5
# Duration of a measurement, unless _MIN_RUNS take longer.
_MEASUREMENT_S = 2.0
# Side of the matrices of a product.
_MATRIX_SIDE = 512
# Elements of an array that does not fit into the caches of a core.
_PASS_ELEMENTS = 2**21


def measure_step_s(step: Step, batch: Batch) -> float:
    """Return the median time of a compiled train step, on zeros with the shapes of `batch`."""
    # The weights are one, because a step without weight changes nothing.
    rows = {
        name: (np.ones if name == "weight" else np.zeros)(leaf.shape, leaf.dtype)
        for name, leaf in batch.items()
    }
    device_batch, state = step.put_batch(rows), step.init_state()

    def run_step() -> Any:
        nonlocal state
        state, metrics = step.train(state, device_batch)
        return state, metrics

    return _median_s(run_step, _MEASUREMENT_S)


def measure_rates(devices: Sequence[jax.Device], dtype: jnp.dtype) -> Rates:
    """Measure the rates of each device while all devices are busy.

    These are the FLOP/s of matrix products in `dtype`, the bandwidth of a pass over a float32
    array, and the seconds of a tiny operation and of a tiny collective. Devices that share cores,
    such as those of a CPU, share the rates.
    """
    mesh, split = Mesh(np.array(devices), ("devices",)), PartitionSpec("devices")

    def measure_s(
        body: Callable[[Array], Array], iterations: int, *shape: int, dtype: Any = np.float32
    ) -> float:
        """Return the seconds of one iteration of `body` on arrays of this shape."""
        loop: Any = partial(jax.lax.fori_loop, 0, iterations, lambda _, array: body(array))
        run = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=split, out_specs=split))
        array = np.zeros((len(devices) * shape[0], *shape[1:]), dtype)
        device_array = jax.device_put(array, NamedSharding(mesh, split))
        return _median_s(partial(run, device_array), _MEASUREMENT_S / 4) / iterations

    def pass_over(array: Array) -> Array:
        return 2 * array + 1

    ring = [(index, (index + 1) % len(devices)) for index in range(len(devices))]
    side = _MATRIX_SIDE
    product_s = measure_s(lambda array: array @ array, 8, side, side, dtype=dtype)
    return Rates(
        flops_per_s=2 * side**3 / product_s,
        bytes_per_s=2 * _PASS_ELEMENTS * 4 / measure_s(pass_over, 2, _PASS_ELEMENTS),
        start_s=measure_s(pass_over, 256, 1),
        meeting_s=measure_s(lambda array: jax.lax.ppermute(array, "devices", ring), 32, 1),
    )


def _median_s(run: Callable[[], Any], min_duration_s: float) -> float:
    times: list[float] = []
    end_s = time.monotonic() + min_duration_s
    while len(times) < _WARMUP_RUNS + _MIN_RUNS or time.monotonic() < end_s:
        start_s = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[_WARMUP_RUNS:])
