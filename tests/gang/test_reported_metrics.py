"""The metrics that a custom program reports are where those of `train:` are."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

from jaxlaunch import contract
from tests.gang.agents import Gang, make_job, write_script
from tests.gang.run_files import read_json_lines

# Keeps the numbers that a tracker of the job gets, without those of the host.
TRACKER = """
class Kept:
    def __init__(self, run):
        self.file = open(run.folder + "/kept", "a")
    def log(self, step, values):
        names = [name for name in values if not name.startswith("train/host_")]
        numbers = {name: round(values[name], 3) for name in names}
        print(step, *numbers.items(), file=self.file, flush=True)
    def close(self):
        pass
"""
REPORTING_PROGRAM = """
import os, time
import jaxlaunch
attempt = int(os.environ["JAXLAUNCH_ATTEMPT"])
for step in range(1, 4) if attempt == 1 else range(3, 6):
    jaxlaunch.report(step=step, loss=attempt + 1 / step, bad=float("nan"))
    text = f"rank {os.environ['JAX_PROCESS_ID']} attempt {attempt}"
    jaxlaunch.report(image=[[0.0, 1.0]], text={"of": text})
    time.sleep(0.15)
jaxlaunch.report(phase="eval", accuracy=0.5)
time.sleep(0.15)
raise SystemExit(1 if attempt == 1 else 0)
"""


def test_reported_metrics_are_in_the_run_folder_and_on_the_screen(tmp_path: Path) -> None:
    with Gang(
        tmp_path,
        make_job(
            (sys.executable, str(write_script(tmp_path, REPORTING_PROGRAM))), in_place_limit=1
        ),
        hosts=2,
        env={
            contract.TRACKER: json.dumps({"tracker": "kept:Kept", "name": "job"}),
            "PYTHONPATH": str(write_script(tmp_path, TRACKER, "kept.py").parent),
        },
    ) as gang:
        gang.start()
        assert gang.wait() == [0, 0], gang.stderr
    # Both reports of step 3 are one line, and what the second attempt repeats of it is none.
    assert (gang.run_dir / "kept").read_text().splitlines() == [
        "1 ('train/loss', 2.0)",
        "2 ('train/loss', 1.5)",
        "3 ('train/loss', 1.333) ('train/accuracy', 0.5)",
        "4 ('train/loss', 2.25)",
        "5 ('train/loss', 2.2) ('train/accuracy', 0.5)",
    ]
    rows = read_json_lines(gang.run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [round(row["loss"], 3) for row in rows] == [2.0, 1.5, 2.333, 2.25, 2.2]
    assert rows[-1]["accuracy"] == 0.5 and rows[0]["bad"] is None and "accuracy" not in rows[1]
    events = [path.read_bytes() for path in (gang.run_dir / "tensorboard").iterdir()]
    assert any(b"train/loss" in event and struct.pack("<f", 2.25) in event for event in events)
    reported = [
        json.loads(path.read_text()) for path in sorted((gang.run_dir / "reported").iterdir())
    ]
    texts = [
        (row["step"], sample["text"])
        for row in reported
        for sample in row["samples"]
        if "text" in sample
    ]
    assert texts == [(1, "rank 0 attempt 1"), (2, "rank 0 attempt 1")] + [
        (step, "rank 0 attempt 2") for step in (3, 4, 5)
    ]
    assert all(row["samples"][0]["image"].startswith("data:image/png;base64,") for row in reported)
    assert "step 5  loss 2.2  accuracy 0.5" in gang.stderr
