"""A run that was killed resumes bit for bit and example for example."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.gang.runs import Running, assert_success, digits_block, make_job, run_job
from tests.trainer.data import test_split

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


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["table", "text"])
def test_split_is_the_same_on_1_2_and_4_hosts_and_after_a_resume(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    test_split.write_set(folder, kind, test_split.make_items("periodic"))
    block = test_split.make_block(folder, kind, "", eval_split=0.2)
    held_out = test_split.read_contents(folder, block, "eval")
    rows = {"kind": "mlp", "width": 16, "layers": 1, "classes": test_split.CLASSES}
    tokens = {"kind": "decoder", "layers": 1, "width": 16, "heads": 2, "vocab": 256, "length": 200}
    task, model = ("classify", rows) if kind == "table" else ("lm", tokens)
    train = {"task": task, "model": model, "data": block, "checkpoint": {"every": 4}, "batch": 8}
    for steps, hosts in ((4, 1), (8, 2), (12, 4)):
        # Training refuses to resume with other examples, and names other held-out ones.
        document = make_job(train | {"steps": steps}, hosts=hosts, per_host=4 // hosts)
        result = assert_success(run_job(tmp_path / "run", document))
        assert result.summary["metrics"]["eval_examples"] == len(held_out)
        assert "the held-out data" not in result.stdout
    assert result.summary["step"] == 12
    other = block | {"split_seed": 1}
    document = make_job(train | {"steps": 16, "data": other}, per_host=4)
    refused = run_job(tmp_path / "run", document)
    assert refused.code == 65 and "the training data changed" in refused.stderr + refused.stdout
