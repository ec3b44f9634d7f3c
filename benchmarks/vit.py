"""Our ViT's train step, compared with Hugging Face's Flax and PyTorch ViTs on one thread each.

    python -m benchmarks.vit [--pairs N] [WORD …]

With WORDs, only the shapes whose names have all of them are measured. PyTorch is measured eager,
compiled, and with torch_xla if it is installed.

All sides have the same weights, batch and AdamW, and their losses must agree, in float32 and in
bf16, for which PyTorch uses autocast. Each side is a process on one core, and they take turns. Ours
has the environment variables that the launcher sets for a train block on CPU devices. The others
have none, but Flax is measured a second time with ours.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.side import Cost, Side
from benchmarks.table import Row, finish_benchmark, format_ms, log_progress, median
from jaxlaunch.launcher.agent.host.environment import TRAINER_VARIABLES

PAIRS = 7
# Packages whose versions in this environment the environment of the others must have.
SHARED = ("jax", "jaxlib", "flax", "optax", "numpy", "safetensors")
# transformers 4.57 is the last version with Flax. torch takes 5 GB.
REQUIREMENTS = ("transformers==4.57.6", "torch==2.15.0")
OURS = TRAINER_VARIABLES["cpu"]
FLAX = "Hugging Face Flax"
XLA = "torch_xla"
# Name of a side -> its module, arguments and environment variables.
OTHERS: Mapping[str, tuple[str, Sequence[str], Mapping[str, str]]] = {
    FLAX: ("benchmarks.vit_flax", [], {}),
    f"{FLAX} in our environment": ("benchmarks.vit_flax", [], OURS),
    "PyTorch eager": ("benchmarks.vit_torch", ["eager"], {}),
    "PyTorch compile": ("benchmarks.vit_torch", ["compile"], {}),
    XLA: ("benchmarks.vit_torch", ["xla"], {"PJRT_DEVICE": "CPU"}),
}
S16 = {
    "layers": 12,
    "width": 384,
    "heads": 6,
    "image": [224, 224],
    "patch": 16,
    "classes": 1000,
    "batch": 8,
}
SMALL = {
    "layers": 6,
    "width": 192,
    "heads": 3,
    "image": [32, 32],
    "patch": 4,
    "classes": 10,
    "batch": 64,
}
# Name of a shape -> the bound of our time over that of Flax, and its sizes.
SHAPES: Mapping[str, tuple[float | None, dict[str, Any]]] = {
    "ViT-S/16, 224 px, batch 8": (1.0, S16 | {"precision": "fp32"}),
    "ViT-S/16, 224 px, batch 8, bf16": (None, S16 | {"precision": "bf16"}),
    "ViT 6 × 192, 32 px, batch 64": (0.9, SMALL | {"precision": "fp32"}),
    "ViT 6 × 192, 32 px, batch 64, bf16": (None, SMALL | {"precision": "bf16"}),
}
# The largest relative difference between losses of the first step. For the last step it is ten
# times as large.
LOSS_TOLERANCE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 1e-2}


def build_environment() -> str:
    """Build the others' environment in the user's cache if necessary; return its interpreter."""
    packages = [*REQUIREMENTS, *(f"{name}=={importlib.metadata.version(name)}" for name in SHARED)]
    key = hashlib.sha256("\0".join([sys.version, *packages]).encode()).hexdigest()[:12]
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(cache, "jaxlaunch", "benchmarks", key)
    ready, python = folder / "ready", str(folder / "bin" / "python")
    if not ready.exists():
        log_progress(f"building {folder}: {', '.join(packages)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr
        )
        ready.touch()
    return python


def available_sides(python: str) -> tuple[str, ...]:
    """Return the names of the other sides that can run in the environment."""
    if subprocess.run([python, "-c", "import torch_xla"], capture_output=True).returncode == 0:
        return tuple(OTHERS)
    log_progress(f"{XLA} is not installed in {python}: left out")
    return tuple(name for name in OTHERS if name != XLA)


def measure_sides(
    sizes: Mapping[str, Any], pairs: int, sides: Sequence[str]
) -> dict[str, list[Cost]]:
    """Return the costs of `pairs` steps of each side, after two warm-up steps.

    Raises SystemExit if the losses differ.
    """
    python, core = build_environment(), min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        document = json.dumps({"lr": 1e-4, **sizes})
        ours = "benchmarks.vit_ours"
        subprocess.run([sys.executable, "-m", ours, folder, document], check=True)
        running = {"ours": Side(sys.executable, ours, [folder], core, OURS)}
        for name in sides:
            module, arguments, environ = OTHERS[name]
            running[name] = Side(python, module, [folder, *arguments], core, environ)
        for name, side in running.items():
            log_progress(f"  {name}: {side.versions}")
        rounds = [{name: side.step() for name, side in running.items()} for _ in range(2 + pairs)]
        for side in running.values():
            side.close()
    first_tolerance = LOSS_TOLERANCE[sizes["precision"]]
    for step, tolerance in ((0, first_tolerance), (-1, 10 * first_tolerance)):
        losses = {name: cost.loss for name, cost in rounds[step].items()}
        if any(abs(loss - losses["ours"]) > tolerance * losses["ours"] for loss in losses.values()):
            raise SystemExit(f"not the same model: the losses are {losses}")
    return {name: [costs[name] for costs in rounds[2:]] for name in running}


def ratio_rows(name: str, bound: float | None, costs: Mapping[str, Sequence[Cost]]) -> list[Row]:
    return [
        Row(
            f"our train step over that of {other}, {name}",
            median(
                [
                    ours.seconds / theirs.seconds
                    for ours, theirs in zip(costs["ours"], costs[other], strict=True)
                ]
            ),
            bound if other == FLAX else None,
            format_detail(costs["ours"], costs[other]),
        )
        for other in costs
        if other != "ours"
    ]


def format_detail(ours: Sequence[Cost], theirs: Sequence[Cost]) -> str:
    wall = [format_ms(median([cost.seconds for cost in costs])) for costs in (ours, theirs)]
    cpu = [format_ms(median([cost.cpu_seconds for cost in costs])) for costs in (ours, theirs)]
    ratio = median(
        [cost.cpu_seconds / other.cpu_seconds for cost, other in zip(ours, theirs, strict=True)]
    )
    return (
        f"{wall[0]} over {wall[1]}; CPU time {cpu[0]} over {cpu[1]}, ratio {ratio:.3f}; median "
        f"of {len(ours)} pairs"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vit", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="steps that are measured")
    parser.add_argument("words", nargs="*", help="only shapes whose names have all of these")
    options = parser.parse_args()
    chosen = [name for name in SHAPES if all(word in name for word in options.words)]
    sides, table_rows = available_sides(build_environment()), []
    for name in chosen:
        log_progress(f"vit: {name}")
        bound, sizes = SHAPES[name]
        table_rows += ratio_rows(name, bound, measure_sides(sizes, options.pairs, sides))
    return finish_benchmark(table_rows)


if __name__ == "__main__":
    sys.exit(main())
