"""Small jobs of two hosts, each with its failure, and the exit codes of their runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PROGRAM = """\
import os, signal, sys, time
kind, rank = sys.argv[1], int(os.environ["JAX_PROCESS_ID"])
attempt = int(os.environ["JAXLAUNCH_ATTEMPT"])

def train(steps):
    import jaxlaunch
    for step in range(1, 1 + steps):
        jaxlaunch.report(step=step)
        time.sleep(0.1)

if kind == "done":
    import jax
    jax.distributed.initialize()
    assert jax.process_count() == 2
    sys.exit()
if kind == "alone":
    import jax
    jax.devices()
    sys.exit()
if kind == "early":
    train(0 if rank == 1 else 20)
    sys.exit()
if kind == "again":
    train(3)
    if rank == 1 and attempt == 1:
        raise RuntimeError("step 4 failed")
    sys.exit()
if kind == "requeue":
    sys.exit(42 if rank == 1 and attempt == 1 else 0)
if kind == "late":
    train(3)
if kind == "hang":
    train(3 if rank == 1 else 100000)
if kind == "rejoin" and attempt == 2:
    assert os.path.exists("rejoin-saved")
if rank == 1:
    if kind == "rejoin":
        def save(*_):
            time.sleep(2)
            open("rejoin-saved", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGTERM, save)
    if kind == "raise":
        raise ValueError("a bad batch")
    if kind == "late":
        raise RuntimeError("step 4 failed")
    if kind == "missing":
        open("absent.bin")
    if kind == "full":
        raise OSError(28, os.strerror(28), "out.bin")
    if kind == "exit":
        sys.exit(3)
    if kind == "memory":
        os._exit(137)
    if kind == "lose":
        os.kill(os.getppid(), signal.SIGKILL)
    if number := {"abort": 6, "kill": 9, "fault": 11, "term": 15}.get(kind):
        os.kill(os.getpid(), number)
open(f"{kind}-{attempt}-{rank}", "w").close()
signal.pause()
"""
COMMAND_JOB = """\
name: {kind}
hosts: 2
accelerator: {{type: cpu}}
resources: {{cpu: 1}}
restarts: {restarts}
timeouts: {{step: 20s}}
command: [python, program.py, {kind}]
"""
TRAIN_JOB = """\
name: {kind}
hosts: 2
accelerator: {{type: cpu, per_host: 1}}
resources: {{cpu: 1}}
restarts: {restarts}
train:
  task: classify
  data: {data}
  model: {{kind: mlp}}
  batch: 128
  steps: 50
  optimizer: {{name: adamw, lr: 1.0e+30}}
"""
# The data of the jobs with a train block.
DATA = {"nan": "{source: tfds, name: digits}", "refused": "{source: images, path: absent/*.png}"}
RESTARTS = {
    "raise": "{in_place: 1, crash: 1}",
    "again": "{in_place: 1, crash: 0}",
    "requeue": "{in_place: 1, crash: 0, codes: {42: free}}",
    "kill": "{in_place: 0, crash: 1}",
    "rejoin": "{in_place: 1, crash: 1}",
}
# Jobs that fail on both ranks.
FAIL_TOGETHER = {"alone", "nan", "refused"}
# The exit code of each job.
CODES = {
    "early": 0,
    "again": 0,
    "requeue": 0,
    "raise": 70,
    "stop": 80,
    "lose": 81,
    "hang": 82,
    "missing": 83,
    "full": 83,
    "exit": 83,
    "memory": 83,
    "late": 83,
    "abort": 134,
    "kill": 137,
    "fault": 139,
    "term": 143,
    # JAX starts for seconds before it uses its port, which the agent of a later job might take.
    "alone": 64,
    "refused": 65,
    "nan": 76,
    "done": 0,
}


def write_job(folder: Path, kind: str) -> Path:
    job_file = folder / f"{kind}.yaml"
    template = TRAIN_JOB if kind in DATA else COMMAND_JOB
    restarts = RESTARTS.get(kind, "{in_place: 0, crash: 0}")
    job_file.write_text(template.format(kind=kind, restarts=restarts, data=DATA.get(kind)))
    return job_file


def read_verdict(folder: Path) -> tuple[Any, ...]:
    """Return the cause, the rank and the code, with "any" for a rank that is first by chance."""
    verdict = json.loads((folder / "summary.json").read_text())["verdict"]
    rank = "any" if folder.name in FAIL_TOGETHER and verdict["rank"] in (0, 1) else verdict["rank"]
    return verdict["cause"], rank, verdict["code"]
