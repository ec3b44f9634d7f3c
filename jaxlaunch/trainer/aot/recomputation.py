"""How much of a compiled step computes again what the forward pass had: the price of rematerialization."""

from __future__ import annotations

from jaxlaunch.trainer.aot import work
from jaxlaunch.trainer.aot.program import Program

_AGAIN = "rematted_computation"  # jax.checkpoint names the scope so, and XLA keeps it in an operation's metadata


def share(program: Program) -> float | None:
    """The part of a step that is computed again: of the compiler's cycles, or of the FLOPs of matrix products where it
    estimates no cycles. A fusion counts by the operation that it is named for. None where nothing can be weighed."""
    weights = {False: 0.0, True: 0.0}
    inside = _inside(program)
    has_cycles = any(each.cycles for each, _ in program.scheduled())
    for name, times in program.runs.items():
        for each in program.computations[name]:
            if has_cycles:
                weights[name in inside or _AGAIN in each.attributes] += each.cycles * times
            else:
                for product, flops in work.products(program, each, program.computations[name]):
                    weights[name in inside or _AGAIN in product.attributes] += flops * times
    whole = sum(weights.values())
    return weights[True] / whole if whole else None


def _inside(program: Program) -> set[str]:
    """The computations that a loop, a call or a branch which is computed again runs: JAX traces what two passes call
    once, so that the operations in it have the names of the first."""
    found: set[str] = set()
    for name in program.runs:  # a computation comes behind the one that runs it
        for each in program.computations[name]:
            if each.kind in ("while", "call", "conditional") and (name in found or _AGAIN in each.attributes):
                found.update(filter(None, (each.attribute("body"), each.attribute("condition"), *each.called)))
    return found
