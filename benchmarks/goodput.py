"""Goodput of a run under SIGKILLs: `python -m benchmarks.goodput --minutes 15 --every 60 --seed 0`.

A small decoder on 2 processes × 2 devices, whose ranks and agents are killed at random, one in so
many seconds. Twice: with the compilation cache that a job has by default, and without one. Goodput
is the share of the run's seconds that was stepping and was kept, by the run's own record. Each run
has an empty cache folder at its start.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import tempfile
import time
from typing import Any

from benchmarks.table import Row, finish_benchmark, log_progress
from jaxlaunch import contract
from tests.gang.runs import USUAL_COMPILES, Running, make_job, read_environ, user_cache_env

TEXT = pathlib.Path(__file__).parents[1] / "docs" / "*.md"
AGENTS = 0.25  # share of the kills that are of an agent, by which all processes are made again
WAIT_S = 300.0  # for the end of a run that was stopped


def make_document(compile_cache: str | None) -> dict[str, Any]:
    """Return the job, which never ends and may be restarted as often as it is killed."""
    train = {
        "task": "lm",
        "model": {"kind": "decoder", "layers": 2, "width": 128, "heads": 4, "length": 128},
        "data": {"source": "text", "path": str(TEXT)},
        "batch": 8,
        "steps": 10_000_000,
        "checkpoint": {"every": 10},
        "compile_cache": compile_cache,
    }
    restarts = {"crash": 1000, "in_place": 1000}
    return make_job(train, hosts=2, per_host=2, restarts=restarts)


def choose_victim(running: Running, choices: random.Random) -> tuple[str, int] | None:
    """Return the process to kill, a rank's or an agent, by name and pid; None if there is none."""
    agents, environs = running.agent_pids(), {pid: read_environ(pid) for pid in running.pids()}
    ranks = {
        int(has[contract.PROCESS_ID]): pid
        for pid, has in environs.items()
        if contract.COORDINATOR in has
    }
    kind, candidates = ("agent", agents) if choices.random() < AGENTS else ("rank", ranks)
    if not candidates:
        return None
    number = choices.choice(sorted(candidates))
    return f"{kind} {number}", candidates[number]


def measure_goodput(
    folder: pathlib.Path, compile_cache: str | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the summary of one run. Three sets of pods without a saved step end it early."""
    choices = random.Random(options.seed)
    env = {**USUAL_COMPILES, **user_cache_env(folder / "cache")}
    end, kills = time.monotonic() + 60 * options.minutes, 0
    with Running(folder, make_document(compile_cache), env=env) as running:
        due = time.monotonic() + options.every
        while (current_time := time.monotonic()) < end and running.process.poll() is None:
            if current_time >= due and (chosen := choose_victim(running, choices)):
                os.kill(chosen[1], signal.SIGKILL)
                kills, due = kills + 1, due + options.every
                log_progress(f"goodput: kill {kills}, {chosen[0]}")
            time.sleep(0.2)
        if running.process.poll() is None:
            running.signal(signal.SIGTERM)
        return {"kills": kills} | running.wait(WAIT_S).summary


def goodput_row(label: str, summary: dict[str, Any]) -> Row:
    """Return the share of the seconds for steps that were kept, and that of the others."""
    seconds = summary["goodput"]["seconds"]
    total = sum(seconds.values())
    other_seconds = sorted(
        (cause for cause in seconds if seconds[cause] >= 0.5), key=seconds.__getitem__, reverse=True
    )
    spent = ", ".join(f"{cause} {seconds[cause]:.0f}" for cause in other_seconds)
    detail = (
        f"step {summary['step']} after {total:.0f} s and {summary['kills']} kills "
        f"({summary['status']}): {spent}"
    )
    return Row(label, seconds.get("step", 0.0) / total, None, detail)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of each of the two runs")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed")
    options = parser.parse_args()
    rows = []
    for label, compile_cache in (
        ("goodput, killed", "auto"),
        ("goodput, killed, without a compilation cache", None),
    ):
        log_progress(f"goodput: {options.minutes:g} minutes, compile_cache {compile_cache}")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                goodput_row(label, measure_goodput(pathlib.Path(folder), compile_cache, options))
            )
        log_progress(f"goodput: {rows[-1]}")
    finish_benchmark(rows)


if __name__ == "__main__":
    main()
