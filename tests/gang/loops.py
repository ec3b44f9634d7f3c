"""Kills the examples that bring their own step at random moments: python -m tests.gang.loops --kills 10 --seed 1

Each is run unbroken, and again with SIGKILL for one of its ranks, which restart in place, or for
all of its processes with the launcher, after which it is started again. One JSON line for each
example: where it was killed, and whether its losses and the arrays of its last checkpoint are equal
to the bit.
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
from tests.gang.runs import Result, Running, _kill, launch, succeed, until_gone

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 200  # by default; the examples save every tenth part of them, and log every twentieth
HOSTS = {"gan": (2, 1), "reinforce": (1, 2)}


def document(folder: Path, example: str, steps: int, kills: int = 0) -> dict[str, Any]:
    """The example's job, its program copied to `folder`; it may be restarted in place as often as it is killed."""
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


def arrays(result: Result, steps: int) -> dict[str, str]:
    """Digests of the arrays of a run's last checkpoint."""
    found = reader.find_step(str(result.folder / "checkpoints"), steps)
    return {
        name: hashlib.sha256(array[...].tobytes()).hexdigest()
        for name, array in found.part_arrays("state").items()
    }


def metrics(result: Result) -> dict[int, dict[str, float]]:
    """What the program measured, by step, without the times."""
    names = ("critic_loss", "generator_loss", "told_apart", "policy_loss", "falls")
    return {
        line["step"]: {name: line[name] for name in names if name in line}
        for line in result.metrics
    }


def killed(
    folder: Path, example: str, steps: int, moments: list[tuple[int, str]]
) -> tuple[Result, list[int]]:
    """The end of a run that is killed once each of these steps is logged: a `rank` of it, or `all` processes; and the
    steps that were logged then."""
    job, at = document(folder, example, steps, len(moments)), []
    waiting = sorted(moments)
    while True:
        with Running(folder, job) as running:
            while waiting:
                step, target = waiting[0]
                running.until(
                    "a step", lambda step=step: _is_over(running) or _is_at(running, step)
                )
                pids = sorted(running.children().values())
                if _is_over(running):
                    break
                if not pids:
                    continue  # a rank is just being started: it has no environment yet
                at.append(_logged(running.folder))
                waiting.pop(0)
                if target == "all":
                    tree = running.tree()
                    for pid in tree:
                        _kill(pid, signal.SIGKILL)
                    running.process.wait()
                    until_gone(tree)
                    break
                _kill(random.Random(step).choice(pids), signal.SIGKILL)
                until_gone(pids)
            if running.process.poll() != -signal.SIGKILL:
                return running.wait(), at


def _logged(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def _is_at(running: Running, step: int) -> bool:
    """Whether a step is logged, and the ranks are there again that a kill before has ended."""
    return _logged(running.folder) >= step and bool(running.children())


def _is_over(running: Running) -> bool:
    return running.process.poll() is not None


def compared(
    folder: Path, example: str, moments: list[tuple[int, str]], steps: int = STEPS
) -> Mapping[str, Any]:
    """Whether a run that is killed at these moments ends as one that is not."""
    unbroken = succeed(launch(folder / "unbroken", document(folder / "unbroken", example, steps)))
    broken, at = killed(folder / "broken", example, steps, moments)
    succeed(broken)
    return {
        "example": example,
        "killed": [(step, target) for step, (_, target) in zip(at, sorted(moments), strict=False)],
        "restarts": broken.summary["restarts"],
        "arrays": len(arrays(unbroken, steps)),
        "equal_arrays": arrays(broken, steps) == arrays(unbroken, steps),
        "equal_metrics": metrics(broken) == metrics(unbroken),
    }


def main() -> int:
    """Returns how many of the examples did not end as if they had not been killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    given, wrong = parser.parse_args(), 0
    for example in HOSTS:
        chance = random.Random(f"{given.seed} {example}")
        moments = [
            (chance.randrange(given.steps * 3 // 4), chance.choice(["rank", "all"]))
            for _ in range(given.kills)
        ]
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            line = compared(Path(folder), example, moments, given.steps)
        print(json.dumps(line), flush=True)
        wrong += not (
            line["equal_arrays"] and line["equal_metrics"] and len(line["killed"]) == given.kills
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
