"""Our ViT's train step against Hugging Face's Flax ViT under a tutorial's, PyTorch eager beside them: one thread each.

All start from the same weights and are given the same batch, float32 and AdamW, and must agree on the losses. Each is
a process of its own, held to one core; they take their steps in turn. Ours has the environment that the launcher gives
a train block on CPU devices, the others what their users have; once more beside them, Flax has the launcher's too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import environment
from benchmarks.side import Cost, Side
from benchmarks.table import Row, finish, log, median, ms
from launcher.agent.host.environment import TRAINER

PAIRS = 7
OURS = TRAINER["cpu"]
FLAX = "Hugging Face Flax"
OTHERS: Mapping[str, tuple[str, Mapping[str, str]]] = {  # module and environment
    FLAX: ("benchmarks.vit_flax", {}),
    f"{FLAX} in our environment": ("benchmarks.vit_flax", OURS),
    "PyTorch eager": ("benchmarks.vit_torch", {}),
}
SHAPES: Mapping[str, tuple[float, dict[str, Any]]] = {
    "ViT-S/16, 224 px, batch 8": (
        1.0,
        {"layers": 12, "width": 384, "heads": 6, "image": [224, 224], "patch": 16, "classes": 1000, "batch": 8},
    ),
    "ViT 6 × 192, 32 px, batch 64": (
        0.9,
        {"layers": 6, "width": 192, "heads": 3, "image": [32, 32], "patch": 4, "classes": 10, "batch": 64},
    ),
}
SAME = 1e-4  # relative difference of losses of one model; after a few steps ten times that


def measured(sizes: Mapping[str, Any], pairs: int, sides: Sequence[str]) -> dict[str, list[Cost]]:
    """What `pairs` steps cost each side after two that are not counted. Raises SystemExit where the losses differ."""
    python, core = environment.python(), min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        document = json.dumps({"lr": 1e-4, **sizes})
        ours = sys.executable, "benchmarks.vit_ours"
        subprocess.run([ours[0], "-m", ours[1], folder, document], check=True)
        running = {"ours": Side(*ours, [folder], core, OURS)}
        for name in sides:
            module, environ = OTHERS[name]
            running[name] = Side(python, module, [folder], core, environ)
        for name, side in running.items():
            log(f"  {name}: {side.versions}")
        rounds = [{name: side.step() for name, side in running.items()} for _ in range(2 + pairs)]
        for side in running.values():
            side.close()
    for number, tolerance in ((0, SAME), (-1, 10 * SAME)):
        losses = {name: cost.loss for name, cost in rounds[number].items()}
        if any(abs(loss - losses["ours"]) > tolerance * losses["ours"] for loss in losses.values()):
            raise SystemExit(f"not the same model: the losses are {losses}")
    return {name: [each[name] for each in rounds[2:]] for name in running}


def rows(name: str, bound: float, costs: Mapping[str, Sequence[Cost]]) -> list[Row]:
    return [
        Row(
            f"our train step over that of {other}, {name}",
            median([ours.seconds / theirs.seconds for ours, theirs in zip(costs["ours"], costs[other], strict=True)]),
            bound if other == FLAX else None,
            detail(costs["ours"], costs[other]),
        )
        for other in costs
        if other != "ours"
    ]


def detail(ours: Sequence[Cost], theirs: Sequence[Cost]) -> str:
    wall = [ms(median([cost.seconds for cost in costs])) for costs in (ours, theirs)]
    cpu = [ms(median([cost.cpu_seconds for cost in costs])) for costs in (ours, theirs)]
    ratio = median([one.cpu_seconds / other.cpu_seconds for one, other in zip(ours, theirs, strict=True)])
    return f"{wall[0]} over {wall[1]}; CPU time {cpu[0]} over {cpu[1]}, ratio {ratio:.3f}; median of {len(ours)} pairs"


def main() -> int:
    chosen = [name for name in SHAPES if all(word in name for word in sys.argv[1:])]
    found = []
    for name in chosen:
        log(f"vit: {name}")
        bound, sizes = SHAPES[name]
        found += rows(name, bound, measured(sizes, PAIRS, tuple(OTHERS)))
    return finish(found)


if __name__ == "__main__":
    sys.exit(main())
