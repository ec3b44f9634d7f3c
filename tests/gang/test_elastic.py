"""A gang that shrinks and grows again gets the examples and losses of a gang of constant size."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.job.load import load_job
from tests.compiled import SITE, quick_start_env
from tests.gang.agents import ROOT, Gang, make_job
from tests.gang.runs import HERE, Result, digits_block

pytestmark = [pytest.mark.computes, pytest.mark.extended]

HOSTS = 4
BATCH = 24  # divides over 4, 3 and 2 hosts
EXAMPLES, STEPS = 480, 160
EXAMPLE = load_job(ROOT / "examples" / "elastic.yaml")
assert EXAMPLE.train is not None
assert EXAMPLE.train.batch == BATCH
assert EXAMPLE.trainable_host_counts == (2, 3, 4)
DIGITS = digits_block(
    batch=BATCH,
    mesh=EXAMPLE.train.mesh.model_dump(exclude_unset=True),
    optimizer=EXAMPLE.train.optimizer.model_dump(exclude_unset=True),
    data={
        "source": "synthetic",
        "examples": EXAMPLES,
        "eval_examples": 48,
        "shape": [8, 8],
        "trace": True,
    },
)


def packed_train(folder: Path, **model: Any) -> dict[str, Any]:
    """Return a language model on two parts of texts, packed into rows."""
    for name, count in (("code", 900), ("web", 1500)):
        rows = [{"text": f"{name} {number} " * (1 + number % 3)} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {
        name: {"weight": weight, "path": f"{folder}/{name}.jsonl"}
        for name, weight in (("code", 1), ("web", 2))
    }
    data = {"source": "mixture", "tokenizer": "bytes", "parts": parts, "trace": True}
    model = {"layers": 1, "width": 8, "heads": 2, "vocab": 256, "length": 32, **model}
    # Low, since the rounding of another mesh grows with the steps taken.
    optimizer = {"name": "adamw", "lr": 1e-3}
    prepared = data | {"data_dir": str(folder / "prepared")}
    return digits_block(task="lm", model=model, data=prepared, batch=BATCH, optimizer=optimizer)


TRAINS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "digits": lambda folder: DIGITS,
    # Three hosts take two micro-batches, so a balance loss of each of them would differ.
    "experts": partial(
        packed_train,
        kind="decoder",
        experts=4,
        expert_hidden=8,
        dense_layers=[],
        balance=0.5,
        router_z=0.01,
    ),
}


def make_gang(folder: Path, train: dict[str, Any], hosts: int, **fields: Any) -> Gang:
    path = os.pathsep.join([SITE, str(HERE), str(ROOT)])
    block = train | {"steps": STEPS, "checkpoint": {"every": 10}}
    env = {
        **quick_start_env(),
        "PYTHONPATH": path,
        contract.TRAIN_SPEC: json.dumps(block),
        "JAX_PLATFORMS": "cpu",
    }
    return Gang(folder, make_job(None, **fields), hosts=hosts, env=env)


def read_losses_and_ids(gang: Gang) -> tuple[dict[int, float], dict[int, list[int]]]:
    result = Result(0, "", "", gang.run_dir)
    return result.losses, result.example_ids()


@pytest.mark.parametrize(
    ("kind", "lost"),
    [("digits", (3,)), ("experts", (1, 2))],
    ids=["4 to 3 to 4 hosts", "4 to 2 to 3 hosts, packed and with experts"],
)
def test_elastic_gang_has_the_examples_and_losses_of_a_fixed_one(
    tmp_path: Path, kind: str, lost: tuple[int, ...]
) -> None:
    train = TRAINS[kind](tmp_path)
    with make_gang(tmp_path / "fixed", train, 1, devices_per_process=HOSTS) as fixed:
        assert fixed.start().wait() == [0]
    fields: dict[str, Any] = {
        "sizes": EXAMPLE.trainable_host_counts,
        "replaces": True,
        "in_place_limit": 9,
        "timeouts_s": {"replace": 1.0},
    }
    with make_gang(tmp_path / "elastic", train, HOSTS, **fields) as elastic:
        elastic.start()
        elastic.wait_until(
            "a save", lambda: (elastic.run_dir / "checkpoints" / "10" / contract.MANIFEST).exists()
        )
        for host in lost:
            elastic.signal(host, signal.SIGKILL)
            elastic.agents.pop(host).wait()
        fewer_hosts = HOSTS - len(lost)
        elastic.wait_until(
            "fewer hosts",
            lambda: f"{fewer_hosts} processes on {fewer_hosts} hosts" in elastic.stderr,
        )
        elastic.start(lost[0])
        more_hosts = fewer_hosts + 1
        elastic.wait_until(
            "more hosts",
            lambda: (
                f"stopped to continue with {more_hosts} hosts instead of {fewer_hosts}"
                in elastic.stderr
            ),
        )
        assert set(elastic.wait()) == {0}
    assert [record["cause"] for record in elastic.attempts] == ["lost", "preempted", "done"]
    # It stops right after a regular save, often before another step.
    message = elastic.attempts[1]["verdict"]["message"]
    assert re.search(
        rf"{more_hosts} hosts instead of {fewer_hosts}: "
        r"(saved at|nothing new to save after) step \d+",
        message,
    ), message
    assert len(json.loads((elastic.run_dir / "agents.json").read_text())) == more_hosts
    losses, ids = read_losses_and_ids(elastic)
    expected_losses, expected_ids = read_losses_and_ids(fixed)
    assert ids == expected_ids
    assert sorted(losses) == sorted(expected_losses) == list(range(1, STEPS + 1))
    for step, loss in expected_losses.items():
        assert losses[step] == pytest.approx(loss, rel=1e-5, abs=1e-6), f"step {step}"
    if kind == "digits":
        order = [example for _, of_step in sorted(ids.items()) for example in of_step]
        for start in range(0, len(order), EXAMPLES):
            assert sorted(order[start : start + EXAMPLES]) == list(range(EXAMPLES)), (
                "each once an epoch"
            )
