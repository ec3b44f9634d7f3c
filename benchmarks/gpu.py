"""Training speed on one accelerator: ViT-B/16 in images/s, and a decoder of about 1 B at length 2048 in tokens/s.

    python -m benchmarks.gpu [--torch PYTHON] [--small]

bf16 and AdamW; one batch that lies on the device, and batches as the trainer's own pipeline reads them. With the
interpreter of an environment that has torch and transformers, their models of the same sizes run beside ours:
torch.compile, SDPA, bf16 autocast. `--small` runs the same code at sizes for a CPU. What a step is made of, a run with
`profile: {at: 100}` says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise, repeat
from typing import Any

import jax

from benchmarks.side import ROOT
from benchmarks.table import Row, emit, median, ms, say
from trainer import flops, mesh
from trainer.data.pipeline import Pipeline
from trainer.kernels import fitted
from trainer.spec import CLASSIFY, LM, TrainSpec
from trainer.step import Step
from trainer.task import load

WARM, STEPS = 3, 20
VIT = {"layers": 12, "width": 768, "heads": 12, "patch": 16, "image": [224, 224], "classes": 1000}
DECODER = {"layers": 24, "width": 2048, "heads": 16, "hidden": 5504, "vocab": 32_000, "length": 2048}
SMALL_VIT = VIT | {"layers": 2, "width": 32, "heads": 2, "image": [32, 32], "classes": 10}
SMALL_DECODER = DECODER | {"layers": 2, "width": 32, "heads": 2, "hidden": 64, "vocab": 64, "length": 32}
# Kind -> what is counted, sizes and batch, and both on a CPU.
MODELS: Mapping[str, tuple[str, dict[str, Any], int, dict[str, Any], int]] = {
    "vit": ("ViT-B/16, images/s", VIT, 512, SMALL_VIT, 4),
    "decoder": ("decoder of 1.3 B, tokens/s", DECODER, 16, SMALL_DECODER, 2),
}


class Speed:
    """Our train step on this machine's first device."""

    def __init__(self, kind: str, sizes: dict[str, Any], batch: int, *, small: bool) -> None:
        shape = {"shape": [*sizes["image"], 3]} if kind == "vit" else {}
        spec = TrainSpec.model_validate(
            {
                "task": CLASSIFY if kind == "vit" else LM,
                "model": {"kind": kind, "scan": False, **sizes},
                "data": {"source": "synthetic", **shape},
                "mesh": {"dp": 1},
                "batch": batch,
                "precision": "bf16",
                "attention": "xla" if small else "cudnn",
            }
        )
        spec, told = fitted(spec, jax.devices()[0])
        if told:
            say(told)
        task = load(spec.task)()
        source = task.source(spec, "train")
        assert source is not None, "synthetic data has training examples"
        self.step = Step(task, spec, mesh.build(spec.mesh, jax.devices()[:1]), 1000)
        self.pipeline = Pipeline(
            source,
            task.example,
            batch=batch,
            rows=range(batch),
            seed=0,
            shuffle=True,
            prefetch=2,
            threads=spec.data.threads,
        )
        self.pieces = batch * (1 if kind == "vit" else sizes["length"])  # of a step: what is counted
        self.first = self.step.put(self.pipeline.batch(0))
        self.step.compile_train(self.first)

    def seconds(self, batches: Iterator[Any]) -> float:
        """Median time of a step, each dispatched before the one before it is waited for."""
        state, before, stamps = self.step.init(), None, []
        for batch in batches:
            state, metrics = self.step.train(state, batch)
            if before is not None:
                before["loss"].block_until_ready()
            before = metrics
            stamps.append(time.perf_counter())
        return median([after - since for since, after in pairwise(stamps[WARM:])])

    def kept(self) -> Iterator[Any]:
        return repeat(self.first, WARM + STEPS)

    def read(self) -> Iterator[Any]:
        spans = [range(step, step + 1) for step in range(WARM + STEPS)]
        return iter(self.pipeline.iterate(spans, self.step.put))

    def used(self, seconds: float) -> str:
        """Model FLOP utilization with full attention, where the device's peak is known."""
        peak, count = flops.peak(jax.devices()[:1]), self.step.flops(self.first)
        return "MFU not known" if peak is None or count is None else f"MFU {count / seconds / peak:.1%}"


def theirs(python: str, kind: str, sizes: dict[str, Any], batch: int) -> float | None:
    """Seconds of a step of PyTorch's; None, and a word, where it does not run."""
    given = json.dumps({"kind": kind, "batch": batch, **sizes})
    command, environ = [python, "-m", "benchmarks.gpu_torch", given], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        say(f"left out: torch's {kind} ended with exit code {done.returncode}")
        return None
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def rows(kind: str, *, small: bool, python: str | None) -> list[Row]:
    name, large, many, tiny, few = MODELS[kind]
    sizes, batch = (tiny, few) if small else (large, many)
    other = None if python is None else theirs(python, kind, sizes, batch)  # first: it wants the device's memory too
    speed = Speed(kind, sizes, batch, small=small)
    found = []
    for path, batches in (("a batch on the device", speed.kept()), ("batches as they are read", speed.read())):
        took = speed.seconds(batches)
        detail = f"{speed.pieces / took:,.0f} a second, {ms(took)} a step of batch {batch}, {speed.used(took)}"
        against = "" if other is None else f"; PyTorch compile {speed.pieces / other:,.0f}, {ms(other)}"
        found.append(Row(f"{name}, {path}", None if other is None else took / other, None, detail + against))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="an interpreter with torch and transformers")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    if options.torch is None:
        say("no --torch: PyTorch's side is left out")
    found = [row for kind in MODELS for row in rows(kind, small=options.small, python=options.torch)]
    emit(found)


if __name__ == "__main__":
    main()
