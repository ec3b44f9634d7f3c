"""Training speed on one accelerator: ViT-B/16 in images/s, a decoder of 1 B in tokens/s.

    python -m benchmarks.gpu [--python PYTHON] [--small]

bf16 and AdamW; one batch that stays on the device, synthetic batches, and batches that the
trainer's own pipeline reads from a file. With the interpreter of an environment that has others'
models of the same sizes, those are measured too: PyTorch's with SDPA and bf16 autocast, compiled
and eager, and Flax's ViT under a plain jitted step. Each is a process of its own, ours in the
environment that the launcher gives a train block. `--small` runs the same code at sizes for a CPU.
What our steps are made of goes to stderr.
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
    """What is measured on a GPU, and on a CPU."""

    what: str
    sizes: dict[str, Any]
    batch: int
    small: dict[str, Any]
    few: int  # a batch on a CPU
    floor: float  # a second, on an H200
    goal: float


MODELS: Mapping[str, Model] = {
    "vit": Model("ViT-B/16, images/s", VIT, 512, SMALL_VIT, 4, 2_900, 3_750),
    "decoder": Model("decoder of 1.3 B, tokens/s", DECODER, 16, SMALL_DECODER, 2, 45_500, 52_000),
}
H200 = "NVIDIA H200"
# Name -> module, its arguments, and the kinds of model it has.
OTHERS: Mapping[str, tuple[str, dict[str, Any], Sequence[str]]] = {
    "PyTorch compile": ("benchmarks.gpu_torch", {"compile": True}, ("vit", "decoder")),
    "PyTorch eager": ("benchmarks.gpu_torch", {"compile": False}, ("vit", "decoder")),
    "Hugging Face Flax": ("benchmarks.gpu_flax", {}, ("vit",)),
}


def model_rows(kind: str, *, small: bool, python: str | None) -> list[Row]:
    """Return the speed of one kind of model by its batches' source, and ratios to others'."""
    model = MODELS[kind]
    sizes, batch = (model.small, model.few) if small else (model.sizes, model.batch)
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
    pieces = batch * sizes.get("length", 1)  # of a step: what is counted
    result_rows = []
    for path, seconds in ours["seconds"].items():
        label, speed = f"{model.what}, {path}", pieces / seconds
        used = (
            "MFU not known"
            if ours["peak"] is None
            else f"MFU {ours['flops'] / seconds / ours['peak']:.1%}"
        )
        result_rows.append(
            Row(
                label,
                None,
                None,
                f"{speed:,.0f} a second, {format_ms(seconds)} a step of batch {batch}, {used}",
            )
        )
        for name, its in other_sides.items():
            if its is not None:
                its_rate = f"{pieces / its:,.0f} a second"
                against = f"{format_ms(seconds)} over {format_ms(its)}, which is {its_rate}"
                result_rows.append(Row(f"{label}, over {name}", seconds / its, None, against))
    if ours["device"] == H200:
        result_rows += bound_rows(
            model, result_rows[0].what, pieces / next(iter(ours["seconds"].values()))
        )
    return result_rows


def bound_rows(model: Model, label: str, speed: float) -> list[Row]:
    """Return rows that compare the speed on an H200 with its floor and its goal."""
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
