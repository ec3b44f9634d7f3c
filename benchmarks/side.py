"""One side of a comparison: a process that runs steps and measures them.

The sides either take turns step by step, each on one core, or one side runs by itself as fast as it
can. This module and benchmarks.table only import the standard library, because the sides have
different environments.
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
# The numbers of steps of `median_step_s` before the measurement and during it.
WARM, STEPS = 5, 20
ROOT = pathlib.Path(__file__).parents[1]
# Variables by which JAX and torch use one thread for computations. Their other threads share the
# core of the process.
ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Cost(NamedTuple):
    """The cost of one step, with the processor time of all threads, and its loss."""

    seconds: float
    cpu_seconds: float
    loss: float


class Process:
    """A child process that answers each line with a line of JSON.

    Its first line are the versions of its libraries. Raises SystemExit if the process has ended.
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
    """For each line on stdin, run `step` and print its cost. `step` returns the loss."""
    # Libraries must not print between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(versions), file=answers, flush=True)
    for _ in sys.stdin:
        started_at, cpu_started_at = time.perf_counter(), time.process_time()
        loss = step()
        cost = Cost(time.perf_counter() - started_at, time.process_time() - cpu_started_at, loss)
        print(json.dumps(cost), file=answers, flush=True)


def median_step_s(launch: Callable[[], T], wait: Callable[[T], object]) -> float:
    """Return the median seconds of a step, each launched before the previous one is awaited."""
    previous, stamps = launch(), []
    for _ in range(WARM + STEPS):
        current = launch()
        wait(previous)
        previous = current
        stamps.append(time.perf_counter())
    return median([end - start for start, end in pairwise(stamps[WARM - 1 :])])


def run_alone(
    python: str, module: str, options: Mapping[str, Any], environ: Mapping[str, str]
) -> Any:
    """Run a module in its own process and return the JSON that it prints, or None if it fails."""
    process = subprocess.run(
        [python, "-m", module, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.returncode:
        log_progress(f"left out: {module} ended with exit code {process.returncode}")
        return None
    return json.loads(process.stdout.strip().splitlines()[-1])
