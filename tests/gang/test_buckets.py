"""A job whose data, checkpoints and run folder are all in a bucket: killed, it goes on as if it had not been."""

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
from tests.gang.agents import Gang, children, is_alive, job, launch

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
    """Examples on the disk, and beside them the folder of programs that are compiled once."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = np.random.default_rng(0)
    for shard in range(2):
        images = chance.integers(0, 256, (32, 8, 8, 1), np.uint8)
        examples = (
            {"image": image, "label": np.int64(number % 10)} for number, image in enumerate(images)
        )
        records.write(folder / f"part-{shard}.array_record", examples)
    return folder


def spec(corpus: Path, data: str, checkpoints: str) -> str:
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


def losses(metrics: bytes) -> dict[int, float]:
    return {
        line["step"]: line["loss"]
        for line in map(json.loads, metrics.splitlines())
        if "loss" in line
    }


@pytest.fixture(scope="module")
def unbroken(corpus, tmp_path_factory) -> dict[int, float]:
    """The losses of a run that has everything on the disk."""
    folder = tmp_path_factory.mktemp("unbroken")
    env = QUICK_COMPILES | {contract.TRAIN_SPEC: spec(corpus, str(corpus), f"{folder}/checkpoints")}
    gang, codes = launch(folder, job(None), env=env)
    assert codes == [0], gang.talk
    return losses((gang.run_dir / "metrics.jsonl").read_bytes())


def kill_all(pid: int) -> None:
    """As a node that is gone: the agent, its processes, and what copies its run folder."""
    tree, queue = [], [pid]
    while queue:
        tree.append(queue.pop())
        queue += children(tree[-1])
    for each in tree:
        os.kill(each, signal.SIGKILL)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_run_whose_node_is_lost_goes_on_from_its_bucket_and_remembers(
    scheme: str, bucket: Bucket, corpus: Path, unbroken: dict[int, float], tmp_path: Path
) -> None:
    bucket.objects.clear()
    bucket.objects.update({f"team-{scheme}/{name}": data for name, data in FOREIGN.items()})
    bucket.objects.update(
        {
            f"team-{scheme}/corpus/{path.name}": path.read_bytes()
            for path in corpus.glob("*.array_record")
        }
    )
    before = dict(bucket.objects)
    home = f"team-{scheme}/runs/lm"
    env: dict[str, Any] = {
        **bucket.environ(),
        **POD,
        **QUICK_COMPILES,
        contract.TRAIN_SPEC: spec(corpus, f"{scheme}://team-{scheme}/corpus", f"{scheme}://{home}"),
        contract.RUN_URL: f"{scheme}://{home}/.jaxlaunch",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    with Gang(tmp_path, job(None), env=env) as gang:
        gang.start()
        gang.until("a checkpoint", lambda: f"{home}/5/jaxlaunch.manifest.json" in bucket.objects)
        gang.until("a record", lambda: f"{home}/.jaxlaunch/attempts.jsonl" in bucket.objects)
        kill_all(gang.agents[0].pid)
    gang, codes = launch(tmp_path, job(None), env=env | {contract.POD_UID: "pod-2"}, generation=1)
    assert codes == [0], gang.talk
    after = dict(bucket.objects)
    assert {name: after.get(name) for name in before} == before
    left = {name: data for name, data in after.items() if name not in before}
    entries = {name.removeprefix(f"{home}/").split("/")[0] for name in left}
    assert entries == {"10", f"{STEPS}", "inputs.json", ".jaxlaunch"}
    run = {
        name.removeprefix(f"{home}/.jaxlaunch/"): data
        for name, data in left.items()
        if "/.jaxlaunch/" in name
    }
    found = losses(run["metrics.jsonl"])
    assert found == {step: unbroken[step] for step in found}
    assert found.keys() >= set(range(11, STEPS + 1))  # it went on from 5 or 10
    summary = json.loads(run["summary.json"])
    assert (summary["status"], summary["step"]) == ("done", STEPS)
    generations = [json.loads(line)["generation"] for line in run["attempts.jsonl"].splitlines()]
    assert generations[0] == 0 and generations[-1] == 1
    assert "resumed at step" in gang.talk + gang.out
    assert b"resumed at step" in run["starts/1/logs/rank-0.log"]
    assert not is_alive(gang.agents[0].pid)
    if scheme == "gs":
        another_rate_is_refused(tmp_path, bucket, home, env)


def another_rate_is_refused(tmp_path: Path, bucket: Bucket, home: str, env: dict[str, Any]) -> None:
    """The same job, submitted again with another learning rate: the bucket keeps both jobs, what differs, and the step
    that is saved."""
    train = json.loads(env[contract.TRAIN_SPEC])
    train["optimizer"] = {"lr": 0.5}
    more = {
        contract.TRAIN_SPEC: json.dumps(train),
        contract.UID: "another-start",
        contract.POD_UID: "pod-3",
    }
    gang, codes = launch(tmp_path / "again", job(None), env=env | more)
    assert codes == [contract.BAD_SPEC], gang.talk
    kept = {name.partition("/.jaxlaunch/")[2]: data for name, data in dict(bucket.objects).items()}
    summary = json.loads(kept["summary.json"])
    assert "this job says 0.5: use another name" in summary["verdict"]["message"]
    assert (summary["saved"], len(summary["starts"])) == (STEPS, 2)
    assert summary["starts"][1]["changed"] == {"train.optimizer": [None, {"lr": 0.5}]}
    jobs = [
        json.loads(kept[name]) for name in ("starts/1/job.yaml", "starts/2/job.yaml", "job.yaml")
    ]
    assert [one["train"].get("optimizer") for one in jobs] == [None, {"lr": 0.5}, None]
