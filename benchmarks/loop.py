"""Overhead of the training loop over the bare compiled step, in one process, interleaved.

The loop polls a `Stop` between any two steps. This benchmark replaces it by a probe, which records
the time of every step. After each chunk of steps the probe calls the same executable in a tight
loop with a state of its own. Each chunk is compared with the bare one that follows it.

An accelerator computes in parallel with its host. To have this on a CPU too, XLA's threads run on
one core, and everything else runs on the others. With `--shared` all threads run on all cores, so
that the loop competes with the step; this result has no bound.
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

# Steps between two saves, the number of saves, and the number of steps that a save affects.
EVERY, SAVES, WINDOW = (100, 12, 25)
# Steps at the start of a chunk that the previous chunk still affects.
SETTLE = 3
# Widths of the MLP, of which the first one is used whose step takes long enough.
WIDTHS = (128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072)


class Probe:
    """A replacement of the loop's Stop that never stops and records the time of every step.

    Attributes:
        loop: The loop, once it exists.
        stamps: Times between the steps of the current chunk.
        loop_step_s: Median seconds of a step of the loop, for each chunk.
        bare_step_s: Median seconds of a bare step, for each chunk.
    """

    def __init__(self, chunk: int | None) -> None:
        """Run `chunk` steps of the loop and then as many bare ones. With None, run no bare ones."""
        self.loop: Loop[TrainState] | None = None
        self.stamps: list[float] = []
        self.loop_step_s: list[float] = []
        self.bare_step_s: list[float] = []
        self._chunk = chunk
        self._state: Any = None
        self._batch: Any = None

    def poll(self) -> bool:
        """Record the time. After a chunk of the loop's steps, time as many bare ones."""
        if self.loop is None or not self.loop.has_stepped:
            return False
        self.stamps.append(time.perf_counter())
        if self._chunk is not None and len(self.stamps) == self._chunk + SETTLE:
            self.loop_step_s.append(median(_step_durations(self.stamps[SETTLE:])))
            bare_stamps = self._run_bare_steps(self.loop.training, self._chunk + SETTLE)
            self.bare_step_s.append(median(_step_durations(bare_stamps[SETTLE:])))
            self.stamps = []
        return False

    def _run_bare_steps(self, training: Training[TrainState], steps: int) -> list[float]:
        assert isinstance(training, BuiltInTraining)
        if self._state is None:
            self._state = training.init_state()
            self._batch = training.step.put_batch(training.pipeline.read_batch(0))
        self._state, stamps = time_bare_steps(training.step, self._state, self._batch, steps)
        return stamps


def time_bare_steps(
    step: Step, state: TrainState, batch: dict[str, jax.Array], steps: int
) -> tuple[TrainState, list[float]]:
    """Time bare steps: dispatch each step, and wait for the previous one."""
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
    """Yield what an agent provides: a run folder, a metrics socket and a progress pipe."""
    with tempfile.TemporaryDirectory() as folder:
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        reader = subprocess.Popen(["cat"], stdin=read_fd, stdout=subprocess.DEVNULL)
        os.close(read_fd)
        report = Progress(write_fd)
        yield (
            RunContext(run_dir=os.path.join(folder, "run"), socket=os.path.join(folder, "socket")),
            report,
        )
        report.close()
        os.close(write_fd)
        reader.wait()


def make_spec(batch: int, width: int, **keys: Any) -> TrainSpec:
    """Return the spec of an MLP on synthetic images, which need no time to read."""
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


def find_width(batch: int, target_s: float) -> int:
    """Return the first width whose bare step takes about `target_s` on this machine."""
    for width in WIDTHS:
        spec = make_spec(batch, width)
        step = Step(
            load_object(TASKS.get(spec.task, spec.task))(), spec, mesh.build_mesh(spec.mesh), 1
        )
        images = np.zeros((batch, 28, 28), np.uint8)
        arrays = step.put_batch(
            {
                "image": images,
                "label": np.zeros(batch, np.int32),
                "weight": np.ones(batch, np.float32),
            }
        )
        step.compile_train(arrays)
        _, stamps = time_bare_steps(step, step.init_state(), arrays, 30)
        if min(_step_durations(stamps[SETTLE:])) > 0.8 * target_s:
            return width
    return WIDTHS[-1]


def run_training(spec: TrainSpec, chunk: int | None = None) -> tuple[Probe, Loop[TrainState]]:
    """Run a training with a probe."""
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
    """Return the median of the loop's step time over that of the bare step."""
    probe, _ = run_training(
        make_spec(batch, width, steps=chunks * (chunk + SETTLE) + 1, checkpoint={"every": None}),
        chunk,
    )
    pairs = zip(probe.loop_step_s, probe.bare_step_s, strict=True)
    ratio = median([loop / bare for loop, bare in pairs])
    detail = (
        f"loop {format_ms(median(probe.loop_step_s))}, "
        f"bare {format_ms(median(probe.bare_step_s))}; median of {chunks} × {chunk} steps each"
    )
    return Row(f"loop over the bare step, {name}", ratio, bound, detail)


def saving_rows(batch: int, width: int) -> list[Row]:
    """Return the time that a save adds to the WINDOW steps after it.

    They are compared with as many steps before and after them, because the speed of the machine
    drifts in EVERY steps by more than the cost of a save. The background work of a save ends long
    before its window does.
    """
    steps = EVERY * (SAVES + 2)
    probe, loop = run_training(make_spec(batch, width, steps=steps, checkpoint={"every": EVERY}))
    # step_s[n] is the time of step n, including the save after it. The probe is first polled after
    # step 1, so the times of the steps 0 and 1 are not known.
    step_s = [0.0, 0.0, *_step_durations(probe.stamps)]
    added_s, plain_s = [], []
    for save in range(EVERY, EVERY * (SAVES + 1), EVERY):
        previous_s, window_s, next_s = (
            sum(step_s[save + part * WINDOW : save + (part + 1) * WINDOW]) for part in (-1, 0, 1)
        )
        plain_s.append((previous_s + next_s) / 2 / WINDOW)
        added_s.append((window_s - (previous_s + next_s) / 2) / EVERY)
    ratio = median([1 + added / plain for added, plain in zip(added_s, plain_s, strict=True)])
    blocked = loop.metrics.timer.get_part("save").seconds / (SAVES + 2)
    detail = (
        f"{format_ms(median(added_s))} a step on top of {format_ms(median(plain_s))}; "
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
    """Start JAX on one core, and move this thread to the others.

    Returns False if there is only one core.
    """
    first, *other_cores = sorted(os.sched_getaffinity(0))
    if not other_cores:
        return False
    # The threads that XLA starts now inherit this core.
    os.sched_setaffinity(0, {first})
    jax.devices()
    os.sched_setaffinity(0, other_cores)
    return True


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    if "--shared" in sys.argv[1:] or not reserve_core():
        log_progress("loop: steps of about 2 ms, cores shared")
        label = "steps of about 2 ms, cores shared"
        emit_rows([overhead_row(label, 8, find_width(8, 0.002), 40, 50, bound=None)])
        return
    log_progress("loop: steps of about 2 ms")
    short = overhead_row("steps of about 2 ms", 8, find_width(8, 0.002), 40, 50, bound=1.05)
    log_progress("loop: steps of about 50 ms")
    width = find_width(256, 0.05)
    long = overhead_row("steps of about 50 ms", 256, width, 80, 5, bound=1.01)
    log_progress("loop: saves")
    emit_rows([short, long, *saving_rows(256, width)])


if __name__ == "__main__":
    main()
