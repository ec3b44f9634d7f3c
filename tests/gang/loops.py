"""Kill the examples that bring their own step: python -m tests.gang.loops --kills 10 --seed 1.

Each example runs unbroken, and again with SIGKILL for one of its ranks, which restart in place, or
for all processes with the launcher, after which it is started again. Each example prints a line of
JSON: where it was killed, and whether its losses and the arrays of its last checkpoint are equal to
the bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlaunch.trainer.checkpoint import reader
from tests.gang.runs import (
    Result,
    Running,
    assert_success,
    kill_processes,
    run_job,
    wait_until_gone,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 200  # by default; the examples save every tenth part of them, and log every twentieth
HOSTS = {"gan": (2, 1), "reinforce": (1, 2)}


def example_job(folder: Path, example: str, steps: int, kills: int = 0) -> dict[str, Any]:
    """Return the example's job with its program in `folder` and one restart for each kill."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLES / f"{example}.py", folder)
    hosts, per_host = HOSTS[example]
    return {
        "name": "loop",
        "hosts": hosts,
        "accelerator": {"type": "cpu", "per_host": per_host},
        "code": ".",
        "command": ["python", f"{example}.py", str(steps)],
        "restarts": {"in_place": kills, "crash": kills},
    }


def array_digests(result: Result, steps: int) -> dict[str, str]:
    """Return digests of the arrays of a run's last checkpoint."""
    checkpoint = reader.find_step(str(result.folder / "checkpoints"), steps)
    return {
        name: hashlib.sha256(array[...].tobytes()).hexdigest()
        for name, array in checkpoint.part_arrays("state").items()
    }


def program_metrics(result: Result) -> dict[int, dict[str, float]]:
    """Return the program's metrics by step, without the times."""
    names = ("critic_loss", "generator_loss", "critic_accuracy", "policy_loss", "falls")
    return {
        line["step"]: {name: line[name] for name in names if name in line}
        for line in result.metrics
    }


def run_with_kills(
    folder: Path, example: str, steps: int, moments: list[tuple[int, str]]
) -> tuple[Result, list[int]]:
    """Run a job that is killed once each of the steps is logged: a `rank`, or `all` processes.

    Returns the result and the steps that were logged at the kills.
    """
    job, killed_steps = example_job(folder, example, steps, len(moments)), []
    remaining = sorted(moments)
    while True:
        with Running(folder, job) as running:
            while remaining:
                step, target = remaining[0]
                running.wait_until(
                    "a step", lambda step=step: _has_ended(running) or _is_ready(running, step)
                )
                pids = sorted(running.rank_pids().values())
                if _has_ended(running):
                    break
                if not pids:
                    continue  # a rank is just being started: it has no environment yet
                killed_steps.append(_newest_logged_step(running.folder))
                remaining.pop(0)
                if target == "all":
                    running.kill()
                    break
                kill_processes([random.Random(step).choice(pids)])
                wait_until_gone(pids)
            if running.process.poll() != -signal.SIGKILL:
                return running.wait(), killed_steps


def _newest_logged_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def _is_ready(running: Running, step: int) -> bool:
    """Check that a step is logged and that the ranks run again after the previous kill."""
    return _newest_logged_step(running.folder) >= step and bool(running.rank_pids())


def _has_ended(running: Running) -> bool:
    return running.process.poll() is not None


def compare_with_unbroken(
    folder: Path, example: str, moments: list[tuple[int, str]], steps: int = STEPS
) -> Mapping[str, Any]:
    """Compare a run that is killed at these moments with one that is not."""
    unbroken = assert_success(
        run_job(folder / "unbroken", example_job(folder / "unbroken", example, steps))
    )
    broken, killed_steps = run_with_kills(folder / "broken", example, steps, moments)
    assert_success(broken)
    return {
        "example": example,
        "killed": [
            (step, target) for step, (_, target) in zip(killed_steps, sorted(moments), strict=False)
        ],
        "restarts": broken.summary["restarts"],
        "arrays": len(array_digests(unbroken, steps)),
        "equal_arrays": array_digests(broken, steps) == array_digests(unbroken, steps),
        "equal_metrics": program_metrics(broken) == program_metrics(unbroken),
    }


def main() -> int:
    """Return the number of examples whose killed run ended differently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments, failures = parser.parse_args(), 0
    for example in HOSTS:
        rng = random.Random(f"{arguments.seed} {example}")
        moments = [
            (rng.randrange(arguments.steps * 3 // 4), rng.choice(["rank", "all"]))
            for _ in range(arguments.kills)
        ]
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            line = compare_with_unbroken(Path(folder), example, moments, arguments.steps)
        print(json.dumps(line), flush=True)
        failures += not (
            line["equal_arrays"]
            and line["equal_metrics"]
            and len(line["killed"]) == arguments.kills
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())
