"""Our side of benchmarks.gpu: what steps take and what they are made of, on stdout and stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import jax

from benchmarks import side
from benchmarks.table import log_progress
from jaxlaunch.trainer.attention.availability import resolve_attention
from jaxlaunch.trainer.data import records
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.data.source import Source
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.numerics import flops
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.profiling.profiler import Profiler
from jaxlaunch.trainer.sources import array_record
from jaxlaunch.trainer.spec import CLASSIFY, LM, TASKS, ArrayRecord, Profile, TrainSpec
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.user_code import load_object

OURS = ("kind", "batch", "small", "lr", "clip")  # the options other than the model's sizes
FIRST, TRACED = 3, 5  # steps of the trace
FILE = "examples.array_record"


class Speed:
    """Our train step on this machine's first device."""

    def __init__(self, options: dict[str, Any]) -> None:
        kind, sizes = (
            options["kind"],
            {key: value for key, value in options.items() if key not in OURS},
        )
        shape = {"shape": [*sizes["image"], 3]} if kind == "vit" else {}
        spec = TrainSpec.model_validate(
            {
                "task": CLASSIFY if kind == "vit" else LM,
                "model": {"kind": kind, "scan": False, **sizes},
                "data": {"source": "synthetic", **shape},
                "mesh": {"dp": 1},
                "batch": options["batch"],
                "precision": "bf16",
                "attention": "xla" if options["small"] else "cudnn",
                "optimizer": {"name": "adamw", "lr": options["lr"], "clip": options["clip"]},
            }
        )
        spec, note = resolve_attention(spec, jax.devices()[0])
        if note:
            log_progress(note)
        task = load_object(TASKS.get(spec.task, spec.task))()
        source = task.source(spec, "train")
        assert source is not None, "synthetic data has training examples"
        self.spec, self.task, self.source = spec, task, source
        self.step = Step(task, spec, mesh.build_mesh(spec.mesh, jax.devices()[:1]), 1000)
        self.first = self.step.put_batch(self.pipeline(source).read_batch(0))
        self.step.compile_train(self.first)

    def pipeline(self, source: Source) -> Pipeline:
        """Return the pipeline that the trainer would build."""
        return Pipeline(
            source,
            self.task.example,
            batch=self.spec.batch,
            rows=range(self.spec.batch),
            seed=self.spec.seed,
            shuffle=self.spec.data.shuffle,
            prefetch=self.spec.data.prefetch,
            threads=self.spec.data.threads,
        )

    def seconds(self, batches: Iterator[Any]) -> float:
        """Return the median seconds of a step on these batches."""
        state = self.step.init_state()

        def launch() -> Any:
            nonlocal state
            state, metrics = self.step.train(state, next(batches))
            return metrics["loss"]

        return side.median_step_s(launch, jax.block_until_ready)

    def by_path(self, folder: Path) -> dict[str, float]:
        """Return the seconds of a step by its batches' source; the file is in the page cache."""
        records.write(folder / FILE, map(self.source.__getitem__, range(len(self.source))))
        written = array_record.open_source(
            ArrayRecord(source="array_record", path=str(folder / FILE)), "train"
        )
        assert written is not None, "no part of it is held out"
        return {
            "a batch on the device": self.seconds(repeat(self.first)),
            "batches that are made up": self.seconds(self._batches(self.source)),
            "batches from a file": self.seconds(self._batches(written)),
        }

    def _batches(self, source: Source) -> Iterator[Any]:
        spans = [range(step, step + 1) for step in range(1 + side.WARM + side.STEPS)]
        return iter(self.pipeline(source).iterate(spans, self.step.put_batch))

    def explain(self, folder: Path) -> None:
        """Print the breakdown of a step on stderr."""
        state = self.step.init_state()
        profiler = Profiler(
            Profile(at=FIRST, steps=TRACED),
            rank=0,
            run_dir=str(folder),
            request=None,
            progress=Progress(None),
            wait_for_steps=lambda: jax.block_until_ready(state),
            read_programs=self.step.hlo_texts,
        )
        with contextlib.redirect_stdout(sys.stderr):
            for step in range(FIRST + TRACED):
                profiler.before_step(step)
                state, _ = self.step.train(state, self.first)
            profiler.finish_trace(FIRST + TRACED)


def main() -> None:
    speed = Speed(json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        seconds = speed.by_path(Path(folder))
        speed.explain(Path(folder))
    device = jax.devices()[0]
    answer = {
        "device": device.device_kind,
        "peak": flops.peak_flops([device]),
        "flops": speed.step.count_flops(speed.first),
    }
    print(json.dumps(answer | {"seconds": seconds}))


if __name__ == "__main__":
    main()
