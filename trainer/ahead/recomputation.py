"""How much of a compiled step computes again what the forward pass had: the price of rematerialization."""

from __future__ import annotations

import math
import re

from jaxlaunch.trainer.ahead.program import Computation, Operation, Program, dimensions

_AGAIN = "rematted_computation"  # jax.checkpoint names the scope so, and XLA keeps it in an operation's metadata


def share(program: Program) -> float | None:
    """The part of a step that is computed again: of the compiler's cycles, or of the FLOPs of matrix products where it
    estimates no cycles. A fusion counts by the operation that it is named for. None where nothing can be weighed."""
    weights = {False: 0.0, True: 0.0}
    has_cycles = any(each.cycles for each, _ in program.scheduled())
    for name, times in program.runs.items():
        for each in program.computations[name]:
            if has_cycles:
                weights[_AGAIN in each.attributes] += each.cycles * times
            else:
                for product, among in _products(program, each, program.computations[name]):
                    weights[_AGAIN in product.attributes] += _flops(product, among) * times
    whole = sum(weights.values())
    return weights[True] / whole if whole else None


def _products(program: Program, each: Operation, among: Computation) -> list[tuple[Operation, Computation]]:
    """The matrix products of an operation, each with the computation that it is in."""
    if each.kind == "dot":
        return [(each, among)]
    inside = (program.computations.get(name, ()) for name in each.called if each.kind == "fusion")
    return [found for part in inside for one in part for found in _products(program, one, part)]


def _flops(product: Operation, among: Computation) -> float:
    """Two for each element of the result and each element that it is summed over."""
    left = next((each for each in among if each.name == product.operands[0]), None)
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.attributes)
    if left is None or summed is None:
        return 0.0
    sizes = dimensions(left.result)
    over = math.prod(sizes[int(index)] for index in summed[1].split(",") if index)
    return 2.0 * math.prod(dimensions(product.result)) * over
