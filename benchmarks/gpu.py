"""Training speed on one accelerator: ViT-B/16 in images/s, and a decoder of about 1 B at length 2048 in tokens/s.

    python -m benchmarks.gpu [--beside PYTHON] [--small]

bf16 and AdamW; one batch that lies on the device, batches that are made up as they are asked for, and batches that the
trainer's own pipeline reads from a file. With the interpreter of an environment that has others' models of the same
sizes, those run beside ours: PyTorch's under torch.compile, SDPA and bf16 autocast, Flax's ViT under a plain jitted
step. `--small` runs the same code at sizes for a CPU. What our steps are made of goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import jax

from benchmarks.side import ROOT
from benchmarks.table import Row, emit, median, ms, say
from trainer import flops, mesh
from trainer.data import array_record, records
from trainer.data.pipeline import Pipeline
from trainer.data.source import Source
from trainer.kernels import fitted
from trainer.profiling.profiler import Profiler
from trainer.progress import Progress
from trainer.spec import CLASSIFY, LM, ArrayRecord, Profile, TrainSpec
from trainer.step import Step
from trainer.task import load

WARM, STEPS, TRACED = 3, 20, 5
FILE = "examples.array_record"
VIT = {"layers": 12, "width": 768, "heads": 12, "patch": 16, "image": [224, 224], "classes": 1000}
DECODER = {"layers": 24, "width": 2048, "heads": 16, "hidden": 5504, "vocab": 32_000, "length": 2048}
SMALL_VIT = VIT | {"layers": 2, "width": 32, "heads": 2, "image": [32, 32], "classes": 10}
SMALL_DECODER = DECODER | {"layers": 2, "width": 32, "heads": 2, "hidden": 64, "vocab": 64, "length": 32}
# Kind -> what is counted, sizes and batch, and both on a CPU.
MODELS: Mapping[str, tuple[str, dict[str, Any], int, dict[str, Any], int]] = {
    "vit": ("ViT-B/16, images/s", VIT, 512, SMALL_VIT, 4),
    "decoder": ("decoder of 1.3 B, tokens/s", DECODER, 16, SMALL_DECODER, 2),
}
# Name -> module, and the kinds it has.
OTHERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "PyTorch compile": ("benchmarks.gpu_torch", ("vit", "decoder")),
    "Hugging Face Flax": ("benchmarks.gpu_flax", ("vit",)),
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
        self.spec, self.task, self.source = spec, task, source
        self.step = Step(task, spec, mesh.build(spec.mesh, jax.devices()[:1]), 1000)
        self.pieces = batch * (1 if kind == "vit" else sizes["length"])  # of a step: what is counted
        self.first = self.step.put(self.pipeline(source).batch(0))
        self.step.compile_train(self.first)

    def pipeline(self, source: Source) -> Pipeline:
        """As the trainer's own."""
        rows, threads = self.spec.batch, self.spec.data.threads
        return Pipeline(
            source,
            self.task.example,
            batch=rows,
            rows=range(rows),
            seed=0,
            shuffle=True,
            prefetch=self.spec.data.prefetch,
            threads=threads,
        )

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

    def made_up(self) -> Iterator[Any]:
        return self._batches(self.source)

    def read(self, folder: Path) -> Iterator[Any]:
        """The same examples out of a file, which the system's cache holds: it was just written."""
        records.write(folder / FILE, map(self.source.__getitem__, range(len(self.source))))
        source = array_record.source(ArrayRecord(source="array_record", path=str(folder / FILE)), "train")
        assert source is not None, "no part of it is held out"
        return self._batches(source)

    def _batches(self, source: Source) -> Iterator[Any]:
        spans = [range(step, step + 1) for step in range(WARM + STEPS)]
        return iter(self.pipeline(source).iterate(spans, self.step.put))

    def explain(self, folder: Path) -> None:
        """What a step is made of, on stderr."""
        state = self.step.init()
        profiler = Profiler(
            Profile(at=WARM, steps=TRACED),
            rank=0,
            run_dir=str(folder),
            request=None,
            report=Progress(None),
            settle=lambda: jax.block_until_ready(state),
            programs=self.step.programs,
        )
        with contextlib.redirect_stdout(sys.stderr):
            for step in range(WARM + TRACED):
                profiler.between(step)
                state, _ = self.step.train(state, self.first)
            profiler.finish(WARM + TRACED)

    def used(self, seconds: float) -> str:
        """Model FLOP utilization with full attention, where the device's peak is known."""
        peak, count = flops.peak(jax.devices()[:1]), self.step.flops(self.first)
        return "MFU not known" if peak is None or count is None else f"MFU {count / seconds / peak:.1%}"


def theirs(python: str, module: str, kind: str, sizes: dict[str, Any], batch: int) -> float | None:
    """Seconds of a step of another's; None, and a word, where it does not run."""
    given = json.dumps({"kind": kind, "batch": batch, **sizes})
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, "-m", module, given], env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        say(f"left out: {module}'s {kind} ended with exit code {done.returncode}")
        return None
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def ours(speed: Speed) -> dict[str, float]:
    """Seconds of a step, by where its batches come from."""
    with tempfile.TemporaryDirectory() as folder:
        batches = {
            "a batch on the device": speed.kept(),
            "batches that are made up": speed.made_up(),
            "batches from a file": speed.read(Path(folder)),
        }
        took = {path: speed.seconds(each) for path, each in batches.items()}
        speed.explain(Path(folder))
    return took


def rows(kind: str, *, small: bool, python: str | None) -> list[Row]:
    name, large, many, tiny, few = MODELS[kind]
    sizes, batch = (tiny, few) if small else (large, many)
    others = {  # first: they want the device's memory too
        other: theirs(python, module, kind, sizes, batch)
        for other, (module, kinds) in OTHERS.items()
        if python is not None and kind in kinds
    }
    speed = Speed(kind, sizes, batch, small=small)
    found = []
    for path, seconds in ours(speed).items():
        what = f"{name}, {path}"
        detail = f"{speed.pieces / seconds:,.0f} a second, {ms(seconds)} a step of batch {batch}, {speed.used(seconds)}"
        found.append(Row(what, None, None, detail))
        for other, its in others.items():
            if its is not None:
                against = f"{ms(seconds)} over {ms(its)}, which is {speed.pieces / its:,.0f} a second"
                found.append(Row(f"{what}, over {other}", seconds / its, None, against))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", help="an interpreter with torch, jax, flax and transformers 4.57")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    if options.beside is None:
        say(f"no --beside: {' and '.join(OTHERS)} are left out")
    emit([row for kind in MODELS for row in rows(kind, small=options.small, python=options.beside)])


if __name__ == "__main__":
    main()
