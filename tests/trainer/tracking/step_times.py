"""The steps of a run whose tracker blocks or raises, beside those of a run without one:
`python -m tests.trainer.tracking.step_times`.

A program of its own waits 50 ms for each batch and logs each step. The runs alternate; of each the median of `wall_s`
in its metrics.jsonl counts, of the steps after the first tenth.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path

from tests.gang.runs import Running, succeed

STEPS, TURNS = 200, 5
TRACKERS = (None, "mine:Kept", "mine:Blocks", "mine:Raises")
PROGRAM = f"""
import time
import numpy as np
import jaxlaunch
def data(step):
    time.sleep(0.05)
    return {{"x": np.full((4, 2), step, np.float32)}}
def step(state, batch):
    return {{"n": state["n"] + 1}}, {{"loss": batch["x"].mean()}}
if __name__ == "__main__":
    jaxlaunch.run(step, lambda: {{"n": 0}}, data, steps={STEPS}, every=None, log_every=1)
class Kept:
    def __init__(self, run):
        self.file = open(run.folder + "/kept", "w")
    def log(self, step, values):
        print(step, values, file=self.file, flush=True)
    def close(self):
        pass
class Blocks(Kept):
    def log(self, step, values):
        time.sleep(3600)
class Raises(Kept):
    def log(self, step, values):
        raise OSError(28, "No space left on device")
"""


def main() -> None:
    """Prints the median of each run, and the ratio of each kind to the runs without a tracker."""
    found: dict[str | None, list[float]] = {tracker: [] for tracker in TRACKERS}
    for _ in range(TURNS):
        for tracker, medians in found.items():
            medians.append(median_s(tracker))
    for tracker, medians in found.items():
        ratios = [one / other for one, other in zip(medians, found[None], strict=True)]
        each = ", ".join(f"{1000 * one:.2f}" for one in medians)
        print(f"{tracker}: {each} ms; {statistics.median(ratios):.4f} of no tracker's; load {os.getloadavg()[0]:.1f}")


def median_s(tracker: str | None) -> float:
    """The median of a run's steps, in seconds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (Path(folder) / "mine.py").write_text(PROGRAM)
        keys = {"command": ["python", "mine.py"], "code": folder, "accelerator": {"type": "cpu", "per_host": 1}}
        document = {"name": "steps", "tracker": tracker} | keys
        with Running(Path(folder), document) as running:
            running.until_step(STEPS)
            lines = (running.folder / "metrics.jsonl").read_text().splitlines()
            if tracker != "mine:Blocks":
                succeed(running.wait())  # it would wait for 40 s
        return statistics.median(json.loads(line)["wall_s"] for line in lines[STEPS // 10 :])


if __name__ == "__main__":
    main()
