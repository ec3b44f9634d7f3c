"""Our side of benchmarks.gpu: step times as JSON on stdout, and a breakdown of a step on stderr."""

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

# The options that are not sizes of the model.
OTHER_OPTIONS = ("kind", "batch", "small", "lr", "clip")
# The first traced step, and the number of traced steps.
FIRST, TRACED = 3, 5
FILE = "examples.array_record"


class Speed:
    """Our train step on this machine's first device."""

    def __init__(self, options: dict[str, Any]) -> None:
        kind = options["kind"]
        sizes = {key: value for key, value in options.items() if key not in OTHER_OPTIONS}
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
        self.first_batch = self.step.put_batch(self.pipeline(source).read_batch(0))
        self.step.compile_train(self.first_batch)

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

    def median_step_s(self, batches: Iterator[Any]) -> float:
        """Return the median seconds of a step on these batches."""
        state = self.step.init_state()

        def launch() -> Any:
            nonlocal state
            state, metrics = self.step.train(state, next(batches))
            return metrics["loss"]

        return side.median_step_s(launch, jax.block_until_ready)

    def measure_sources(self, folder: Path) -> dict[str, float]:
        """Return the seconds of a step for each source of batches.

        The file has just been written, so it is read from the page cache.
        """
        records.write(folder / FILE, map(self.source.__getitem__, range(len(self.source))))
        file_source = array_record.open_source(
            ArrayRecord(source="array_record", path=str(folder / FILE)), "train"
        )
        assert file_source is not None, "no part of it is held out"
        return {
            "a batch on the device": self.median_step_s(repeat(self.first_batch)),
            "batches that are made up": self.median_step_s(self._batches(self.source)),
            "batches from a file": self.median_step_s(self._batches(file_source)),
        }

    def _batches(self, source: Source) -> Iterator[Any]:
        spans = [range(step, step + 1) for step in range(1 + side.WARM + side.STEPS)]
        return iter(self.pipeline(source).iterate(spans, self.step.put_batch))

    def print_breakdown(self, folder: Path) -> None:
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
                state, _ = self.step.train(state, self.first_batch)
            profiler.finish_trace(FIRST + TRACED)


def main() -> None:
    speed = Speed(json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        seconds = speed.measure_sources(Path(folder))
        speed.print_breakdown(Path(folder))
    device = jax.devices()[0]
    answer = {
        "device": device.device_kind,
        "peak": flops.peak_flops([device]),
        "flops": speed.step.count_flops(speed.first_batch),
    }
    print(json.dumps(answer | {"seconds": seconds}))


if __name__ == "__main__":
    main()
