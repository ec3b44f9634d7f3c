"""A run that was killed resumes bit for bit and example for example."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.gang.runs import Running, assert_success, digits_block, make_job, run_job

pytestmark = pytest.mark.computes

TRACED = {
    "source": "synthetic",
    "examples": 100,
    "eval_examples": 16,
    "shape": [8, 8],
    "trace": True,
}


def test_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    document = make_job(digits_block(steps=60, checkpoint={"every": 10}), hosts=2)
    unbroken = assert_success(run_job(tmp_path / "unbroken", document))
    with Running(tmp_path / "broken", document) as running:
        running.wait_for_step(37)
        running.kill()
    resumed = assert_success(run_job(tmp_path / "broken", document))
    assert resumed.losses == unbroken.losses
    assert sorted(resumed.losses) == list(range(1, 61))


@pytest.mark.extended
def test_other_process_counts_see_the_same_examples(tmp_path: Path) -> None:
    train = digits_block(steps=30, data=TRACED, checkpoint={"every": 10})
    whole = assert_success(run_job(tmp_path / "whole", make_job(train, hosts=2, per_host=2)))
    for steps, hosts, per_host in ((10, 2, 2), (20, 1, 4), (30, 4, 1)):
        part = assert_success(
            run_job(
                tmp_path / "parts",
                make_job(train | {"steps": steps}, hosts=hosts, per_host=per_host),
            )
        )
    assert part.example_ids() == whole.example_ids()
    assert sorted(part.losses) == list(range(1, 31))
    for step, loss in whole.losses.items():
        assert part.losses[step] == pytest.approx(loss, rel=1e-5), f"step {step}"


def test_each_epoch_sees_every_example_once(tmp_path: Path) -> None:
    train = {
        key: value for key, value in digits_block(data=TRACED, epochs=3).items() if key != "steps"
    }
    result = assert_success(run_job(tmp_path, make_job(train, hosts=2)))
    order = [example for _, ids in sorted(result.example_ids().items()) for example in ids]
    epochs = [order[start : start + 100] for start in (0, 100, 200)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(100))
    assert epochs[0] != epochs[1] != epochs[2]
