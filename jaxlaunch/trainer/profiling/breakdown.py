"""How a step spends its time, from the operations that ran. Pure: intervals in, seconds by kind out.

Every moment of a step counts once, so the parts add up to it: a moment in which operations of several kinds run on one
device is that of the first in ORDER. Collectives therefore count as exposed (non-overlapped) communication, and `host`
is the time in which a device runs nothing: it waits for the host, for data, or between two kernels.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MATMUL, ATTENTION, ELEMENTWISE, COLLECTIVES = "matmul", "attention", "elementwise", "collectives"
HOST = "host"
ORDER = (MATMUL, ATTENTION, ELEMENTWISE, COLLECTIVES)
TOP = 10  # operations in `top`

Span = tuple[float, float]  # from, until; seconds


class Op(NamedTuple):
    """An operation that ran on a device."""

    name: str
    kind: str
    device: str
    span: Span


class Breakdown(NamedTuple):
    """Seconds of one step: the mean over steps and this process's devices."""

    steps: int
    devices: int
    step_s: float
    seconds: Mapping[str, float]  # by kind; they add up to step_s
    hidden_s: float  # of collectives that ran while the device computed
    top: Sequence[tuple[str, str, float]]  # the longest operations: name, kind, seconds

    def to_json(self) -> dict[str, Any]:
        """The breakdown as summary.json of a profile holds it: seconds to the nanosecond, and shares."""
        return {
            "steps": self.steps,
            "devices": self.devices,
            "step_s": round(self.step_s, 9),
            "seconds": {kind: round(spent, 9) for kind, spent in self.seconds.items()},
            "shares": {kind: round(share, 4) for kind, share in self.shares.items()},
            "collectives_hidden_s": round(self.hidden_s, 9),
            "top": [{"op": name, "kind": kind, "seconds": round(spent, 9)} for name, kind, spent in self.top],
        }

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step by kind; they add up to 1."""
        return {kind: spent / self.step_s for kind, spent in self.seconds.items()}


def of(ops: Sequence[Op], window: Span, pauses: Sequence[Span], steps: int) -> Breakdown:
    """The mean breakdown of `steps` within `window`; `pauses` (evaluation, saves) belong to no step.

    Raises ValueError when no device ran an operation within it.
    """
    paused = merged(clipped(pauses, window))
    by_device: dict[str, list[Op]] = defaultdict(list)
    counted = [op for op in ops if clipped([op.span], window) and not any(a <= op.span[0] < b for a, b in paused)]
    for op in counted:
        by_device[op.device].append(op)
    each = [_of_device(mine, window, paused) for mine in by_device.values()]
    total = (window[1] - window[0] - length(paused)) / steps
    if not any(sum(spent.values()) for spent, _ in each) or total <= 0:
        raise ValueError("the trace holds no operation that a device ran within the steps")
    share = 1 / (steps * len(each))
    seconds = {kind: share * sum(spent[kind] for spent, _ in each) for kind in ORDER}
    seconds[HOST] = total - sum(seconds.values())
    return Breakdown(steps, len(each), total, seconds, share * sum(hidden for _, hidden in each), _top(counted, share))


def _of_device(ops: Iterable[Op], window: Span, paused: list[Span]) -> tuple[dict[str, float], float]:
    """Seconds by kind on one device, and those of collectives behind others."""
    spans: dict[str, list[Span]] = {kind: [] for kind in ORDER}
    for op in ops:
        spans[op.kind].append(op.span)
    taken, spent, alone = paused, {}, {}
    for kind in ORDER:
        before, taken = taken, merged([*taken, *clipped(spans[kind], window)])
        spent[kind] = length(taken) - length(before)
        alone[kind] = length(merged([*paused, *clipped(spans[kind], window)])) - length(paused)
    return spent, alone[COLLECTIVES] - spent[COLLECTIVES]


def _top(ops: Iterable[Op], share: float) -> list[tuple[str, str, float]]:
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for op in ops:
        spent[op.name, op.kind] += share * (op.span[1] - op.span[0])
    longest = sorted(spent.items(), key=lambda item: -item[1])[:TOP]
    return [(name, kind, seconds) for (name, kind), seconds in longest]


# --- intervals --------------------------------------------------------------------------------------------------------


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    """The parts of `spans` within `window`."""
    inside = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in inside if start < end]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of `spans`, in order, none touching another."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Seconds of spans that do not overlap."""
    return sum(end - start for start, end in spans)


# --- text -------------------------------------------------------------------------------------------------------------


def line(found: Breakdown) -> str:
    """`12.345 ms a step: matmul 49 %, attention 12 %, …`."""
    parts = ", ".join(f"{kind} {share:.0%}".replace("%", " %") for kind, share in found.shares.items())
    return f"{found.step_s * 1e3:.3f} ms a step: {parts}"


def table(found: Breakdown) -> list[str]:
    """The breakdown as lines of text, one for each kind and one for the step."""
    lines = [
        f"  {kind:<12}{spent * 1e3:>10.3f} ms{spent / found.step_s:>6.0%}".replace("%", " %")
        for kind, spent in found.seconds.items()
    ]
    if found.hidden_s:
        place = list(found.seconds).index(COLLECTIVES)
        lines[place] += f"  and {found.hidden_s * 1e3:.3f} ms while the device computed"
    return [*lines, f"  {'step':<12}{found.step_s * 1e3:>10.3f} ms"]


# Opcodes that hold others, or do nothing: what runs inside them has a name of its own.
_HOLDERS = frozenset("while conditional call tuple get-tuple-element parameter constant bitcast".split())
_COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast "
    "send recv".split()
)
_HOLDER = re.compile(r"(?:while|conditional|call)(?:\.\d+)?$")
_MATMULS = frozenset(("dot", "convolution", "ragged-dot", "scaled-dot"))
_SCOPE = re.compile(r"(?:^|[/(;])attention(?:$|[/);])")  # of jax.named_scope, as differentiation leaves it
_ATTENTION = re.compile(r"fmha|flash|splash|dot_product_attention", re.IGNORECASE)  # names of kernels
_MATMUL = re.compile(r"gemm|matmul|cutlass|nvjet|xmma|conv(?!ert)|(?:^|[_\W])dot", re.IGNORECASE)
_COLLECTIVE = re.compile("nccl|" + "|".join(_COLLECTIVES - {"send", "recv"}).replace("-", "[-_]?"), re.IGNORECASE)

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class _Instruction(NamedTuple):
    name: str
    opcode: str
    op_name: str  # where in our program it comes from
    target: str  # of a custom call
    calls: str  # the computation that it fuses


def of_programs(texts: Iterable[str]) -> dict[str, str | None]:
    """The kind of each operation of compiled programs; None for those that only contain others.

    By `program/operation`, and by the operation alone for readers that do not know the program: the first program's.
    """
    found: dict[str, str | None] = {}
    for text in texts:
        program, computations = _first(_MODULE, text), _computations(text)
        for one in itertools.chain(*computations.values()):
            kind = _kind(one, computations)
            found[f"{program}/{one.name}"] = kind
            found.setdefault(one.name, kind)
    return found


def of_kernel(name: str) -> str | None:
    """The kind of an operation of another program, or of a kernel, of which only the name is known."""
    if _HOLDER.match(name):
        return None
    if _COLLECTIVE.search(name):
        return COLLECTIVES
    if _ATTENTION.search(name):
        return ATTENTION
    return MATMUL if _MATMUL.search(name) else ELEMENTWISE


def _computations(text: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    inside: list[_Instruction] = []
    for line in text.splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            inside = found.setdefault(head[1], [])
        elif (one := _INSTRUCTION.match(line)) is not None:
            inside.append(_Instruction(one[1], one[2], *(_first(part, line) for part in (_OP_NAME, _TARGET, _CALLS))))
    return found


def _first(pattern: re.Pattern[str], line: str) -> str:
    found = pattern.search(line)
    return found[1] if found else ""


def _kind(one: _Instruction, computations: Mapping[str, list[_Instruction]]) -> str | None:
    if one.opcode in _HOLDERS:
        return None
    parts = [one, *_within(one, computations)]
    if any(_plain(part.opcode) in _COLLECTIVES for part in parts):
        return COLLECTIVES
    scopes = [one.op_name] if one.op_name else [part.op_name for part in parts]
    if any(map(_SCOPE.search, scopes)) or any(_ATTENTION.search(part.target) for part in parts):
        return ATTENTION
    if any(part.opcode in _MATMULS or (part.target and of_kernel(part.target) == MATMUL) for part in parts):
        return MATMUL
    return ELEMENTWISE


def _within(one: _Instruction, computations: Mapping[str, list[_Instruction]]) -> Iterator[_Instruction]:
    for part in computations.get(one.calls, ()) if one.calls else ():
        yield part
        yield from _within(part, computations)


def _plain(opcode: str) -> str:
    """The opcode of an operation that begins and ends in two: all-gather-start, all-gather-done."""
    return re.sub(r"-(?:start|update|done)$", "", opcode)
