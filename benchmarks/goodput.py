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

from benchmarks.table import Row, finish, log
from jaxlaunch import contract
from tests.gang.runs import USUAL_COMPILES, Running, make_job, read_environ, user_cache_env

TEXT = pathlib.Path(__file__).parents[1] / "docs" / "*.md"
AGENTS = 0.25  # share of the kills that are of an agent, by which all processes are made again
WAITED_S = 300.0  # for the end of a run that was stopped


def document(compile_cache: str | None) -> dict[str, Any]:
    """The job: it never ends by itself, and may be restarted as often as it is killed."""
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


def victim(running: Running, choices: random.Random) -> tuple[str, int] | None:
    """What is killed: the process of a rank or an agent, by name and pid; None while there is none."""
    agents, environs = running.agent_pids(), {pid: read_environ(pid) for pid in running.pids()}
    ranks = {
        int(has[contract.PROCESS_ID]): pid
        for pid, has in environs.items()
        if contract.COORDINATOR in has
    }
    kind, found = ("agent", agents) if choices.random() < AGENTS else ("rank", ranks)
    if not found:
        return None
    number = choices.choice(sorted(found))
    return f"{kind} {number}", found[number]


def measure(
    folder: pathlib.Path, compile_cache: str | None, options: argparse.Namespace
) -> dict[str, Any]:
    """The summary of one run. Three sets of pods without a newly saved step end it before its time."""
    choices = random.Random(options.seed)
    env = {**USUAL_COMPILES, **user_cache_env(folder / "cache")}
    end, kills = time.monotonic() + 60 * options.minutes, 0
    with Running(folder, document(compile_cache), env=env) as running:
        due = time.monotonic() + options.every
        while (now := time.monotonic()) < end and running.process.poll() is None:
            if now >= due and (chosen := victim(running, choices)):
                os.kill(chosen[1], signal.SIGKILL)
                kills, due = kills + 1, due + options.every
                log(f"goodput: kill {kills}, {chosen[0]}")
            time.sleep(0.2)
        if running.process.poll() is None:
            running.signal(signal.SIGTERM)
        return {"kills": kills} | running.wait(WAITED_S).summary


def row(what: str, summary: dict[str, Any]) -> Row:
    """The share of the seconds that were spent on steps which were kept, and what the others were spent on."""
    seconds = summary["goodput"]["seconds"]
    total = sum(seconds.values())
    others = sorted(
        (cause for cause in seconds if seconds[cause] >= 0.5), key=seconds.__getitem__, reverse=True
    )
    spent = ", ".join(f"{cause} {seconds[cause]:.0f}" for cause in others)
    detail = (
        f"step {summary['step']} after {total:.0f} s and {summary['kills']} kills "
        f"({summary['status']}): {spent}"
    )
    return Row(what, seconds.get("step", 0.0) / total, None, detail)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of each of the two runs")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed")
    options = parser.parse_args()
    rows = []
    for what, compile_cache in (
        ("goodput, killed", "auto"),
        ("goodput, killed, without a compilation cache", None),
    ):
        log(f"goodput: {options.minutes:g} minutes, compile_cache {compile_cache}")
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(what, measure(pathlib.Path(folder), compile_cache, options)))
        log(f"goodput: {rows[-1]}")
    finish(rows)


if __name__ == "__main__":
    main()
