"""Compile small trainings for absent TPUs in one process; print results as one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxlaunch.trainer import plan, spec
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken

SIZES = {"layers": 2, "width": 256, "heads": 2, "vocab": 512, "length": 128}
DECODER: dict[str, Any] = {"kind": "decoder", "hidden": 512, **SIZES}
EXPERTS: dict[str, Any] = {**DECODER, "experts": 4, "experts_per_token": 2}
VIT: dict[str, Any] = {
    "kind": "vit",
    "image": [32, 32],
    "patch": 8,
    "layers": 2,
    "width": 256,
    "heads": 2,
    "classes": 10,
}
LARGE: dict[str, Any] = {
    **DECODER,
    "layers": 256,
}  # one scan: of small products, which compile in less time
ONE, FLAT = Chips("v5e", 1, 1, 1, "1x1"), Chips("v5e", 2, 4, 1, "2x4")
CASES: dict[str, tuple[Chips, dict[str, Any]]] = {
    "fsdp and mp": (FLAT, {"model": DECODER, "mesh": {"fsdp": 4, "mp": 2}, "accumulate": 2}),
    "two slices": (Chips("v5e", 2, 4, 2, "2x2"), {"model": DECODER, "mesh": {"dp": 2, "fsdp": 4}}),
    "experts": (Chips("v5p", 2, 4, 1, "2x2x2"), {"model": EXPERTS, "mesh": {"fsdp": 2, "ep": 4}}),
    "images": (Chips("v6e", 1, 8, 1, "2x4"), {"model": VIT, "mesh": {"dp": 8}, "accumulate": 2}),
    "too large": (ONE, {"model": LARGE, "batch": 128, "remat": "none"}),
}


def compiled(chips: Chips, keys: dict[str, Any]) -> dict[str, Any]:
    """What the planner says of a training; its refusal where it refuses."""
    task = Classify() if keys["model"] is VIT else NextToken()
    name = "classify" if keys["model"] is VIT else "lm"
    optimizer = {"name": "adamw", "lr": 1e-3}
    train = spec.TrainSpec(
        **{"task": name, "batch": 16, "precision": "bf16", "optimizer": optimizer, **keys}
    )
    try:
        return plan.ahead_of_time(
            plan.with_synthetic_data(train, task), task, chips
        ).compile_or_shrink()
    except SpecError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    print(json.dumps({name: compiled(*CASES[name]) for name in sys.argv[1:] or CASES}))
