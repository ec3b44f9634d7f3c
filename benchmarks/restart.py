"""Time from an in-place restart to its first new step, over a cold `launcher run` of the job."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import tempfile
import time

from benchmarks.table import Row, emit_rows, log_progress, median
from jaxlaunch import contract
from tests.gang.run_files import read_json_lines
from tests.gang.runs import (
    USUAL_COMPILES,
    Running,
    digits_block,
    make_job,
    read_environ,
    user_cache_env,
)

ROUNDS = 3
RESUMED = re.compile(r"resumed at step (\d+) of")


def written_at(running: Running, step: int) -> float:
    """Return when the line of `step` was written, in Unix seconds, or 0."""
    file = running.folder / "metrics.jsonl"
    lines = read_json_lines(file) if file.exists() else ()
    return next((line["time"] for line in lines if line["step"] == step), 0.0)


def find_trainer(running: Running, rank: int) -> int:
    """Return the process that trains as `rank`; its standby process has no coordinator address."""
    environs = {pid: read_environ(pid) for pid in running.pids()}
    rank_text = str(rank)
    return next(
        pid
        for pid, has in environs.items()
        if contract.COORDINATOR in has and has[contract.PROCESS_ID] == rank_text
    )


def measure_restart(folder: pathlib.Path) -> tuple[float, float]:
    """Return the seconds of a cold start and of an in-place restart to the first new step.

    It runs 2 processes × 4 devices. Nothing is compiled at the start: the run has a cache of its
    own, as a user's first one does.
    """
    train = digits_block(steps=1_000_000, checkpoint={"every": 10})
    document = make_job(train, hosts=2, per_host=4, restarts={"in_place": 3})
    started_at = time.time()
    with Running(
        folder, document, env={**USUAL_COMPILES, **user_cache_env(folder / "cache")}
    ) as running:
        cold = running.wait_until("the first step", lambda: written_at(running, 1)) - started_at
        running.wait_for_step(40)
        killed = time.time()
        os.kill(find_trainer(running, rank=1), signal.SIGKILL)
        resumed = running.wait_until("a restart", lambda: RESUMED.search(running.read_output()[0]))
        seen_at, step = time.time(), int(resumed[1])

        def new_step() -> float:
            at = written_at(running, step + 1)
            return at if at > seen_at else 0.0

        return cold, running.wait_until("a new step", new_step) - killed


def main() -> None:
    colds, restarts = [], []
    for turn in range(ROUNDS):
        log_progress(f"restart: {turn + 1} of {ROUNDS}")
        with tempfile.TemporaryDirectory() as folder:
            cold, restart = measure_restart(pathlib.Path(folder))
        colds.append(cold)
        restarts.append(restart)
    detail = (
        f"{median(restarts):.2f} s after a SIGKILL, {median(colds):.2f} s cold; medians of {ROUNDS}"
    )
    emit_rows(
        [Row("in-place restart over a cold run", median(restarts) / median(colds), 0.8, detail)]
    )


if __name__ == "__main__":
    main()
