"""How long a compiled step takes, by a stated model: docs/plan.md. A range, since half of it is not in the program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch.accelerators import KNOWN, Machine
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.collectives import Collective
from jaxlaunch.trainer.aot.program import Program
from jaxlaunch.trainer.aot.timeline import Rates, Timeline


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
