"""Reads a trace of JAX's profiler: which operations ran when, and when the steps and their pauses were.

JAX's own reader, jax.profiler.ProfileData, does without TensorFlow (jax 0.10 and 0.11 are alike).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jax.profiler import ProfileData

from jaxlaunch.trainer.profiling import breakdown
from jaxlaunch.trainer.profiling.breakdown import Op, Span

STEP, PAUSE = "train", "jaxlaunch pause"  # names of our annotations: a step, and time of no step
_HOST, _DEVICE = "/host:CPU", re.compile(r"/device:\w+:\d+$")  # the parts of a chip, such as SparseCores, do not match
# On GPU a stream's kernels name their operation. On TPU operations are events of a line, which begin with their text.
_LINES = re.compile(r"Stream|XLA Ops$")
_TEXT = re.compile(r"%?([\w.\-]+) = ")


class Event(Protocol):
    """What the reader returns of an event."""

    name: str
    start_ns: float
    duration_ns: float
    stats: Any  # pairs of name and value


class Trace(NamedTuple):
    """The part of a trace that a breakdown needs; times in seconds since its beginning."""

    ops: list[Op]
    steps: list[Span]
    pauses: list[Span]


def read(path: Path, known: Mapping[str, str | None]) -> Trace:
    """The trace in a file; `known` has the kinds of the operations of the train steps."""
    with warnings.catch_warnings():
        # Under `-W error` Python 3.12's warning about the reader's types ends the process (jaxlib 0.11, by nanobind).
        warnings.simplefilter("ignore", DeprecationWarning)
        return of_planes(ProfileData.from_file(str(path)).planes, known)


def of_planes(planes: Any, known: Mapping[str, str | None]) -> Trace:
    """The trace of JAX's planes: one of the host, one of each device, each of lines of events."""
    found = Trace([], [], [])
    on_host: list[Op] = []
    for plane in planes:
        if plane.name == _HOST:
            for line in plane.lines:
                on_host += _host_line(line.events, known, found)
        elif _DEVICE.match(plane.name):
            for line in plane.lines:
                if _LINES.match(line.name):
                    found.ops.extend(_ops(line.events, known, plane.name))
    found.ops.extend([] if found.ops else on_host)  # with devices, what the host computes is no device time
    return found


def _host_line(events: Any, known: Mapping[str, str | None], found: Trace) -> Iterator[Op]:
    """The operations that CPU devices run on one thread; steps and pauses go to `found`."""
    for event in events:
        if event.name == STEP:
            found.steps.append(_span(event))
        elif event.name == PAUSE:
            found.pauses.append(_span(event))
        elif _may_be_op(event):
            stats = dict(event.stats)
            if "hlo_op" in stats:
                yield from _op(event, stats, known, f"cpu:{stats.get('device_ordinal', 0)}")


def _may_be_op(event: Event) -> bool:
    """Whether it may be an operation: most events of a CPU's threads are not, and reading statistics takes time."""
    return not event.name.startswith(("end: ", "Threadpool", "ThunkExecutor")) and event.duration_ns > 0


def _ops(events: Any, known: Mapping[str, str | None], device: str) -> Iterator[Op]:
    for event in events:
        text = _TEXT.match(event.name)
        yield from _op(event, {"hlo_op": text[1]} if text else dict(event.stats), known, device)


def _op(event: Event, stats: Mapping[str, Any], known: Mapping[str, str | None], device: str) -> Iterator[Op]:
    name = str(stats.get("hlo_op") or event.name)
    key = next((key for key in (f"{stats.get('hlo_module')}/{name}", name) if key in known), None)
    kind = breakdown.of_kernel(event.name) if key is None else known[key]
    if kind is not None:
        yield Op(name, kind, device, _span(event))


def _span(event: Event) -> Span:
    return event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
