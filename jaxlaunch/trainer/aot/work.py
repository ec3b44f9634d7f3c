"""What an operation of a compiled program does: FLOPs of matrix products, and bytes that it reads and writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from jaxlaunch.trainer.aot.program import Computation, Operation, Program, dimensions, sizes

Named = Mapping[str, Operation]

# They move nothing by themselves: names of what is there, and what runs computations, whose operations count as theirs.
_FREE = frozenset(
    "after-all bitcast call conditional constant get-tuple-element parameter partition-id tuple while".split()
)
_PARTS = ("dynamic-slice", "gather", "slice")  # they read as much of their operand as they return
_VIEWS = ("bitcast", "copy", "get-tuple-element", "reshape")
# cuDNN's attention: how many products of queries and keys, or of the like, a kernel computes.
_ATTENTION = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


def products(program: Program, each: Operation, among: Computation) -> Iterator[tuple[Operation, float]]:
    """The matrix products of an operation of the computation `among`, at any depth, with the FLOPs of each."""
    if each.kind == "dot":
        yield each, _flops(each, among)
    elif each.kind == "fusion":
        for name in each.called:
            inside = program.computations.get(name, ())
            for one in inside:
                yield from products(program, one, inside)


def flops(program: Program, each: Operation, among: Computation) -> float:
    """Of one execution of an operation: its matrix products, and cuDNN's attention."""
    target = _TARGET.search(each.attributes) if each.kind == "custom-call" else None
    if target is not None and target[1] in _ATTENTION:
        return _ATTENTION[target[1]] * _of_queries_and_keys(each, among)
    return sum(count for _, count in products(program, each, among))


def is_free(each: Operation) -> bool:
    """Whether an operation takes no time by itself: a name of what is there, or an end of a transfer."""
    return each.kind in _FREE or each.kind.endswith(("-start", "-done"))


def touched(program: Program, each: Operation, named: Named) -> float:
    """Bytes that one execution reads and writes; `named` are the operations of its computation."""
    if is_free(each):
        return 0.0
    written = sum(sizes(each.result))
    read = [sum(sizes(named[name].result)) if name in named else 0 for name in each.operands]
    if each.kind in _PARTS:
        return 2.0 * written
    if each.kind == "dynamic-update-slice":
        return 2.0 * read[1]
    if each.kind == "fusion" and each.called:
        inside = {one.name: one for one in program.computations.get(each.called[0], ())}
        return _written(inside, written) + sum(_read(inside, index, whole) for index, whole in enumerate(read))
    return float(written + sum(read))


def of_program(program: Program) -> float:
    """Bytes that one execution of a program reads and writes."""
    total = 0.0
    for name, times in program.runs.items():
        named = {each.name: each for each in program.computations[name]}
        total += times * sum(touched(program, each, named) for each in named.values())
    return total


def _flops(product: Operation, among: Computation) -> float:
    """Two for each element of the result and each element that it is summed over."""
    left = next((each for each in among if each.name == product.operands[0]), None)
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.attributes)
    if left is None or summed is None:
        return 0.0
    sides = dimensions(left.result)
    over = math.prod(sides[int(index)] for index in summed[1].split(",") if index)
    return 2.0 * math.prod(dimensions(product.result)) * over


def _of_queries_and_keys(each: Operation, among: Computation) -> float:
    """FLOPs of a product of queries [B, L, H, K] and keys [B, S, G, K]; of half of it where the mask is causal."""
    query, key = (next(one for one in among if one.name == name) for name in each.operands[:2])
    (batch, length, heads, size), places = dimensions(query.result), dimensions(key.result)[1]
    share = 0.5 if re.search(r'mask_type": ?"\w*CAUSAL', each.attributes) else 1.0
    return 2.0 * batch * length * heads * size * places * share


def _read(inside: Named, index: int, whole: int) -> float:
    """Of an operand of a fusion: the slices that are read, nothing of what is written in place, or the whole."""
    argument = next((one for one in inside.values() if one.kind == "parameter" and one.inside == str(index)), None)
    if argument is None:
        return float(whole)
    part = 0.0
    for name, user in _users(inside, argument.name):
        if user.kind in _PARTS and user.operands[0] == name:
            part += sum(sizes(user.result))
        elif user.kind != "dynamic-update-slice" or user.operands[0] != name:
            return float(whole)
    return min(part, float(whole))


def _users(inside: Named, name: str) -> Iterator[tuple[str, Operation]]:
    """Who reads `name`, also as another view of it, and under which name."""
    for user in inside.values():
        if name in user.operands:
            if user.kind in _VIEWS and not user.is_root:
                yield from _users(inside, user.name)
            else:
                yield name, user


def _written(inside: Named, whole: int) -> float:
    """Of what a fusion returns: the part that it replaces where it does so in place, or the whole."""
    root = next((one for one in inside.values() if one.is_root), None)
    if root is None:
        return float(whole)
    returned = [inside[name] for name in root.operands if name in inside] if root.kind == "tuple" else [root]
    return float(sum(_replaced(inside, each) for each in returned))


def _replaced(inside: Named, each: Operation) -> int:
    while each.kind in _VIEWS and each.operands[0] in inside:
        each = inside[each.operands[0]]
    if each.kind == "dynamic-update-slice" and each.operands[1] in inside:
        return sum(sizes(inside[each.operands[1]].result))
    return sum(sizes(each.result))


_AGAIN = "rematted_computation"  # jax.checkpoint names the scope so, and XLA keeps it in an operation's metadata


def recomputed_share(program: Program) -> float | None:
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
                for product, flops in products(program, each, program.computations[name]):
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
