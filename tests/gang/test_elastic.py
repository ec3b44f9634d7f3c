"""A gang that goes on with fewer hosts, and grows again: the examples and losses of one that has all hosts always."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.job.load import load_job
from tests.compiled import SITE, quick_starts
from tests.gang.agents import ROOT, Gang, job
from tests.gang.runs import HERE, Result, digits

pytestmark = [pytest.mark.computes, pytest.mark.extended]

HOSTS = 4
BATCH = 24  # divides over 4, 3 and 2 hosts
EXAMPLES, STEPS = 480, 160
EXAMPLE = load_job(ROOT / "examples" / "elastic.yaml")
assert (
    EXAMPLE.train is not None
    and EXAMPLE.train.batch == BATCH
    and EXAMPLE.trainable_host_counts == (2, 3, 4)
)
DIGITS = digits(
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


def packed(folder: Path) -> dict[str, Any]:
    """A language model on two parts of texts, packed into rows."""
    for name, count in (("code", 900), ("web", 1500)):
        rows = [{"text": f"{name} {number} " * (1 + number % 3)} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {
        name: {"weight": weight, "path": f"{folder}/{name}.jsonl"}
        for name, weight in (("code", 1), ("web", 2))
    }
    data = {"source": "mixture", "tokenizer": "bytes", "parts": parts, "trace": True}
    model = {"kind": "gpt2", "layers": 1, "width": 8, "heads": 2, "vocab": 256, "length": 32}
    optimizer = {
        "name": "adamw",
        "lr": 1e-3,
    }  # low, since the rounding of another mesh grows with the steps taken
    prepared = data | {"data_dir": str(folder / "prepared")}
    return digits(task="lm", model=model, data=prepared, batch=BATCH, optimizer=optimizer)


def gang(folder: Path, train: dict[str, Any], hosts: int, **fields: Any) -> Gang:
    path = os.pathsep.join([SITE, str(HERE), str(ROOT)])
    block = train | {"steps": STEPS, "checkpoint": {"every": 10}}
    env = {
        **quick_starts(),
        "PYTHONPATH": path,
        contract.TRAIN_SPEC: json.dumps(block),
        "JAX_PLATFORMS": "cpu",
    }
    return Gang(folder, job(None, **fields), hosts=hosts, env=env)


def losses_and_ids(of: Gang) -> tuple[dict[int, float], dict[int, list[int]]]:
    found = Result(0, "", "", of.run_dir)
    return found.losses, found.ids()


@pytest.mark.parametrize(
    "lost", [(3,), (1, 2)], ids=["4 to 3 to 4 hosts", "4 to 2 to 3 hosts, packed"]
)
def test_examples_and_losses_are_those_of_a_gang_that_lost_no_host(
    tmp_path: Path, lost: tuple[int, ...]
) -> None:
    train = DIGITS if len(lost) == 1 else packed(tmp_path)
    with gang(tmp_path / "fixed", train, 1, devices_per_process=HOSTS) as fixed:
        assert fixed.start().wait() == [0]
    fields: dict[str, Any] = {
        "sizes": EXAMPLE.trainable_host_counts,
        "replaces": True,
        "in_place_limit": 9,
        "timeouts_s": {"replace": 1.0},
    }
    with gang(tmp_path / "elastic", train, HOSTS, **fields) as elastic:
        elastic.start()
        elastic.until(
            "a save", lambda: (elastic.run_dir / "checkpoints" / "10" / contract.MANIFEST).exists()
        )
        for host in lost:
            elastic.signal(host, signal.SIGKILL)
            elastic.agents.pop(host).wait()
        few = HOSTS - len(lost)
        elastic.until("fewer hosts", lambda: f"{few} processes on {few} hosts" in elastic.talk)
        elastic.start(lost[0])
        more = few + 1
        elastic.until(
            "more hosts",
            lambda: f"stopped to continue with {more} hosts instead of {few}" in elastic.talk,
        )
        assert set(elastic.wait()) == {0}
    assert [one["cause"] for one in elastic.attempts] == ["lost", "preempted", "done"]
    said = elastic.attempts[1]["verdict"][
        "message"
    ]  # it stops right after a regular save, often before another step
    assert re.search(
        rf"{more} hosts instead of {few}: (saved at|nothing new to save after) step \d+", said
    ), said
    assert len(json.loads((elastic.run_dir / "agents.json").read_text())) == more
    losses, ids = losses_and_ids(elastic)
    wanted, shown = losses_and_ids(fixed)
    assert ids == shown
    assert sorted(losses) == sorted(wanted) == list(range(1, STEPS + 1))
    for step, loss in wanted.items():
        assert losses[step] == pytest.approx(loss, rel=1e-5, abs=1e-6), f"step {step}"
    if train is DIGITS:
        order = [example for _, of_step in sorted(ids.items()) for example in of_step]
        for start in range(0, len(order), EXAMPLES):
            assert sorted(order[start : start + EXAMPLES]) == list(range(EXAMPLES)), (
                "each once an epoch"
            )
