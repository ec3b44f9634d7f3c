"""How long a compiled step takes, by a stated model: docs/plan.md. A range, since half of it is not in the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlaunch.accelerators import KNOWN, Machine
from jaxlaunch.trainer.ahead.chips import Chips
from jaxlaunch.trainer.ahead.collectives import Collective
from jaxlaunch.trainer.ahead.program import Program

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
    """Seconds of a step, [least, most], and their parts; None for a device of whose machine nothing is known.

    `flops` are the model's, of all devices, and `in_kernels` those of them that the compiler's cycles leave out;
    `moved` the bytes that a device reads and writes; `axes_between` the mesh axes that cross slices or hosts.
    """
    machine = KNOWN[chips.type].machine
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
