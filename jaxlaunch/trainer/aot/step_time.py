"""How long a compiled step takes, by a stated model: docs/plan.md. A range, since half of it is not in the program."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch.accelerators import KNOWN, Machine
from jaxlaunch.trainer.aot import work
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.collectives import Collective
from jaxlaunch.trainer.aot.program import Computation, Operation, Program


class Computed(NamedTuple):
    """What of a step no collective is."""

    flops: float | None  # the model's, of all devices
    in_kernels: float  # those of them that the compiler's cycles leave out
    moved: float  # bytes that a device reads and writes


class _End(NamedTuple):
    """One end of the range: shares of a device's peak that products reach, and of its memory's; whether a collective
    uses all links."""

    of_peak: float
    of_memory: float
    is_best: bool


_BEST, _WORST = _End(0.75, 1.0, True), _End(0.35, 0.8, False)


@dataclasses.dataclass(frozen=True)
class Model:
    """The seconds of programs on the devices of a job."""

    chips: Chips
    between: Mapping[str, int]  # of a mesh axis: over how many slices, or hosts of GPUs, its devices are spread
    reached: Rates | None = None  # as measured, of devices of whose machine nothing is known

    def overlapped(self, program: Program, found: Sequence[Collective]) -> Sequence[Collective]:
        """The collectives, each with the share of its time in which the best end computes nothing; as they are where
        the compiler estimates cycles, or nothing is known of the machine."""
        machine = KNOWN[self.chips.type].machine
        if machine is None or machine.clock is not None:
            return found
        waited, whole = self._timeline(machine, program, found, _BEST).waited, self._sends(machine, found, _BEST)
        return [
            dataclasses.replace(each, exposed=min(1.0, waited[each.name] / (whole[each.name] * each.times or 1.0)))
            for each in found
        ]

    def estimate(self, program: Program, found: Sequence[Collective], of: Computed) -> dict[str, Any] | None:
        """Seconds of a step, [least, most], and their parts; None for a device of whose machine nothing is known."""
        machine = KNOWN[self.chips.type].machine
        cycles = sum(each.cycles * times for each, times in program.scheduled())
        if machine is None:
            if self.reached is None:
                return None
            ends = [self._as_reached(self.reached, program, found, of)] * 2
        elif machine.clock is not None and cycles:
            ends = [self._by_cycles(machine, found, of, cycles / machine.clock, end) for end in (_BEST, _WORST)]
        else:
            ends = [self._by_operations(machine, program, found, of, end) for end in (_BEST, _WORST)]
        computed, waited = (list(part) for part in zip(*ends, strict=True))
        seconds = [one + other for one, other in ends]
        return {"seconds": seconds, "compute": computed, "cycles": cycles, "exposed": waited}

    def _by_cycles(
        self, machine: Machine, found: Sequence[Collective], of: Computed, seconds: float, end: _End
    ) -> tuple[float, float]:
        computed = seconds + of.in_kernels / end.of_peak / self._peak
        sends = self._sends(machine, found, end)
        waited = sum(sends[each.name] * each.times * each.exposed for each in found)
        if not end.is_best:  # hidden communication shows where it takes longer than all of the computation
            waited += max(0.0, sum(sends[each.name] * each.times * (1 - each.exposed) for each in found) - computed)
        return computed, waited

    def _by_operations(
        self, machine: Machine, program: Program, found: Sequence[Collective], of: Computed, end: _End
    ) -> tuple[float, float]:
        timeline = self._timeline(machine, program, found, end)
        waited = sum(timeline.waited.values())
        # What is no matrix product, such as a convolution, is in the model's FLOPs alone.
        floor = max((of.flops or 0.0) / end.of_peak / self._peak, of.moved / machine.hbm / end.of_memory)
        return max(floor, timeline.seconds - waited), waited

    def _as_reached(
        self, rates: Rates, program: Program, found: Sequence[Collective], of: Computed
    ) -> tuple[float, float]:
        """By what was measured. Such devices share a memory: what a collective sends is read and written, alone."""
        sends = {each.name: rates.meeting + 2 * each.wire / each.times / rates.memory for each in found}
        timeline = Timeline(program, rates, sends)
        waited = sum(timeline.waited.values())
        return max((of.flops or 0.0) / self._devices / rates.flops, timeline.seconds - waited), waited

    def _timeline(self, machine: Machine, program: Program, found: Sequence[Collective], end: _End) -> Timeline:
        peak = KNOWN[self.chips.type].peak or float("inf")
        rates = Rates(peak * end.of_peak, machine.hbm * end.of_memory)
        return Timeline(program, rates, self._sends(machine, found, end))

    def _sends(self, machine: Machine, found: Sequence[Collective], end: _End) -> dict[str, float]:
        """Seconds of one execution of each collective, by its name."""
        return {each.name: each.wire / each.times / self._bandwidth(machine, each, end) for each in found}

    def _bandwidth(self, machine: Machine, each: Collective, end: _End) -> float:
        """Bytes a second of a device: over all of its links, or over one ring. Between hosts of GPUs, whose ports each
        carry a part, of as many ports as the collective has GPUs on a host; half of it at worst."""
        domains = math.prod(self.between.get(axis, 1) for axis in each.axes)
        if domains == 1:
            return machine.wires if end.is_best else machine.one_ring
        ports = max(1, each.group // domains)
        return min(machine.wires, ports * machine.between) / (1 if end.is_best else 2)

    @property
    def _peak(self) -> float:
        """FLOP/s of all devices together."""
        return self._devices * (KNOWN[self.chips.type].peak or float("inf"))

    @property
    def _devices(self) -> int:
        """JAX devices of the job."""
        return self.chips.hosts * self.chips.per_host * KNOWN[self.chips.type].devices_per_chip


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device reaches: FLOP/s of matrix products, and bytes a second of its memory; and the seconds that starting
    an operation, or devices waiting for each other in a collective, adds to either."""

    flops: float
    memory: float
    start: float = 0.0
    meeting: float = 0.0


class Timeline:
    """A program's seconds at such rates. `sends` has those of one execution of each collective, by its name."""

    def __init__(self, program: Program, rates: Rates, sends: Mapping[str, float]) -> None:
        self._program, self._rates, self._sends = program, rates, sends
        self.waited: defaultdict[str, float] = defaultdict(float)  # seconds for each collective, of all executions
        self.seconds = self._run(program.entry, 1.0)

    def _run(self, name: str, times: float) -> float:
        """Seconds of one execution of a computation that runs so often."""
        operations = self._program.computations[name]
        named = {each.name: each for each in operations}
        clock, free, ends = 0.0, 0.0, dict[str, float]()
        for each in operations:
            if each.name in self._sends:
                free = ends[each.name] = max(clock, free) + self._sends[each.name]
            else:
                clock += self._inside(each, name, times) + self._alone(each, operations, named)
            if (waits_for := _waits_for(each, ends)) is not None:
                late = max(0.0, ends.pop(waits_for) - clock)
                self.waited[waits_for] += late * times
                clock += late
        return clock

    def _inside(self, each: Operation, within: str, times: float) -> float:
        """Of the computations that a loop, a call or a branch runs."""
        if each.kind == "while":
            body, turns = each.attribute("body") or "", self._program.trips(each, within)
            return turns * self._run(body, times * turns) if body in self._program.computations else 0.0
        if each.kind in ("call", "conditional"):
            return sum(self._run(name, times) for name in each.called if name in self._program.computations)
        return 0.0

    def _alone(self, each: Operation, among: Computation, named: Mapping[str, Operation]) -> float:
        if work.is_free(each):
            return 0.0
        computed = work.flops(self._program, each, among) / self._rates.flops
        moved = work.touched(self._program, each, named) / self._rates.memory
        return self._rates.start + max(computed, moved)


def _waits_for(each: Operation, started: Mapping[str, float]) -> str | None:
    """The collective that an operation waits for: the one whose end it is, or itself where it is no start."""
    if each.name in started and not each.kind.endswith("-start"):
        return each.name
    if each.kind.endswith("-done"):
        return next((name for name in each.operands if name in started), None)
    return None
