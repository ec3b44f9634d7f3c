"""A parser for the HLO text of a compiled program, which also counts executions of operations."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from jaxlaunch.trainer.numerics.grouped import ITERATIONS

# Bits of an element. All other types have this number in their name.
TYPE_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_KIND = re.compile(r" ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|branch_computations|called_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_REFERENCE = re.compile(r"%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a computation, whose details are parsed on demand because programs are long.

    Attributes:
        name: The name of the result.
        kind: The opcode, such as all-gather, fusion or while.
        result: The shape of the result as text, or a tuple of shapes.
        arguments: The text between the parentheses: operands, or the value of a constant.
        attributes: The text after the parentheses.
        is_root: Whether the operation is the result of its computation.
    """

    name: str
    kind: str
    result: str
    arguments: str
    attributes: str
    is_root: bool

    @cached_property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return _REFERENCE.findall(self.arguments)

    @cached_property
    def called_computations(self) -> list[str]:
        """Computations that run once per execution of this operation, except those of a loop."""
        return [
            name
            for match in _CALLED.finditer(self.attributes)
            for name in _REFERENCE.findall(match[1])
        ]

    @property
    def cycles(self) -> int:
        """The compiler's estimate of cycles for one execution, 0 without an estimate."""
        match = _CYCLES.search(self.attributes)
        return 0 if match is None else int(match[1])

    def read_attribute(self, name: str) -> str | None:
        """Return the word after `name=`, without a leading percent sign."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return None if match is None else match[1]


Computation = Sequence[Operation]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its computations by name, and the name of its entry.

    The operations of a scheduled computation run in order.
    """

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def from_text(cls, text: str) -> Program:
        """Parse the text of a program. Raises ValueError if it has no entry."""
        computations: dict[str, list[Operation]] = {}
        entry, current = "", None
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" ") and (head := _HEAD.match(line)):
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
            elif line == "}":
                current = None
            elif current is not None and (operation := _parse_operation(line)) is not None:
                current.append(operation)
        if not entry:
            raise ValueError("the compiled program's text has no ENTRY")
        return cls(computations, entry)

    @cached_property
    def executions(self) -> dict[str, float]:
        """Executions of each scheduled computation in a run, multiplied by trip counts of loops."""
        runs: dict[str, float] = {}

        def count_runs(name: str, times: float) -> None:
            if name not in self.computations:
                return
            runs[name] = runs.get(name, 0.0) + times
            for operation in self.computations[name]:
                if operation.kind == "while":
                    trips = self.loop_trips(operation, name)
                    count_runs(operation.read_attribute("body") or "", times * trips)
                    count_runs(operation.read_attribute("condition") or "", times * (trips + 1))
                elif operation.kind in ("call", "conditional"):
                    for callee in operation.called_computations:
                        count_runs(callee, times)

        count_runs(self.entry, 1.0)
        return runs

    def scheduled_operations(self) -> Iterator[tuple[Operation, float]]:
        """Yield the scheduled operations with their executions, not those inside fusions."""
        for name, times in self.executions.items():
            yield from ((operation, times) for operation in self.computations[name])

    def fused_operations(self, operation: Operation) -> Iterator[Operation]:
        """Yield the operations inside a fusion, at any depth."""
        for name in operation.called_computations:
            for part in self.computations.get(name, ()):
                yield part
                yield from self.fused_operations(part)

    def loop_trips(self, loop: Operation, caller: str) -> float:
        """Return the trip count of a loop in the computation `caller`.

        The count is in the loop's attributes, in the scope that trainer/numerics/grouped adds, or
        in the comparison of the loop's condition. Without any of them the result is 1.
        """
        if (
            match := _TRIPS.search(loop.attributes) or ITERATIONS.search(loop.attributes)
        ) is not None:
            return float(match[1])
        condition = self.computations.get(loop.read_attribute("condition") or "", ())
        outside = {operation.name: operation for operation in self.computations[caller]}
        # The comparison may be inside a fusion of the condition.
        searched: list[tuple[Computation, Operation | None]] = [(condition, None)]
        for part in condition:
            fused = [self.computations.get(name, ()) for name in part.called_computations]
            searched += [(operations, part) for operations in fused]
        for operations, fusion in searched:
            by_name = {operation.name: operation for operation in (*condition, *operations)}
            for operation in operations:
                if operation.kind != "compare" or not by_name.keys() >= {*operation.operands}:
                    continue
                for name in operation.operands:
                    if limit := _counter_limit(by_name[name], by_name, fusion, loop, outside):
                        return limit
        return 1


def _counter_limit(
    value: Operation,
    by_name: Mapping[str, Operation],
    fusion: Operation | None,
    loop: Operation,
    outside: Mapping[str, Operation],
) -> int | None:
    """Return the positive constant that an operand of a loop's comparison has, if it has one.

    Args:
        value: The operand.
        by_name: The operations of the condition, with those of `fusion`.
        fusion: The fusion that contains the comparison, if any.
        loop: The loop, which may carry the constant.
        outside: The operations of the computation that runs the loop.
    """
    origin: Operation | None = value
    if value.kind == "parameter" and fusion is not None:
        origin = value = by_name.get(fusion.operands[int(value.arguments)], value)
    if value.kind == "get-tuple-element":
        carried = outside.get(loop.operands[0])
        if carried is not None and carried.kind == "tuple":
            origin = outside.get(carried.operands[int(value.read_attribute("index") or 0)])
            copies = ("copy", "copy-done", "copy-start", "bitcast", "convert")
            while origin is not None and origin.kind in copies:
                origin = outside.get(origin.operands[0])
    if origin is None or origin.kind != "constant" or not origin.arguments.isdecimal():
        return None
    return int(origin.arguments) or None


def _parse_operation(line: str) -> Operation | None:
    if (name := _NAME.match(line)) is None:
        return None
    definition = line[name.end() :]
    end = _closing_index(definition, 0) if definition.startswith("(") else definition.find(" ")
    kind = _KIND.match(definition, end)
    if end < 0 or kind is None:
        return None
    close = _closing_index(definition, kind.end() - 1)
    arguments, attributes = definition[kind.end() : close - 1], definition[close:]
    return Operation(name[2], kind[1], definition[:end], arguments, attributes, bool(name[1]))


def _closing_index(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    return len(text)


def parse_dimensions(shape: str) -> list[int]:
    """Return the dimensions of the first array in a shape."""
    match = _ARRAY.search(shape)
    return [] if match is None else [int(size) for size in match[2].split(",") if size]


def array_bytes(shape: str) -> list[int]:
    """Return the bytes of each array in a shape or in a tuple of shapes."""
    sizes = []
    for kind, lengths in _ARRAY.findall(shape):
        # The first number of a name is that of the bits, such as 8 in f8e4m3fn.
        digits = re.search(r"\d+", kind)
        bits = TYPE_BITS.get(kind) or (int(digits[0]) if digits else 0)
        sizes.append(math.prod(int(length) for length in lengths.split(",") if length) * bits // 8)
    return sizes
