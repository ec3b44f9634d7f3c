"""One side of a comparison: a process that runs steps and measures them.

It runs step by step in turn with others, each held to one core, or by itself, as fast as it can.
Standard library only, and benchmarks.table of the same: the other sides have environments of their
own.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from benchmarks.table import log_progress, median

T = TypeVar("T")
WARM, STEPS = 5, 20  # of `paced`

ROOT = pathlib.Path(__file__).parents[1]
# JAX and torch read these: one thread each. What else a runtime starts shares the core the process
# is held to.
ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Cost(NamedTuple):
    """Cost and loss of one step."""

    seconds: float
    cpu_seconds: float  # of all threads
    loss: float


class Process:
    """The parent's end of a process that answers with lines of JSON, first with its versions.

    Raises SystemExit when the process has ended.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], core: int | None = None
    ) -> None:
        self._command = command
        self._process = subprocess.Popen(
            command,
            env=environ,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
        self.versions: str = self._answer()

    def ask(self, line: str) -> Any:
        """Return the answer to a line."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{' '.join(self._command[1:3])} ended with exit code {self._process.wait()}"
            )
        return json.loads(line)


class Side(Process):
    """A process that runs steps on request."""

    def __init__(
        self,
        python: str,
        module: str,
        arguments: Sequence[str],
        core: int,
        environ: Mapping[str, str],
    ) -> None:
        self.module = module
        environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), **environ}
        super().__init__([python, "-m", module, *arguments], environ, core)

    def step(self) -> Cost:
        """Return the cost of the next step."""
        return Cost(*self.ask("step"))


def serve_steps(versions: str, step: Callable[[], float]) -> None:
    """Run `step`, which waits for its result and returns the loss, for each line on stdin."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
    print(json.dumps(versions), file=answers, flush=True)
    for _ in sys.stdin:
        started_at, began_cpu = time.perf_counter(), time.process_time()
        loss = step()
        print(
            json.dumps([time.perf_counter() - started_at, time.process_time() - began_cpu, loss]),
            file=answers,
            flush=True,
        )


def median_step_s(launch: Callable[[], T], wait: Callable[[T], object]) -> float:
    """Return the median seconds of a step, each launched before the previous one is awaited."""
    previous, stamps = launch(), []
    for _ in range(WARM + STEPS):
        launched = launch()
        wait(previous)
        previous = launched
        stamps.append(time.perf_counter())
    return median([end - since for since, end in pairwise(stamps[WARM - 1 :])])


def run_alone(
    python: str, module: str, options: Mapping[str, Any], environ: Mapping[str, str]
) -> Any:
    """Return the JSON that the module prints in its own process, or None if it fails."""
    command, path = [python, "-m", module, json.dumps(options)], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env={**os.environ, **path, **environ}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        log_progress(f"left out: {module} ended with exit code {done.returncode}")
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])
