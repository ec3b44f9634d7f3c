"""The checkpoints of a run folder: which steps are whole, how large they are, and which evaluated best."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.report import jobs
from jaxlaunch.launcher.report.rows import Rows
from jaxlaunch.runs import layout

_MAX_MANIFEST = 64 << 20
_MOST = 200


def of(folder: Path, evals: Rows) -> list[dict[str, Any]]:
    """The steps in the run folder, the newest first: `verified` where a manifest says what they hold. No link is
    followed."""
    where = folder / layout.CHECKPOINTS
    try:
        at = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        steps = sorted((int(name) for name in os.listdir(at) if name.isdecimal()), reverse=True)[:_MOST]
    finally:
        os.close(at)
    best = _best(folder, evals, steps)
    return [
        {
            "step": step,
            "bytes": size,
            "verified": size is not None,
            "best": step == best,
            "where": f"{layout.CHECKPOINTS}/{step}",
        }
        for step in steps
        for size in (_bytes(where / str(step) / contract.MANIFEST, folder),)
    ]


def _bytes(manifest: Path, below: Path) -> int | None:
    """The bytes of a step's files, as its manifest says; None where it has none."""
    try:
        files = json.loads(regular_files.read(manifest, _MAX_MANIFEST, below=below))["manifest"]["files"]
        return sum(int(size) for size, _ in files.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _best(folder: Path, evals: Rows, steps: list[int]) -> int | None:
    """The step that evaluated best by the job's own metric, of those that are there."""
    metric, mode = jobs.best(folder)
    curve = evals.curves.get((metric or "").removeprefix("eval/"))
    kept = [point for point in (curve.points if curve else []) if int(point[0]) in steps and math.isfinite(point[2])]
    if not kept:
        return None
    choose = max if mode == "max" else min
    return int(choose(kept, key=lambda point: point[2])[0])
