"""Breaks a step's time down by kind of operation, from a trace of JAX's profiler.

Every moment of a step counts for one kind only, so that the parts add up to the step. If a device
runs operations of several kinds at the same time, the moment counts for the first one in ORDER.
Collectives therefore only count as exposed communication, that is, while nothing else runs. `host`
is the time in which a device runs nothing: it waits for the host or for data, or between kernels.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxlaunch.trainer.numerics.hlo import Operation, Program

MATMUL, ATTENTION, ELEMENTWISE, COLLECTIVES = "matmul", "attention", "elementwise", "collectives"
HOST = "host"
ORDER = (MATMUL, ATTENTION, ELEMENTWISE, COLLECTIVES)
# Number of operations in `Breakdown.top`.
TOP_OPERATIONS = 10

# (start, end) in seconds.
Span = tuple[float, float]


class Op(NamedTuple):
    """One execution of an operation on a device."""

    name: str
    kind: str
    device: str
    span: Span


class Breakdown(NamedTuple):
    """Seconds of one step, as the mean over steps and this process's devices.

    Attributes:
        steps: Number of steps.
        devices: Number of devices.
        step_s: Duration of a step.
        seconds: Seconds by kind, which add up to `step_s`.
        hidden_s: Seconds of collectives that ran while the device computed.
        top: The longest operations, as (name, kind, seconds).
    """

    steps: int
    devices: int
    step_s: float
    seconds: Mapping[str, float]
    hidden_s: float
    top: Sequence[tuple[str, str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return the breakdown for the summary.json of a profile."""
        shares = {kind: round(seconds / self.step_s, 4) for kind, seconds in self.seconds.items()}
        top = [
            {"op": name, "kind": kind, "seconds": round(seconds, 9)}
            for name, kind, seconds in self.top
        ]
        return {
            "steps": self.steps,
            "devices": self.devices,
            "step_s": round(self.step_s, 9),
            "seconds": {kind: round(seconds, 9) for kind, seconds in self.seconds.items()},
            "shares": shares,
            "collectives_hidden_s": round(self.hidden_s, 9),
            "top": top,
        }

    def to_line(self) -> str:
        """Return `12.345 ms a step: matmul 49 %, attention 12 %, …`."""
        parts = self.seconds.items()
        shares = ", ".join(f"{kind} {100 * seconds / self.step_s:.0f} %" for kind, seconds in parts)
        return f"{self.step_s * 1e3:.3f} ms a step: {shares}"

    def to_table(self) -> list[str]:
        """Return one line of text for each kind, and one for the step."""
        lines = []
        for kind, seconds in self.seconds.items():
            line = f"  {kind:<12}{seconds * 1e3:>10.3f} ms{100 * seconds / self.step_s:>5.0f} %"
            if kind == COLLECTIVES and self.hidden_s:
                line += f"  and {self.hidden_s * 1e3:.3f} ms while the device computed"
            lines.append(line)
        return [*lines, f"  {'step':<12}{self.step_s * 1e3:>10.3f} ms"]


def break_down(ops: Sequence[Op], window: Span, pauses: Sequence[Span], steps: int) -> Breakdown:
    """Return the mean breakdown of the `steps` steps that ran in `window`.

    `pauses` are the spans of evaluations and saves, which do not count. Raises ValueError if no
    device ran an operation in the window.
    """
    pauses = _merge_spans(_clip_spans(pauses, window))
    by_device: dict[str, dict[str, list[Span]]] = {}
    top: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in ops:
        is_paused = any(start <= op.span[0] < end for start, end in pauses)
        if _clip_spans([op.span], window) and not is_paused:
            spans = by_device.setdefault(op.device, {kind: [] for kind in ORDER})
            spans[op.kind].append(op.span)
            top[op.name, op.kind] += op.span[1] - op.span[0]
    device_splits = [_split_device(spans, window, pauses) for spans in by_device.values()]
    step_s = (window[1] - window[0] - _total_s(pauses)) / steps
    if not any(sum(seconds.values()) for seconds, _ in device_splits) or step_s <= 0:
        raise ValueError("the trace holds no operation that a device ran within the steps")
    factor = 1 / (steps * len(device_splits))
    means = {kind: factor * sum(seconds[kind] for seconds, _ in device_splits) for kind in ORDER}
    means[HOST] = step_s - sum(means.values())
    hidden_s = factor * sum(hidden for _, hidden in device_splits)
    longest = sorted(top.items(), key=lambda item: -item[1])[:TOP_OPERATIONS]
    rows = [(name, kind, factor * seconds) for (name, kind), seconds in longest]
    return Breakdown(steps, len(device_splits), step_s, means, hidden_s, rows)


def _split_device(
    spans: Mapping[str, list[Span]], window: Span, pauses: list[Span]
) -> tuple[dict[str, float], float]:
    """Return the seconds by kind on one device, and the seconds of hidden collectives."""
    covered, seconds = pauses, {}
    for kind in ORDER:
        previous_s = _total_s(covered)
        covered = _merge_spans([*covered, *_clip_spans(spans[kind], window)])
        seconds[kind] = _total_s(covered) - previous_s
    collectives = _merge_spans([*pauses, *_clip_spans(spans[COLLECTIVES], window)])
    return seconds, _total_s(collectives) - _total_s(pauses) - seconds[COLLECTIVES]


def _clip_spans(spans: Iterable[Span], window: Span) -> list[Span]:
    """Return the parts of `spans` within `window`."""
    inside = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in inside if start < end]


def _merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the union of `spans` as sorted spans without overlaps."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def _total_s(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


# --- kinds ----------------------------------------------------------------------------------------

# Opcodes of operations that only run others, which have their own events, or that do nothing.
_CONTAINER_OPCODES = frozenset(
    {
        *("while", "conditional", "call", "tuple", "get-tuple-element", "parameter"),
        *("constant", "bitcast"),
    }
)
_COLLECTIVES = frozenset(
    {
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast", "send", "recv"),
    }
)
_CONTAINER_NAME = re.compile(r"(?:while|conditional|call)(?:\.\d+)?$")
_MATMULS = frozenset(("dot", "convolution", "ragged-dot", "scaled-dot"))
# The jax.named_scope `attention`, alone or inside the scopes that differentiation adds.
_SCOPE = re.compile(r"(?:^|[/(;])attention(?:$|[/);])")
# Parts of kernel names.
_ATTENTION = re.compile(r"fmha|flash|splash|dot_product_attention", re.IGNORECASE)
_MATMUL = re.compile(r"gemm|matmul|cutlass|nvjet|xmma|conv(?!ert)|(?:^|[_\W])dot", re.IGNORECASE)
_COLLECTIVE = re.compile(
    "nccl|" + "|".join(_COLLECTIVES - {"send", "recv"}).replace("-", "[-_]?"), re.IGNORECASE
)
_MODULE = re.compile(r"HloModule ([\w.\-]+)")
# The scopes of an operation in the traced program.
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


def program_kinds(texts: Iterable[str]) -> dict[str, str | None]:
    """Return the kind of each operation of compiled programs by `program/operation`.

    The kind is None for operations that only run others. Some traces do not name the program, so
    the name of each operation alone is also a key, with the kind in the first program that has it.
    """
    kinds: dict[str, str | None] = {}
    for text in texts:
        module, program = _first_group(_MODULE, text), Program.from_text(text)
        for computation in program.computations.values():
            for operation in computation:
                kind = _operation_kind(operation, program)
                kinds[f"{module}/{operation.name}"] = kind
                kinds.setdefault(operation.name, kind)
    return kinds


def kernel_kind(name: str) -> str | None:
    """Return the kind of a kernel, or of an operation in an unknown program, by its name."""
    if _CONTAINER_NAME.match(name):
        return None
    if _COLLECTIVE.search(name):
        return COLLECTIVES
    if _ATTENTION.search(name):
        return ATTENTION
    return MATMUL if _MATMUL.search(name) else ELEMENTWISE


def _operation_kind(operation: Operation, program: Program) -> str | None:
    if operation.kind in _CONTAINER_OPCODES:
        return None
    parts = [operation, *program.fused_operations(operation)]
    # An asynchronous operation is a pair, such as all-gather-start and all-gather-done.
    if any(re.sub(r"-(?:start|update|done)$", "", part.kind) in _COLLECTIVES for part in parts):
        return COLLECTIVES
    targets = [_first_group(_TARGET, part.attributes) for part in parts]
    scope = _first_group(_OP_NAME, operation.attributes)
    scopes = [scope] if scope else [_first_group(_OP_NAME, part.attributes) for part in parts]
    if any(map(_SCOPE.search, scopes)) or any(map(_ATTENTION.search, targets)):
        return ATTENTION
    is_matmul = any(part.kind in _MATMULS for part in parts)
    is_matmul = is_matmul or any(target and kernel_kind(target) == MATMUL for target in targets)
    return MATMUL if is_matmul else ELEMENTWISE


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


# --- the trace ------------------------------------------------------------------------------------

# Names of our annotations: a step, and a pause for an evaluation or a save.
STEP, PAUSE = "train", "jaxlaunch pause"
# The pattern does not match the parts of a chip, such as SparseCores.
_HOST, _DEVICE = "/host:CPU", re.compile(r"/device:\w+:\d+$")
# Lines with operations: the streams of a GPU, and one line of a TPU.
_LINES = re.compile(r"Stream|XLA Ops$")
# On TPUs the name of an event is the text of its operation.
_TEXT = re.compile(r"%?([\w.\-]+) = ")
# Beginnings of names of events that are not operations.
_THREAD_EVENTS = ("end: ", "Threadpool", "ThunkExecutor")
# Operation of the compiled programs -> kind.
Kinds = Mapping[str, str | None]


class Trace(NamedTuple):
    """The part of a trace that a breakdown needs, with times in seconds since its start."""

    ops: list[Op]
    steps: list[Span]
    pauses: list[Span]


def read_trace(path: Path, kinds: Kinds) -> Trace:
    """Read the trace in a file with JAX's own reader, which does not need TensorFlow."""
    with warnings.catch_warnings():
        # Under `-W error`, a warning of Python 3.12 about the reader's types, which nanobind
        # causes, would end the process (jaxlib 0.11).
        warnings.simplefilter("ignore", DeprecationWarning)
        return read_planes(ProfileData.from_file(str(path)).planes, kinds)


def read_planes(planes: Any, kinds: Kinds) -> Trace:
    """Read the trace from JAX's planes: one of the host, and one of each device."""
    trace = Trace([], [], [])
    host_ops: list[Op] = []
    for plane in planes:
        for line in plane.lines:
            if plane.name == _HOST:
                host_ops += _read_host_line(line.events, kinds, trace)
            elif _DEVICE.match(plane.name) and _LINES.match(line.name):
                for event in line.events:
                    text = _TEXT.match(event.name)
                    stats = {"hlo_op": text[1]} if text else dict(event.stats)
                    trace.ops.extend(_read_op(event, stats, kinds, plane.name))
    # Operations on threads of the host only count if there are no other devices.
    if not trace.ops:
        trace.ops.extend(host_ops)
    return trace


def _read_host_line(events: Any, kinds: Kinds, trace: Trace) -> Iterator[Op]:
    """Yield the operations of CPU devices on a thread; add steps and pauses to `trace`."""
    for event in events:
        if event.name == STEP:
            trace.steps.append(_event_span(event))
        elif event.name == PAUSE:
            trace.pauses.append(_event_span(event))
        # Most events of these threads are not operations, and reading their statistics is slow.
        elif event.duration_ns > 0 and not event.name.startswith(_THREAD_EVENTS):
            stats = dict(event.stats)
            if "hlo_op" in stats:
                yield from _read_op(event, stats, kinds, f"cpu:{stats.get('device_ordinal', 0)}")


def _read_op(event: Any, stats: Mapping[str, Any], kinds: Kinds, device: str) -> Iterator[Op]:
    name = str(stats.get("hlo_op") or event.name)
    key = next((key for key in (f"{stats.get('hlo_module')}/{name}", name) if key in kinds), None)
    kind = kernel_kind(event.name) if key is None else kinds[key]
    if kind is not None:
        yield Op(name, kind, device, _event_span(event))


def _event_span(event: Any) -> Span:
    return event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
