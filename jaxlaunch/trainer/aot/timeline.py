"""How long a scheduled program takes, operation by operation, where its compiler estimates no cycles.

Operations run one after the other; collectives that the schedule starts early run meanwhile, one after the other too.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from jaxlaunch.trainer.aot import work
from jaxlaunch.trainer.aot.program import Computation, Operation, Program


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
