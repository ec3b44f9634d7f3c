"""The training loop against the bare compiled step, in one process, interleaved.

The loop polls a `Stop` between any two steps; here a replacement takes the time, and after every
chunk calls the same executable in a tight loop, on a state of its own. What is compared is a chunk
with the bare one right after it.

An accelerator computes in parallel to its host. So that a CPU does too, XLA's threads get one core
and everything else the others (`--shared`: all have all, and what the loop does takes its time from
the step itself; reported, not bounded).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.table import Row, emit_rows, format_ms, log_progress, median
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext, Training
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import CLASSIFY, TASKS, TrainSpec
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.train import BuiltInTraining
from jaxlaunch.trainer.user_code import load_object

# Steps between two saves, how many are looked at, and the steps that feel one.
EVERY, SAVES, WINDOW = (100, 12, 25)
SETTLE = 3  # steps at the start of a chunk that still feel the one before
# Of the MLP: one is found that takes long enough.
WIDTHS = (128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072)


class Probe:
    """A replacement of the loop's Stop that never stops and records the time of every step."""

    def __init__(self, chunk: int | None) -> None:
        self.loop: Loop[TrainState] | None = None
        self._chunk = chunk  # steps of the loop, then as many bare ones; None: no bare ones
        self.stamps: list[float] = []
        self.steps: list[float] = []  # median seconds of a step of the loop, by chunk
        self.bare: list[float] = []  # and of a bare one
        self._state: Any = None
        self._batch: Any = None

    def poll(self) -> bool:
        """Return False; after a chunk of the loop's steps, run and time as many bare ones."""
        if self.loop is None or not self.loop.has_stepped:
            return False
        self.stamps.append(time.perf_counter())
        if self._chunk is not None and len(self.stamps) == self._chunk + SETTLE:
            self.steps.append(median(_step_durations(self.stamps[SETTLE:])))
            self.bare.append(
                median(
                    _step_durations(self._tight(self.loop.training, self._chunk + SETTLE)[SETTLE:])
                )
            )
            self.stamps = []
        return False

    def _tight(self, training: Training[TrainState], steps: int) -> list[float]:
        assert isinstance(training, BuiltInTraining)
        if self._state is None:
            self._state = training.init_state()
            self._batch = training.step.put_batch(training.pipeline.read_batch(0))
        self._state, stamps = time_bare_steps(training.step, self._state, self._batch, steps)
        return stamps


def time_bare_steps(
    step: Step, state: TrainState, batch: dict[str, jax.Array], steps: int
) -> tuple[TrainState, list[float]]:
    """Time bare steps: dispatch one, wait for the previous one, and nothing else."""
    stamps: list[float] = []
    previous = None
    for _ in range(steps):
        state, metrics = step.train(state, batch)
        if previous is not None:
            previous["finite"].block_until_ready()
        previous = metrics
        stamps.append(time.perf_counter())
    jax.block_until_ready(state)
    return state, stamps


def _step_durations(stamps: list[float]) -> list[float]:
    return [end - start for start, end in zip(stamps, stamps[1:], strict=False)]


@contextlib.contextmanager
def run_context() -> Iterator[tuple[RunContext, Progress]]:
    """Yield a run folder, a metrics socket and a progress pipe with a reader, as an agent does."""
    with tempfile.TemporaryDirectory() as folder:
        end, fd = os.pipe()
        os.set_blocking(fd, False)
        reader = subprocess.Popen(["cat"], stdin=end, stdout=subprocess.DEVNULL)
        os.close(end)
        report = Progress(fd)
        yield (
            RunContext(run_dir=os.path.join(folder, "run"), socket=os.path.join(folder, "socket")),
            report,
        )
        report.close()
        os.close(fd)
        reader.wait()


def spec_of(batch: int, width: int, **keys: Any) -> TrainSpec:
    """Return an MLP on images that are made once, so that only the loop is measured."""
    model = {"kind": "mlp", "layers": 2, "width": width}
    data = {"source": "synthetic", "examples": 512, "eval_examples": 0}
    return TrainSpec.model_validate(
        {
            "task": CLASSIFY,
            "model": model,
            "data": data,
            "batch": batch,
            "eval": {"every": None},
            **keys,
        }
    )


def width_for(batch: int, target_s: float) -> int:
    """Return the first width whose bare step takes about `target_s` here."""
    for width in WIDTHS:
        spec = spec_of(batch, width)
        step = Step(
            load_object(TASKS.get(spec.task, spec.task))(), spec, mesh.build_mesh(spec.mesh), 1
        )
        images = np.zeros((batch, 28, 28), np.uint8)
        fed = step.put_batch(
            {
                "image": images,
                "label": np.zeros(batch, np.int32),
                "weight": np.ones(batch, np.float32),
            }
        )
        step.compile_train(fed)
        _, stamps = time_bare_steps(step, step.init_state(), fed, 30)
        if min(_step_durations(stamps[SETTLE:])) > 0.8 * target_s:
            return width
    return WIDTHS[-1]


def run_training(spec: TrainSpec, chunk: int | None = None) -> tuple[Probe, Loop[TrainState]]:
    """Run the loop once."""
    probe = Probe(chunk)
    with (
        run_context() as (context, report),
        open(os.devnull, "w") as out,
        contextlib.redirect_stdout(out),
    ):
        training = BuiltInTraining(
            spec, load_object(TASKS.get(spec.task, spec.task))(), context, report
        )
        probe.loop = Loop(training, context, probe, report)  # type: ignore[arg-type]
        probe.loop.run()
    return probe, probe.loop


def overhead_row(
    name: str, batch: int, width: int, chunks: int, chunk: int, bound: float | None
) -> Row:
    """Return the loop's median step over the bare one's."""
    probe, _ = run_training(
        spec_of(batch, width, steps=chunks * (chunk + SETTLE) + 1, checkpoint={"every": None}),
        chunk,
    )
    ratio = median([loop / bare for loop, bare in zip(probe.steps, probe.bare, strict=True)])
    detail = (
        f"loop {format_ms(median(probe.steps))}, bare {format_ms(median(probe.bare))}; "
        f"median of {chunks} × {chunk} steps each"
    )
    return Row(f"loop over the bare step, {name}", ratio, bound, detail)


def saving_row(batch: int, width: int) -> list[Row]:
    """Return what a save adds to the following WINDOW steps, against as many before and after.

    The machine's own pace drifts by more in EVERY steps than a save costs, so the neighbours are
    what is compared with; the background of a save has long ended when its window has.
    """
    steps = EVERY * (SAVES + 2)
    probe, loop = run_training(spec_of(batch, width, steps=steps, checkpoint={"every": EVERY}))
    # took[n]: until the loop asked after n steps, the save at n steps included. The first time it
    # asks is after one.
    took = [0.0, 0.0, *_step_durations(probe.stamps)]
    added, plain = [], []
    for at in range(EVERY, EVERY * (SAVES + 1), EVERY):
        steps_before, window, steps_after = (
            sum(took[at + part * WINDOW : at + (part + 1) * WINDOW]) for part in (-1, 0, 1)
        )
        plain.append((steps_before + steps_after) / 2 / WINDOW)
        added.append((window - (steps_before + steps_after) / 2) / EVERY)
    ratio = median([1 + extra / step for extra, step in zip(added, plain, strict=True)])
    blocked = loop.metrics.timer.get_part("save").seconds / (SAVES + 2)
    detail = (
        f"{format_ms(median(added))} a step on top of {format_ms(median(plain))}; "
        f"median of {SAVES} saves"
    )
    return [
        Row(f"saving every {EVERY} steps over not saving", ratio, 1.02, detail),
        Row(
            "the blocking part of a save",
            None,
            None,
            f"{format_ms(blocked)}, {format_ms(blocked / EVERY)} a step",
        ),
    ]


def reserve_core() -> bool:
    """Start JAX on one core and leave the others to this thread; False if there is only one."""
    first, *other_cores = sorted(os.sched_getaffinity(0))
    if not other_cores:
        return False
    os.sched_setaffinity(0, {first})  # inherited by the threads that XLA starts now
    jax.devices()
    os.sched_setaffinity(0, other_cores)
    return True


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    if "--shared" in sys.argv[1:] or not reserve_core():
        log_progress("loop: steps of about 2 ms, cores shared")
        label = "steps of about 2 ms, cores shared"
        emit_rows([overhead_row(label, 8, width_for(8, 0.002), 40, 50, bound=None)])
        return
    log_progress("loop: steps of about 2 ms")
    short = overhead_row("steps of about 2 ms", 8, width_for(8, 0.002), 40, 50, bound=1.05)
    log_progress("loop: steps of about 50 ms")
    wide = width_for(256, 0.05)
    long = overhead_row("steps of about 50 ms", 256, wide, 80, 5, bound=1.01)
    log_progress("loop: saves")
    emit_rows([short, long, *saving_row(256, wide)])


if __name__ == "__main__":
    main()
