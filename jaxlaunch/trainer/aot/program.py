"""Reads the text of a program that XLA has compiled and scheduled: its operations, and how often each runs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from jaxlaunch.trainer.numerics.grouped import TURNS

BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}  # others end in their number of bits
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_KIND = re.compile(r" ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|branch_computations|called_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a computation. Its text is parsed where somebody asks: a program has many thousands of lines."""

    name: str
    kind: str  # all-gather, fusion, while …
    result: str  # the shape as text, or a tuple of shapes
    inside: str  # between the parentheses: operands, or the value of a constant
    attributes: str  # behind the parentheses
    is_root: bool

    @cached_property
    def operands(self) -> list[str]:
        """The names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.inside)

    @cached_property
    def called(self) -> list[str]:
        """The computations that run whenever this operation does; those of a loop are not among them."""
        groups = (re.findall(r"%([\w.\-]+)", found[1]) for found in _CALLED.finditer(self.attributes))
        return [name for group in groups for name in group]

    @property
    def cycles(self) -> int:
        """The compiler's estimate for one execution; 0 where it gives none, as for a kernel."""
        found = _CYCLES.search(self.attributes)
        return 0 if found is None else int(found[1])

    def attribute(self, name: str) -> str | None:
        """The word behind `name=`, without a leading percent sign."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return None if found is None else found[1]


Computation = Sequence[Operation]


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a program by name. Those in `runs` are scheduled: their operations run in order."""

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program of such a text. Raises ValueError where it has no entry."""
        found: dict[str, list[Operation]] = {}
        entry, current = "", None
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" ") and (head := _HEAD.match(line)):
                current = found.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
            elif line == "}":
                current = None
            elif current is not None and (operation := _operation(line)) is not None:
                current.append(operation)
        if not entry:
            raise ValueError("the compiled program's text has no ENTRY")
        return cls(found, entry)

    @cached_property
    def runs(self) -> dict[str, float]:
        """How often each scheduled computation runs in one execution of the program: loop bodies by their trips."""
        found: dict[str, float] = {}

        def visit(name: str, times: float) -> None:
            found[name] = found.get(name, 0.0) + times
            for each in self.computations[name]:
                if each.kind == "while":
                    for part, extra in (("body", 0), ("condition", 1)):
                        if (of := each.attribute(part)) in self.computations:
                            visit(str(of), times * (self.trips(each, name) + extra))
                elif each.kind in ("call", "conditional"):
                    for of in filter(self.computations.__contains__, each.called):
                        visit(of, times)

        visit(self.entry, 1.0)
        return found

    def scheduled(self) -> Iterator[tuple[Operation, float]]:
        """The operations of scheduled computations, and how often each runs; the parts of a fusion are not listed."""
        for name, times in self.runs.items():
            yield from ((each, times) for each in self.computations[name])

    def parts(self, operation: Operation) -> Iterator[Operation]:
        """The operations inside a fusion, at any depth."""
        for name in operation.called:
            for each in self.computations.get(name, ()):
                yield each
                yield from self.parts(each)

    def trips(self, loop: Operation, within: str) -> float:
        """How often a loop's body runs: by the text, by the scope of a loop over as many rows as there are, or by what
        its condition compares; 1 if none of them tells."""
        if (known := _TRIPS.search(loop.attributes)) is not None:
            return int(known[1])
        if (expected := TURNS.search(loop.attributes)) is not None:
            return float(expected[1])
        condition = self.computations.get(loop.attribute("condition") or "", ())
        places: list[tuple[Computation, Operation | None]] = [(condition, None)]
        places += [(self.computations.get(name, ()), fused) for fused in condition for name in fused.called]
        for operations, fused in places:
            by_name = {each.name: each for each in (*condition, *operations)}
            for each in operations:
                if each.kind == "compare" and (end := self._limit(each, by_name, fused, loop, within)) is not None:
                    return end
        return 1

    def _limit(
        self,
        compare: Operation,
        by_name: Mapping[str, Operation],
        fused: Operation | None,
        loop: Operation,
        within: str,
    ) -> int | None:
        """The constant that a counter from 0 is compared with: of the condition, or one that the loop carries.

        `fused` is the fusion that the comparison is in, if it is in one.
        """
        outside = {each.name: each for each in self.computations[within]}
        if not all(name in by_name for name in compare.operands):
            return None
        for name in compare.operands:
            value: Operation | None = by_name[name]
            if value is not None and value.kind == "parameter" and fused is not None:
                value = by_name.get(fused.operands[int(value.inside)], value)
            if value is not None and value.kind == "get-tuple-element":
                carried = outside.get(loop.operands[0])
                if carried is not None and carried.kind == "tuple":
                    value = _origin(carried.operands[int(value.attribute("index") or 0)], outside)
            if value is not None and value.kind == "constant" and value.inside.isdecimal() and int(value.inside) > 0:
                return int(value.inside)
        return None


def _origin(name: str, by_name: Mapping[str, Operation]) -> Operation | None:
    """What a name stands for, through copies."""
    found = by_name.get(name)
    while found is not None and found.kind in ("copy", "copy-done", "copy-start", "bitcast", "convert"):
        found = by_name.get(found.operands[0])
    return found


def _operation(line: str) -> Operation | None:
    name = _NAME.match(line)
    if name is None:
        return None
    rest = line[name.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    kind = _KIND.match(rest, end)
    if end < 0 or kind is None:
        return None
    close = _closing(rest, kind.end() - 1)
    return Operation(name[2], kind[1], rest[:end], rest[kind.end() : close - 1], rest[close:], bool(name[1]))


def _closing(text: str, start: int) -> int:
    """The index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    return len(text)


def dimensions(shape: str) -> list[int]:
    """The dimensions of the first array that a shape names."""
    found = _ARRAY.search(shape)
    return [] if found is None else [int(size) for size in found[2].split(",") if size]


def sizes(shape: str) -> list[int]:
    """The bytes of each array that a shape names: one, or those of a tuple."""
    return [_bytes(kind, dimensions) for kind, dimensions in _ARRAY.findall(shape)]


def _bytes(kind: str, dimensions: str) -> int:
    digits = re.search(r"\d+", kind)  # f8e4m3fn has 8 bits
    bits = BITS.get(kind) or (int(digits[0]) if digits else 0)
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8
