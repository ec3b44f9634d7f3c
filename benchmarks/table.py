"""Results of a benchmark: ratios against a baseline of the same run, and their bounds."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One result."""

    what: str
    ratio: float | None  # None: only reported
    bound: float | None
    detail: str

    @property
    def holds(self) -> bool:
        """Whether the ratio is within its bound, or has none."""
        return self.ratio is None or self.bound is None or self.ratio <= self.bound


def paired_row(
    what: str,
    pairs: Sequence[tuple[Any, Any]],
    units: float,
    bound: float | None,
    form: str = "{:,.0f}",
) -> Row:
    """Return the ratio of costs by processor time, since the machine may be shared; `units` are what one cost is of."""
    ratios, texts = [], []
    for name, unit in (("cpu_seconds", " a second of a core"), ("seconds", "")):
        costs = [[getattr(pair[side], name) for pair in pairs] for side in (0, 1)]
        ratios.append(median([ours / theirs for ours, theirs in zip(*costs, strict=True)]))
        speeds = [form.format(units / median(side)) for side in costs]
        texts.append(f"{speeds[0]}{unit} over {speeds[1]}, {1 / ratios[-1]:.2f} ×")
    return Row(
        what, ratios[0], bound, f"{texts[0]}; by the clock {texts[1]}; median of {len(pairs)} pairs"
    )


def emit(rows: Sequence[Row]) -> None:
    """Prints the rows as one line of JSON on stdout, for the process that started the benchmark."""
    print(json.dumps([dataclasses.asdict(row) for row in rows]), flush=True)


def finish(rows: Sequence[Row]) -> int:
    """Ends a benchmark that is run by itself: also prints the rows as a table on stderr; returns the exit code."""
    log(markdown(rows))
    emit(rows)
    return failed(rows)


def failed(rows: Sequence[Row]) -> int:
    """The exit code: 1 where a ratio is over its bound."""
    return int(not all(row.holds for row in rows))


def read(stdout: str) -> list[Row]:
    """The rows that `emit` wrote."""
    return [Row(**fields) for fields in json.loads(stdout.strip().splitlines()[-1])]


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    lines = ["| what | ratio | bound | holds | measured |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        bound = "" if row.bound is None else f"≤ {row.bound:g}"
        holds = "" if row.bound is None else ("yes" if row.holds else "**no**")
        lines.append(f"| {row.what} | {ratio} | {bound} | {holds} | {row.detail} |")
    return "\n".join(lines)


def machine() -> str:
    """The machine and versions of the measurement, as text."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    return f"{cores} cores, {platform.system()} {platform.machine()}, {versions}"


def ms(seconds: float) -> str:
    """`seconds` as milliseconds, three digits."""
    return f"{seconds * 1e3:.3g} ms"


def median(values: Sequence[float]) -> float:
    """The median, without numpy: other environments may lack it."""
    return statistics.median(values)


def log(text: str) -> None:
    """Prints progress on stderr: stdout is for the rows."""
    print(text, file=sys.stderr, flush=True)
