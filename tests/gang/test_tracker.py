"""A slow tracker delays neither the stop nor the end of a gang, and gets each line once."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.gang.runs import Running, digits_block, make_job

pytestmark = pytest.mark.computes

# At first it opens when the test says so, after a stop; then long after the last step, while the
# other rank waits for rank 0 in JAX's shutdown.
SLOW_TRACKER = """
import os
import time
class Slow:
    def __init__(self, run):
        if run.step == 0:
            while not os.path.exists(run.folder + "/opens"):
                time.sleep(0.05)
        else:
            last_step = f'"step": {os.environ["LAST"]},'
            while last_step not in open(run.folder + "/metrics.jsonl").read():
                time.sleep(0.05)
            time.sleep(12)
        self.file = open(run.folder + "/kept", "a")
    def log(self, step, values):
        print(step, values.get("train/loss"), file=self.file, flush=True)
    def close(self):
        pass
"""


def test_slow_tracker_gets_each_line_once_and_does_not_delay_the_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLOW_TRACKER)
    train = digits_block(mesh={"dp": 2}, steps=100_000, log_every=50, eval={"every": 100_000})
    document = make_job(train, hosts=2, per_host=1, tracker="mine:Slow", code=".")
    with Running(tmp_path, document) as first:
        first.wait_for_step(100)
        first.process.send_signal(signal.SIGTERM)
        stopped = first.wait()
        assert stopped.code == 80 and "saved at step" in stopped.verdict["message"], stopped.verdict
        assert any("was still busy 5 s after the stop" in note for note in stopped.summary["notes"])
        # For the tracker's process, which has outlived the training.
        (first.folder / "opens").touch()
    last = stopped.verdict["step"] // 50 * 50 + 100
    with Running(tmp_path, document, f"train.steps={last}", env={"LAST": str(last)}) as second:
        done = second.wait()
    assert done.code == 0, done.verdict
    tracked_lines = [line.split() for line in (done.folder / "kept").read_text().splitlines()]
    assert [
        (int(step), json.loads(loss)) for step, loss in tracked_lines if loss != "None"
    ] == list(done.losses.items())
