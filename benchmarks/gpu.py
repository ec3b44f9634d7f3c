"""Training speed on one accelerator: ViT-B/16 in images/s, a decoder of 1.3 B in tokens/s.

    python -m benchmarks.gpu [--python PYTHON] [--small]

All models train in bf16 with AdamW. Ours is measured with one batch that stays on the device, with
synthetic batches, and with batches that the trainer's pipeline reads from a file. `--python` names
the interpreter of an environment with other implementations of the same sizes, which are then
measured too: PyTorch's with SDPA and bf16 autocast, compiled and eager, and Flax's ViT with a plain
jitted step. Each runs in its own process, ours with the environment variables that the launcher
sets for a train block. `--small` runs the same code with sizes for a CPU. A breakdown of our steps
is printed on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import side
from benchmarks.table import Row, finish_benchmark, format_ms, log_progress
from jaxlaunch.launcher.agent.host.environment import TRAINER_VARIABLES

OPTIMIZER = {"lr": 3e-4, "clip": 1.0}
VIT = {"layers": 12, "width": 768, "heads": 12, "patch": 16, "image": [224, 224], "classes": 1000}
DECODER = {
    "layers": 24,
    "width": 2048,
    "heads": 16,
    "hidden": 5504,
    "vocab": 32_000,
    "length": 2048,
}
SMALL_VIT = VIT | {"layers": 2, "width": 32, "heads": 2, "image": [32, 32], "classes": 10}
SMALL_DECODER = DECODER | {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "hidden": 64,
    "vocab": 64,
    "length": 32,
}


class Model(NamedTuple):
    """A model to measure.

    Attributes:
        label: Name of the model and unit of its speed.
        sizes: Sizes of the model.
        batch: Number of rows in a batch.
        small_sizes: Sizes for a CPU.
        small_batch: Number of rows in a batch on a CPU.
        floor: Smallest acceptable speed on an H200, per second.
        goal: Speed that we would like to reach on an H200, per second.
    """

    label: str
    sizes: dict[str, Any]
    batch: int
    small_sizes: dict[str, Any]
    small_batch: int
    floor: float
    goal: float


MODELS: Mapping[str, Model] = {
    "vit": Model("ViT-B/16, images/s", VIT, 512, SMALL_VIT, 4, 2_900, 3_750),
    "decoder": Model("decoder of 1.3 B, tokens/s", DECODER, 16, SMALL_DECODER, 2, 45_500, 52_000),
}
H200 = "NVIDIA H200"
# Name -> module, its further options, and the kinds of models that it has.
OTHERS: Mapping[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "PyTorch compile": ("benchmarks.gpu_torch", {"compile": True}, ("vit", "decoder")),
    "PyTorch eager": ("benchmarks.gpu_torch", {"compile": False}, ("vit", "decoder")),
    "Hugging Face Flax": ("benchmarks.gpu_flax", {}, ("vit",)),
}


def model_rows(kind: str, *, small: bool, python: str | None) -> list[Row]:
    """Return the speed of a kind of model for each source of batches, and ratios to the others."""
    model = MODELS[kind]
    sizes, batch = (model.small_sizes, model.small_batch) if small else (model.sizes, model.batch)
    options = {"kind": kind, "batch": batch, "small": small, **OPTIMIZER, **sizes}
    ours = side.run_alone(
        sys.executable, "benchmarks.gpu_ours", options, {} if small else TRAINER_VARIABLES["cuda"]
    )
    if ours is None:
        raise SystemExit(f"ours fails for {kind}")
    other_sides = {
        name: side.run_alone(python, module, options | extra, {})
        for name, (module, extra, kinds) in OTHERS.items()
        if python is not None and kind in kinds
    }
    # The images or tokens of a step.
    items = batch * sizes.get("length", 1)
    result_rows = []
    for batches, seconds in ours["seconds"].items():
        label, speed = f"{model.label}, {batches}", items / seconds
        utilization = (
            "MFU not known"
            if ours["peak"] is None
            else f"MFU {ours['flops'] / seconds / ours['peak']:.1%}"
        )
        detail = f"{speed:,.0f} a second, {format_ms(seconds)} a step of batch {batch}"
        result_rows.append(Row(label, None, None, f"{detail}, {utilization}"))
        for name, other_s in other_sides.items():
            if other_s is not None:
                other_speed = f"{items / other_s:,.0f} a second"
                detail = f"{format_ms(seconds)} over {format_ms(other_s)}, which is {other_speed}"
                result_rows.append(Row(f"{label}, over {name}", seconds / other_s, None, detail))
    if ours["device"] == H200:
        result_rows += bound_rows(
            model, result_rows[0].what, items / next(iter(ours["seconds"].values()))
        )
    return result_rows


def bound_rows(model: Model, label: str, speed: float) -> list[Row]:
    """Return the floor and the goal of an H200 over the measured speed."""
    return [
        Row(
            f"the floor of {model.floor:,.0f} over {label}",
            model.floor / speed,
            1.0,
            f"{speed:,.0f} a second",
        ),
        Row(
            f"the goal of {model.goal:,.0f} over {label}",
            model.goal / speed,
            None,
            f"{speed:,.0f} a second",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python", help="an interpreter with torch, jax, flax and transformers 4.57"
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    if options.python is None:
        log_progress(f"no --python: {', '.join(OTHERS)} are left out")
    return finish_benchmark(
        [
            row
            for kind in MODELS
            for row in model_rows(kind, small=options.small, python=options.python)
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
