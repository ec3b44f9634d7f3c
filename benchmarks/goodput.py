"""Goodput of a run under SIGKILLs: `python -m benchmarks.goodput --minutes 15 --every 60 --seed 0`.

A small decoder is trained on 2 processes × 2 devices. Every `--every` seconds a random rank or
agent is killed. Goodput is the share of the run's time that was spent on steps which were not lost,
according to its summary. It is measured twice: with the compilation cache that a job has by
default, which is empty at the start, and without a cache.
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
# The share of kills that hit an agent, after which all processes start again.
AGENT_SHARE = 0.25
# How long to wait for the end of the run after SIGTERM.
WAIT_S = 300.0


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


def choose_victim(running: Running, rng: random.Random) -> tuple[str, int] | None:
    """Return the name and pid of a random rank or agent, or None if there is none at the moment."""
    agents, environs = running.agent_pids(), {pid: read_environ(pid) for pid in running.pids()}
    ranks = {
        int(environ[contract.PROCESS_ID]): pid
        for pid, environ in environs.items()
        if contract.COORDINATOR in environ
    }
    kind, candidates = ("agent", agents) if rng.random() < AGENT_SHARE else ("rank", ranks)
    if not candidates:
        return None
    number = rng.choice(sorted(candidates))
    return f"{kind} {number}", candidates[number]


def measure_goodput(
    folder: pathlib.Path, compile_cache: str | None, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the summary of one run and its number of kills.

    The launcher may end the run early, after three sets of pods without a saved step.
    """
    rng = random.Random(options.seed)
    env = {**USUAL_COMPILES, **user_cache_env(folder / "cache")}
    end, kills = time.monotonic() + 60 * options.minutes, 0
    with Running(folder, make_document(compile_cache), env=env) as running:
        next_kill_at = time.monotonic() + options.every
        while (now := time.monotonic()) < end and running.process.poll() is None:
            if now >= next_kill_at and (victim := choose_victim(running, rng)):
                name, pid = victim
                os.kill(pid, signal.SIGKILL)
                kills, next_kill_at = kills + 1, next_kill_at + options.every
                log_progress(f"goodput: kill {kills}, {name}")
            time.sleep(0.2)
        if running.process.poll() is None:
            running.signal(signal.SIGTERM)
        return {"kills": kills} | running.wait(WAIT_S).summary


def goodput_row(label: str, summary: dict[str, Any]) -> Row:
    """Return the goodput of a run, with the seconds of each phase."""
    seconds = summary["goodput"]["seconds"]
    total = sum(seconds.values())
    phases = sorted(
        (phase for phase in seconds if seconds[phase] >= 0.5), key=seconds.__getitem__, reverse=True
    )
    phase_seconds = ", ".join(f"{phase} {seconds[phase]:.0f}" for phase in phases)
    detail = (
        f"step {summary['step']} after {total:.0f} s and {summary['kills']} kills "
        f"({summary['status']}): {phase_seconds}"
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
