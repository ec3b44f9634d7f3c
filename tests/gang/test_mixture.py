"""A mixture of prepared texts, killed and resumed on other numbers of processes, shows the examples of its schedule."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.trainer.sources.mixture import BLOCKS, Mixture
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import LM, TrainSpec
from tests.gang.runs import Running, digits, job, launch, succeed, until_gone

pytestmark = [pytest.mark.computes, pytest.mark.extended]

WEIGHTS = {"code": 0.3, "web": 0.7}
BATCH, EVERY = 20, 5
BLOCK = BLOCKS[0] // BATCH  # steps of a block
ENDLESS = 1_000_000


def block(folder: Path) -> dict[str, Any]:
    """A train block on two parts of as many rows as their texts."""
    for name, count in (("code", 130), ("web", 250)):
        rows = [{"text": f"{name} {number}"} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = {name: {"weight": weight, "path": f"{folder}/{name}.jsonl"} for name, weight in WEIGHTS.items()}
    data = {"source": "mixture", "tokenizer": "bytes", "packing": "none", "parts": parts, "trace": True}
    model = {"kind": "gpt2", "layers": 1, "width": 8, "heads": 2, "vocab": 256, "length": 12}
    data |= {"data_dir": str(folder / "prepared")}
    return digits(task=LM, model=model, data=data, batch=BATCH, steps=ENDLESS, checkpoint={"every": EVERY, "keep": 2})


def killed(folder: Path, train: dict[str, Any], hosts: int, begun: int, steps: int) -> None:
    """Runs it on so many processes until all are killed, soon after so many steps and a save of its own."""
    with Running(folder, job(train, hosts=hosts, per_host=4 // hosts)) as running:
        running.until_step(begun + steps)
        running.until("a save", lambda: newest(folder) > begun)  # in the background: it may take longer than steps
        pids = running.tree()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        until_gone(pids)


def newest(folder: Path) -> int:
    """The newest complete checkpoint of a run; 0 before the first."""
    saved = folder.glob("run/checkpoints/*/jaxlaunch.manifest.json")
    return max((int(path.parent.name) for path in saved), default=0)


def test_killed_and_resumed_on_two_one_and_four_processes_it_shows_the_same_ids(tmp_path: Path) -> None:
    train = block(tmp_path)
    draw = random.Random()
    for hosts in (2, 1):
        killed(tmp_path, train, hosts, newest(tmp_path), draw.randint(EVERY + 1, 4 * EVERY))
    blocks = (newest(tmp_path) + EVERY) // BLOCK + 1
    steps = blocks * BLOCK
    found = succeed(launch(tmp_path, job(train | {"steps": steps}, hosts=4, per_host=1))).ids()

    source = open_source(TrainSpec.model_validate(train), "train")
    assert isinstance(source, Mixture)
    schedule = source.indexes(0, steps * BATCH, seed=train.get("seed", 0), shuffle=True).tolist()
    assert found == {step: schedule[step * BATCH : (step + 1) * BATCH] for step in range(steps)}
    for number in range(blocks):
        ids = [index for step in range(number * BLOCK, (number + 1) * BLOCK) for index in found[step]]
        counted = Counter(next(n for n, part in source.evaluated_parts.items() if index in part) for index in ids)
        assert all(abs(counted[name] - weight * len(ids)) < 1 for name, weight in WEIGHTS.items()), (number, counted)
