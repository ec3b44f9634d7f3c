"""Time until the first new step after an in-place restart, over that of a cold `launcher run`."""

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
    """Return the Unix time in the line of `step` in metrics.jsonl, or 0 if there is none yet."""
    file = running.folder / "metrics.jsonl"
    lines = read_json_lines(file) if file.exists() else ()
    return next((line["time"] for line in lines if line["step"] == step), 0.0)


def find_trainer(running: Running, rank: int) -> int:
    """Return the pid of the process that trains as `rank`.

    Its standby process has the same rank, but no address of a coordinator.
    """
    environs = {pid: read_environ(pid) for pid in running.pids()}
    return next(
        pid
        for pid, environ in environs.items()
        if contract.COORDINATOR in environ and environ[contract.PROCESS_ID] == str(rank)
    )


def measure_restart(folder: pathlib.Path) -> tuple[float, float]:
    """Return the seconds to the first step of a cold start, and of an in-place restart.

    The job has 2 processes × 4 devices. Its compilation cache is empty at the start, as in the
    first run of a user.
    """
    train = digits_block(steps=1_000_000, checkpoint={"every": 10})
    document = make_job(train, hosts=2, per_host=4, restarts={"in_place": 3})
    started_at = time.time()
    with Running(
        folder, document, env={**USUAL_COMPILES, **user_cache_env(folder / "cache")}
    ) as running:
        cold_s = running.wait_until("the first step", lambda: written_at(running, 1)) - started_at
        running.wait_for_step(40)
        killed_at = time.time()
        os.kill(find_trainer(running, rank=1), signal.SIGKILL)
        resumed = running.wait_until("a restart", lambda: RESUMED.search(running.read_output()[0]))
        resumed_at, step = time.time(), int(resumed[1])

        def new_step_at() -> float:
            # The line of the attempt that was killed may still be there.
            at = written_at(running, step + 1)
            return at if at > resumed_at else 0.0

        return cold_s, running.wait_until("a new step", new_step_at) - killed_at


def main() -> None:
    colds, restarts = [], []
    for round_number in range(1, ROUNDS + 1):
        log_progress(f"restart: {round_number} of {ROUNDS}")
        with tempfile.TemporaryDirectory() as folder:
            cold_s, restart_s = measure_restart(pathlib.Path(folder))
        colds.append(cold_s)
        restarts.append(restart_s)
    detail = (
        f"{median(restarts):.2f} s after a SIGKILL, {median(colds):.2f} s cold; medians of {ROUNDS}"
    )
    emit_rows(
        [Row("in-place restart over a cold run", median(restarts) / median(colds), 0.8, detail)]
    )


if __name__ == "__main__":
    main()
