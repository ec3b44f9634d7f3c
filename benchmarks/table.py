"""What a benchmark found: a ratio against a baseline of the same run, and the bound it is held to."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """One finding."""

    what: str
    ratio: float | None  # None: only reported
    bound: float | None
    detail: str

    @property
    def holds(self) -> bool:
        return self.ratio is None or self.bound is None or self.ratio <= self.bound


def emit(rows: Sequence[Row]) -> None:
    """The rows as the last line of stdout, for the process that asked."""
    print(json.dumps([dataclasses.asdict(row) for row in rows]), flush=True)


def finish(rows: Sequence[Row]) -> int:
    """Of a benchmark that is run by itself: the rows as a table too, on stderr. The exit code, 1 where one is over its
    bound."""
    say(markdown(rows))
    emit(rows)
    return failed(rows)


def failed(rows: Sequence[Row]) -> int:
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
    """Where this was measured, in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    return f"{cores} cores, {platform.system()} {platform.machine()}, {versions}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def say(text: str) -> None:
    """Talk, on stderr: stdout is for the table."""
    print(text, file=sys.stderr, flush=True)
