"""The results of a benchmark: ratios to a baseline of the same run, and their bounds."""

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
    """One result.

    Attributes:
        what: Description of the ratio.
        ratio: The ratio, or None if only `detail` is reported.
        bound: Largest acceptable ratio, or None without a bound.
        detail: The measured numbers.
    """

    what: str
    ratio: float | None
    bound: float | None
    detail: str

    @property
    def holds(self) -> bool:
        """Whether the ratio is within its bound, if it has one."""
        return self.ratio is None or self.bound is None or self.ratio <= self.bound


def paired_row(
    label: str,
    pairs: Sequence[tuple[Any, Any]],
    units: float,
    bound: float | None,
    form: str = "{:,.0f}",
) -> Row:
    """Return the median ratio of our cost to theirs.

    The ratio is that of processor times, because the machine may have other load.

    Args:
        label: Description of the ratio.
        pairs: Pairs of our cost and theirs, with `seconds` and `cpu_seconds`.
        units: Number of items that each cost is for, to report speeds.
        bound: Bound of the ratio.
        form: Format of a speed.
    """
    ratios, texts = [], []
    for name, unit in (("cpu_seconds", " a second of a core"), ("seconds", "")):
        costs = [[getattr(pair[side], name) for pair in pairs] for side in (0, 1)]
        ratios.append(median([ours / theirs for ours, theirs in zip(*costs, strict=True)]))
        speeds = [form.format(units / median(side)) for side in costs]
        texts.append(f"{speeds[0]}{unit} over {speeds[1]}, {1 / ratios[-1]:.2f} ×")
    return Row(
        label,
        ratios[0],
        bound,
        f"{texts[0]}; by the clock {texts[1]}; median of {len(pairs)} pairs",
    )


def emit_rows(rows: Sequence[Row]) -> None:
    """Print the rows as one line of JSON for the process that started the benchmark."""
    print(json.dumps([dataclasses.asdict(row) for row in rows]), flush=True)


def finish_benchmark(rows: Sequence[Row]) -> int:
    """Print the rows, also as a table on stderr, and return the exit code."""
    log_progress(format_table(rows))
    emit_rows(rows)
    return exit_code(rows)


def exit_code(rows: Sequence[Row]) -> int:
    """Return 1 if a ratio exceeds its bound."""
    return int(not all(row.holds for row in rows))


def read_rows(stdout: str) -> list[Row]:
    """Return the rows that `emit_rows` printed."""
    return [Row(**fields) for fields in json.loads(stdout.strip().splitlines()[-1])]


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| what | ratio | bound | holds | measured |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        bound = "" if row.bound is None else f"≤ {row.bound:g}"
        holds = "" if row.bound is None else ("yes" if row.holds else "**no**")
        lines.append(f"| {row.what} | {ratio} | {bound} | {holds} | {row.detail} |")
    return "\n".join(lines)


def describe_machine() -> str:
    """Return the cores and the platform of this machine and the versions of Python and jax."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    return f"{cores} cores, {platform.system()} {platform.machine()}, {versions}"


def format_ms(seconds: float) -> str:
    """Return seconds as milliseconds with three digits."""
    return f"{seconds * 1e3:.3g} ms"


def median(values: Sequence[float]) -> float:
    """Return the median. Some of the environments have no NumPy."""
    return statistics.median(values)


def log_progress(text: str) -> None:
    """Print progress on stderr, because stdout is for the rows."""
    print(text, file=sys.stderr, flush=True)
