"""A run that was killed resumes bit for bit and example for example."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Result, Running, assert_success, digits_block, make_job, run_job
from tests.trainer.data import test_split

pytestmark = pytest.mark.computes

TRACED = {
    "source": "synthetic",
    "examples": 100,
    "eval_examples": 16,
    "shape": [8, 8],
    "trace": True,
}


EPOCHS = 9


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Return a job of 57 steps in two processes."""
    train = digits_block(data=TRACED, epochs=EPOCHS, checkpoint={"every": 10})
    del train["steps"]
    return make_job(train, hosts=2, per_host=1)


@pytest.fixture(scope="module")
def unbroken(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Result:
    return assert_success(run_job(tmp_path_factory.mktemp("unbroken"), document))


def test_killed_run_resumes_bit_for_bit(
    tmp_path: Path, document: dict[str, Any], unbroken: Result
) -> None:
    with Running(tmp_path, document) as running:
        running.wait_for_step(37)
        running.kill()
    resumed = assert_success(run_job(tmp_path, document))
    assert resumed.losses == unbroken.losses
    assert sorted(resumed.losses) == list(range(1, 58))


@pytest.mark.extended
def test_other_process_counts_see_the_same_examples_and_split(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    test_split.write_set(folder, "text", test_split.make_items("periodic"))
    block = test_split.make_block(folder, "text", "", eval_split=0.2, trace=True)
    held_out = test_split.read_contents(folder, block, "eval")
    model = {"kind": "decoder", "layers": 1, "width": 16, "heads": 2, "vocab": 256, "length": 200}
    train = {"task": "lm", "model": model, "data": block, "checkpoint": {"every": 4}, "batch": 8}
    train |= {"log_every": 1, "optimizer": {"lr": 1e-3, "schedule": {"name": "constant"}}}
    document = make_job(train | {"steps": 12}, hosts=2, per_host=2)
    whole = assert_success(run_job(tmp_path / "whole", document))
    for steps, hosts in ((4, 2), (8, 1), (12, 4)):
        # Training refuses to resume with other examples, and names other held-out ones.
        document = make_job(train | {"steps": steps}, hosts=hosts, per_host=4 // hosts)
        part = assert_success(run_job(tmp_path / "parts", document))
        assert part.summary["metrics"]["eval_examples"] == len(held_out)
        assert "the held-out data" not in part.stdout
    assert part.example_ids() == whole.example_ids()
    assert sorted(part.losses) == list(range(1, 13))
    for step, loss in whole.losses.items():
        assert part.losses[step] == pytest.approx(loss, rel=1e-5), f"step {step}"
    other = block | {"split_seed": 1}
    document = make_job(train | {"steps": 16, "data": other}, per_host=4)
    refused = run_job(tmp_path / "parts", document)
    assert refused.code == 65 and "the training data changed" in refused.stderr + refused.stdout


def test_each_epoch_sees_every_example_once(unbroken: Result) -> None:
    order = [example for _, ids in sorted(unbroken.example_ids().items()) for example in ids]
    epochs = [order[100 * epoch : 100 * (epoch + 1)] for epoch in range(EPOCHS)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(100))
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
