"""A run that was killed goes on as if it had not been: bit for bit, example for example."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.gang.runs import Running, digits, job, launch, succeed, until_gone

pytestmark = pytest.mark.computes

TRACED = {
    "source": "synthetic",
    "examples": 100,
    "eval_examples": 16,
    "shape": [8, 8],
    "trace": True,
}


def test_sixty_steps_are_bit_equal_after_every_process_was_killed_near_step_37(
    tmp_path: Path,
) -> None:
    document = job(digits(steps=60, checkpoint={"every": 10}), hosts=2)
    unbroken = succeed(launch(tmp_path / "unbroken", document))
    with Running(tmp_path / "broken", document) as running:
        running.until_step(37)
        pids = running.tree()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        until_gone(pids)
    resumed = succeed(launch(tmp_path / "broken", document))
    assert resumed.losses == unbroken.losses
    assert sorted(resumed.losses) == list(range(1, 61))


@pytest.mark.extended
def test_other_process_counts_see_the_same_examples(tmp_path: Path) -> None:
    train = digits(steps=30, data=TRACED, checkpoint={"every": 10})
    whole = succeed(launch(tmp_path / "whole", job(train, hosts=2, per_host=2)))
    for steps, hosts, per_host in ((10, 2, 2), (20, 1, 4), (30, 4, 1)):
        part = succeed(
            launch(
                tmp_path / "parts", job(train | {"steps": steps}, hosts=hosts, per_host=per_host)
            )
        )
    assert part.ids() == whole.ids()
    assert sorted(part.losses) == list(range(1, 31))
    for step, loss in whole.losses.items():
        assert part.losses[step] == pytest.approx(loss, rel=1e-5), f"step {step}"


def test_three_epochs_see_each_example_once_an_epoch(tmp_path: Path) -> None:
    train = {key: value for key, value in digits(data=TRACED, epochs=3).items() if key != "steps"}
    result = succeed(launch(tmp_path, job(train, hosts=2)))
    order = [example for _, ids in sorted(result.ids().items()) for example in ids]
    epochs = [order[start : start + 100] for start in (0, 100, 200)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(100))
    assert epochs[0] != epochs[1] != epochs[2]
