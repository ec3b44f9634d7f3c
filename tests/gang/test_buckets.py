"""A job with its data, checkpoints and run folder in a bucket resumes after a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.data import records
from tests.bucket_server import Bucket
from tests.compiled import QUICK_COMPILES
from tests.gang.agents import Gang, child_pids, is_alive, make_job, run_gang

pytestmark = [pytest.mark.computes, pytest.mark.extended]

STEPS = 14
POD = {contract.POD_UID: "pod", contract.NODE: "node"}
FOREIGN = {
    "runs/lm/3/weights": b"a trial of a sweep",
    "runs/lm/7/state/d/x": b"another's",
    "runs/lm/notes.txt": b"mine",
    "runs/lm/9.orbax-checkpoint-tmp/w": b"another's save",
    "runs/other/1/jaxlaunch.begun.json": b'{"step": 1}\n',
    "runs/lm.txt": b"beside",
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    server = Bucket()
    yield server
    server.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Write examples to the disk, next to the folder of programs that are compiled once."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for shard in range(2):
        images = rng.integers(0, 256, (32, 8, 8, 1), np.uint8)
        examples = (
            {"image": image, "label": np.int64(number % 10)} for number, image in enumerate(images)
        )
        records.write(folder / f"part-{shard}.array_record", examples)
    return folder


def train_spec(corpus: Path, data: str, checkpoints: str) -> str:
    return json.dumps(
        {
            "task": "classify",
            "model": {"kind": "mlp", "layers": 1, "width": 16},
            "data": {"source": "array_record", "path": f"{data}/*.array_record", "trace": True},
            "mesh": {"dp": -1},
            "batch": 8,
            "steps": STEPS,
            "log_every": 1,
            "eval": {"every": None},
            "checkpoint": {"path": checkpoints, "every": 5, "keep": 2},
            "compile_cache": str(corpus / "compiled"),
        }
    )


def read_losses(metrics: bytes) -> dict[int, float]:
    return {
        line["step"]: line["loss"]
        for line in map(json.loads, metrics.splitlines())
        if "loss" in line
    }


@pytest.fixture(scope="module")
def unbroken_losses(corpus, tmp_path_factory) -> dict[int, float]:
    """Return the losses of a run that has everything on the disk."""
    folder = tmp_path_factory.mktemp("unbroken")
    env = QUICK_COMPILES | {
        contract.TRAIN_SPEC: train_spec(corpus, str(corpus), f"{folder}/checkpoints")
    }
    gang, codes = run_gang(folder, make_job(None), env=env)
    assert codes == [0], gang.stderr
    return read_losses((gang.run_dir / "metrics.jsonl").read_bytes())


def kill_tree(pid: int) -> None:
    """Kill the agent, its processes and its uploader, as the loss of a node does."""
    tree, queue = [], [pid]
    while queue:
        tree.append(queue.pop())
        queue += child_pids(tree[-1])
    for process in tree:
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_run_resumes_from_its_bucket_after_the_loss_of_its_node(
    scheme: str, bucket: Bucket, corpus: Path, unbroken_losses: dict[int, float], tmp_path: Path
) -> None:
    bucket.objects.clear()
    bucket.objects.update({f"team-{scheme}/{name}": data for name, data in FOREIGN.items()})
    bucket.objects.update(
        {
            f"team-{scheme}/corpus/{path.name}": path.read_bytes()
            for path in corpus.glob("*.array_record")
        }
    )
    initial_objects = dict(bucket.objects)
    home = f"team-{scheme}/runs/lm"
    env: dict[str, Any] = {
        **bucket.environ(),
        **POD,
        **QUICK_COMPILES,
        contract.TRAIN_SPEC: train_spec(
            corpus, f"{scheme}://team-{scheme}/corpus", f"{scheme}://{home}"
        ),
        contract.RUN_URL: f"{scheme}://{home}/.jaxlaunch",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    with Gang(tmp_path, make_job(None), env=env) as gang:
        gang.start()
        gang.wait_until(
            "a checkpoint", lambda: f"{home}/5/jaxlaunch.manifest.json" in bucket.objects
        )
        assert f"{home}/.jaxlaunch/summary.json" in bucket.objects
        assert f"{home}/.jaxlaunch/attempts.jsonl" not in bucket.objects
        kill_tree(gang.agents[0].pid)
    gang, codes = run_gang(
        tmp_path, make_job(None), env=env | {contract.POD_UID: "pod-2"}, generation=1
    )
    assert codes == [0], gang.stderr
    final_objects = dict(bucket.objects)
    assert {name: final_objects.get(name) for name in initial_objects} == initial_objects
    new_objects = {
        name: data for name, data in final_objects.items() if name not in initial_objects
    }
    entries = {name.removeprefix(f"{home}/").split("/")[0] for name in new_objects}
    assert entries == {"10", f"{STEPS}", "inputs.json", ".jaxlaunch"}
    run = {
        name.removeprefix(f"{home}/.jaxlaunch/"): data
        for name, data in new_objects.items()
        if "/.jaxlaunch/" in name
    }
    resumed_losses = read_losses(run["metrics.jsonl"])
    assert resumed_losses == {step: unbroken_losses[step] for step in resumed_losses}
    assert resumed_losses.keys() >= set(range(11, STEPS + 1))  # it resumed from 5 or 10
    summary = json.loads(run["summary.json"])
    assert (summary["status"], summary["step"]) == ("done", STEPS)
    attempts = [json.loads(line) for line in run["attempts.jsonl"].splitlines()]
    assert [(attempt["generation"], attempt["cause"]) for attempt in attempts] == [
        (0, "lost"),
        (1, "done"),
    ]
    assert "resumed at step" in gang.stderr + gang.stdout
    assert b"resumed at step" in run["starts/1/logs/rank-0.log"]
    assert not is_alive(gang.agents[0].pid)
    if scheme == "gs":
        assert_another_rate_is_refused(tmp_path, bucket, home, env)


def assert_another_rate_is_refused(
    tmp_path: Path, bucket: Bucket, home: str, env: dict[str, Any]
) -> None:
    """Check that the bucket records a job with another learning rate and its difference."""
    train = json.loads(env[contract.TRAIN_SPEC])
    train["optimizer"] = {"lr": 0.5}
    changes = {
        contract.TRAIN_SPEC: json.dumps(train),
        contract.UID: "another-start",
        contract.POD_UID: "pod-3",
    }
    gang, codes = run_gang(tmp_path / "again", make_job(None), env=env | changes)
    assert codes == [contract.BAD_SPEC], gang.stderr
    files = {name.partition("/.jaxlaunch/")[2]: data for name, data in dict(bucket.objects).items()}
    summary = json.loads(files["summary.json"])
    # The result of the run stays.
    assert (summary["status"], summary["verdict"]["code"]) == ("done", contract.DONE)
    assert "this job says 0.5: use another name" in summary["starts"][1]["refusal"]
    assert (summary["saved"], len(summary["starts"])) == (STEPS, 2)
    assert summary["starts"][1]["changed"] == {"train.optimizer": [None, {"lr": 0.5}]}
    jobs = [
        json.loads(files[name]) for name in ("starts/1/job.yaml", "starts/2/job.yaml", "job.yaml")
    ]
    assert [job_of_start["train"].get("optimizer") for job_of_start in jobs] == [
        None,
        {"lr": 0.5},
        None,
    ]
