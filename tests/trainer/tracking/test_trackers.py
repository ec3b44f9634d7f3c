"""The trackers themselves, after kills and a change of the job, in an environment of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from jaxlaunch import contract, samples
from jaxlaunch.launcher.job import load
from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import Journal
from jaxlaunch.samples import SampleWriter
from tests import environments, needs

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[3]
JOB = (
    "{name: job, accelerator: {type: cpu}, hosts: HOSTS, "
    "tracker: {name: TRACKER, project: vision}, "
    "labels: {team: vision}, train: {task: classify, steps: 8, batch: 12, "
    "model: {kind: mlp}, data: {source: synthetic}, optimizer: {lr: 0.5}}}"
)
# Hosts, and the first and last step, of each start of the tracker; all but the last are killed.
# The second start finds what a third would: wandb alone has one.
STARTS = ((2, 0, 5), (3, 4, 8))
MORE_STARTS = ((2, 0, 4), (2, 2, 6), (3, 5, 8))
LIMIT_S = 300.0
FLUSH_S = 5.0


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_run_is_one_with_its_job_after_a_kill(tmp_path: Path, tracker: str) -> None:
    try:
        python = environments.find_python("trackers")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    folder = tmp_path / "job"
    # There is no netrc with a key.
    keys = ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "TRACKIO_DIR")
    environ = {key: value for key, value in os.environ.items() if key not in keys}
    environ |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    starts = MORE_STARTS if tracker == "wandb" else STARTS
    for hosts, first, last in starts:
        names = ("metrics", "eval", "samples")
        journals = {name: Journal(str(folder / f"{name}.jsonl"), first) for name in names}
        job = load.parse_job(JOB.replace("HOSTS", str(hosts)).replace("TRACKER", tracker))
        (variables,) = job.tracking_variables("", "lr-sweep").values()
        limits = {"opens_s": LIMIT_S, "ends_s": LIMIT_S, "closes_s": LIMIT_S}
        settings = {"folder": str(folder), "uid": "uid", **limits, **json.loads(variables)}
        command = [str(python), "-m", "jaxlaunch.trainer.tracking", json.dumps(settings)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, cwd=tmp_path) as program:
            for step in range(first + 1, last + 1):
                journals["metrics"].write(step, {"loss": 1 / step})
                if step % 2 == 0:
                    journals["samples"].write(step, {"samples": [{"prompt": "a", "text": "b"}]})
            for journal in journals.values():
                journal.close()
            write_media(folder, first, last)
            if (hosts, first, last) != starts[-1]:
                wait_for_step(folder, last, program)
                # A thread of trackio writes its rows, a moment later.
                time.sleep(FLUSH_S if tracker == "trackio" else 0)
                program.kill()
            else:
                assert program.stdin is not None
                program.stdin.close()
                assert program.wait(LIMIT_S) == 0
    reader = Path(__file__).with_name("read_trackers.py")
    command = [str(python), str(reader), tracker, str(tmp_path)]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert result.pop("losses") == [[step, pytest.approx(1 / step)] for step in range(1, 9)]
    wanted = {"project": "vision", "group": "lr-sweep", "tags": ["team=vision"]}
    wanted = {} if tracker == "tensorboard" else wanted
    steps = [2, 4, 6, 8]
    # A killed start may have shown the confusion matrix of its evaluation, which is replaced then.
    assert result.pop("confusions")[-1] == 8
    assert result == {
        **wanted,
        "hosts": 3,
        "lr": 0.5,
        "samples": steps,
        "images": steps,
        "texts": steps,
    }
    assert len(list(folder.glob("wandb/offline-run-*"))) == (tracker == "wandb")


def write_media(folder: Path, first: int, last: int) -> None:
    """Write what a program reports in steps `first` + 1 to `last`, and its last evaluation."""
    writer = SampleWriter(str(folder / samples.FOLDER), pytest.fail)
    for step in range(first + 1, last + 1):
        if step % 2 == 0:
            items = samples.check_items({"digits": np.ones((2, 3))}, {"": "a"}, is_kept=True)
            writer.add_items(step, items)
    writer.flush()
    rates = {"examples": 1, "precision": 1.0, "recall": 1.0, "f1": None}
    classes = [{"label": label, **rates} for label in "ab"]
    record = {"step": last, "per_class": classes, "confusion": [[1, 0], [0, 1]]}
    (folder / contract.CLASSIFICATION).write_text(json.dumps(record))


def wait_for_step(folder: Path, step: int, program: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and program.poll() is None:
        state = (
            (folder / layout.TRACKER).read_text() if (folder / layout.TRACKER).exists() else "{}"
        )
        if json.loads(state).get("sent", {}).get("metrics") == step:
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not sent: exit {program.poll()}")
