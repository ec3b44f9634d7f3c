"""Compile every candidate of small jobs, for `test_tune`: `python -m … FILE [JOB…]`.

Needs libtpu on PYTHONPATH and, for the last, JAX's CUDA plugin; an hour on two cores. FILE keeps
what it has of jobs that are not named.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlaunch.trainer import tune
from jaxlaunch.trainer.aot.candidates import Choice
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.plan import with_synthetic_data
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.lm import NextToken

SIZES = {"kind": "decoder", "layers": 2, "heads": 4, "length": 512}
WIDE = {**SIZES, "width": 1024, "vocab": 512, "hidden": 2048}
NARROW = {**SIZES, "width": 512, "vocab": 4096, "hidden": 512}
EXPERTS = {**SIZES, "width": 512, "vocab": 512, "hidden": 512, "experts": 4, "experts_per_token": 2}
DEVICES = 4  # of each job
JOBS: dict[str, tuple[Chips, dict[str, Any], tuple[Choice, ...]]] = {
    "wide": (
        Chips("v5e", 1, 4, 1, "2x2"),
        {"model": WIDE, "batch": 8},
        ("mesh", "remat", "accumulate"),
    ),
    "a large vocabulary": (
        Chips("v6e", 1, 4, 1, "2x2"),
        {"model": NARROW, "batch": 16},
        ("mesh", "remat"),
    ),
    "experts": (Chips("h100", 1, 4), {"model": EXPERTS, "batch": 16}, ("mesh", "remat")),
}


def main(target: Path, jobs: Sequence[str]) -> None:
    """Writes the record after each job: what was traced, and seconds and peak of each candidate."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    result: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    for name in jobs or JOBS:
        chips, keys, over = JOBS[name]
        train = TrainSpec.model_validate(
            {
                "task": "lm",
                "data": {"source": "synthetic"},
                "precision": "bf16",
                "steps": 10,
                **keys,
            }
        )
        task = NextToken()
        search = tune.Search(with_synthetic_data(train, task), task, chips, over, is_measured=False)
        points = []
        while (tried := search.compile_next()) is not None:
            print(name, tried["changes"], tried.get("seconds", tried.get("refused")), flush=True)
            if "seconds" in tried:
                points.append(tried["candidate"] | {key: tried[key] for key in ("seconds", "peak")})
        result[name] = {"traced": dataclasses.asdict(search.traced), "points": points}
        target.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
