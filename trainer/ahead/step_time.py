"""How long a compiled step takes, by a stated model: docs/plan.md. A range, since half of it is not in the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.trainer.ahead.chips import Chips
from jaxlaunch.trainer.ahead.collectives import Collective
from jaxlaunch.trainer.ahead.program import Program


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a step's time depends on beside its FLOPs. Bytes a second of one device, in one direction."""

    clock: float | None  # Hz, of the compiler's cycles; None: it estimates none
    hbm: float
    wires: float  # all links of a device: a torus's axes both ways, or NVLink
    one_ring: float  # a ring along one axis of the torus, both ways; or NVLink
    between: float  # between slices, or between hosts


# Sources, read 2026-11: jax-ml.github.io/scaling-book, "TPU specs" (HBM, links of one direction) and Google's Cloud TPU
# pages; clocks are peak FLOP/s over the multiply-adds of a cycle (v5e: 4 units of 128 × 128). GPUs: data sheets of
# NVIDIA, half of NVLink's sum of both directions, a 400 Gbit/s port for each GPU (B200, GB200: 400 as well).
MACHINES: Mapping[str, Machine] = {
    "v4": Machine(1.05e9, 1.2e12, 2.7e11, 9e10, 6.25e9),
    "v5e": Machine(1.5e9, 8.2e11, 1.8e11, 9e10, 6.25e9),
    "v5p": Machine(1.75e9, 2.8e12, 5.4e11, 1.8e11, 6.25e9),
    "v6e": Machine(1.75e9, 1.6e12, 3.6e11, 1.8e11, 6.25e9),
    "7x": Machine(2.2e9, 3.7e12, 3e11, 1e11, 6.25e9),
    "a100": Machine(None, 2.0e12, 3e11, 3e11, 2.5e10),
    "h100": Machine(None, 3.35e12, 4.5e11, 4.5e11, 5e10),
    "h200": Machine(None, 4.8e12, 4.5e11, 4.5e11, 5e10),
    "b200": Machine(None, 8.0e12, 9e11, 9e11, 5e10),
    "gb200": Machine(None, 8.0e12, 9e11, 9e11, 5e10),
}
_SAME = {"tpu7x": "7x", "tpu7": "7x"}


def machine_of(kind: str) -> Machine | None:
    """The machine of an accelerator; None where no row has it."""
    return MACHINES.get(_SAME.get(kind, kind))


_OF_PEAK = (0.35, 0.75)  # of a device's peak: what matrix products reach where the compiler gives no cycles


def estimate(
    chips: Chips,
    program: Program,
    found: Sequence[Collective],
    flops: float | None,
    in_kernels: float,
    moved: float,
    axes_between: set[str],
) -> dict[str, Any] | None:
    """Seconds of a step, [least, most], and their parts; None for a device that is in no row of MACHINES.

    `flops` are the model's, of all devices, and `in_kernels` those of them that the compiler's cycles leave out;
    `moved` the bytes that a device reads and writes; `axes_between` the mesh axes that cross slices or hosts.
    """
    machine = machine_of(chips.type)
    if machine is None:
        return None
    cycles = sum(each.cycles * times for each, times in program.scheduled())
    if machine.clock is not None and cycles:
        kernels = [in_kernels / share / _peak(chips) for share in _OF_PEAK]
        low, high = (cycles / machine.clock + seconds for seconds in reversed(kernels))
    else:
        low, high = _roofline(chips, machine, flops, moved)
    exposed = [_seconds(each, machine, axes_between) for each in found if not each.is_hidden]
    hidden = [_seconds(each, machine, axes_between) for each in found if each.is_hidden]
    least = low + sum(fast for fast, _ in exposed)
    # Hidden communication shows where it takes longer than all of the computation.
    most = max(high, sum(slow for _, slow in hidden)) + sum(slow for _, slow in exposed)
    return {"seconds": [least, most], "compute": [low, high], "cycles": cycles, "exposed": [least - low, most - high]}


def _peak(chips: Chips) -> float:
    """FLOP/s of all devices together."""
    devices = chips.hosts * chips.per_host * KNOWN[chips.type].devices_per_chip
    return devices * (KNOWN[chips.type].peak or float("inf"))


def _roofline(chips: Chips, machine: Machine, flops: float | None, moved: float) -> tuple[float, float]:
    """Compute or memory, whichever takes longer, at a good and at a poor share of the peak."""
    slow, fast = ((flops or 0.0) / share / _peak(chips) for share in _OF_PEAK)
    return max(fast, moved / machine.hbm), max(slow, moved / machine.hbm / 0.8)


def _seconds(each: Collective, machine: Machine, between: set[str]) -> tuple[float, float]:
    """Of a collective's executions: over all links, and over one ring."""
    if between & set(each.axes):
        return each.wire / machine.between, 2 * each.wire / machine.between
    return each.wire / machine.wires, each.wire / machine.one_ring
