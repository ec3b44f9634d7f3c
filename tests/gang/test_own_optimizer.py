"""An optimizer and a schedule of the user's, the best step and an early end, over a stop and a change of host count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Result, digits, job, launch, succeed

pytestmark = [pytest.mark.computes, pytest.mark.extended]

OPTIMIZER: dict[str, Any] = {
    "name": "mine:momentum",
    "args": {"decay": 0.8},
    "lr": 0.1,
    "schedule": {"name": "mine:halving", "args": {"every": 6}},
    "groups": [{"match": "head.*", "lr": 0.5}, {"match": ".*bias", "freeze": True}],
}
WATCHED: dict[str, Any] = {
    "eval": {"every": 4},
    # The worst is kept besides the newest: it comes first.
    "checkpoint": {"every": None, "keep": 1, "best": {"mode": "max"}},
    "stop_early": {"patience": 3, "min_delta": 100.0},  # nothing is that much better than the first evaluation
}


def evaluated(result: Result) -> dict[int, float]:
    lines = map(json.loads, (result.folder / "eval.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def test_they_survive_a_resume_on_another_number_of_hosts(tmp_path: Path) -> None:
    train = digits(steps=40, optimizer=OPTIMIZER, **WATCHED)
    whole = succeed(launch(tmp_path / "whole", job(train, hosts=1, per_host=2)))
    succeed(launch(tmp_path / "parts", job(train | {"steps": 8}, hosts=1, per_host=2)))
    parts = succeed(launch(tmp_path / "parts", job(train, hosts=2, per_host=1)))
    said = "stopped early at step 16 of 40: eval/loss was not better than"
    for result in (whole, parts):
        assert said in result.stdout
        assert sorted(result.losses) == list(range(1, 17))
        steps = {int(each.name) for each in (result.folder / "checkpoints").iterdir() if each.name.isdecimal()}
        assert steps == {16, max(evaluated(result), key=evaluated(result).__getitem__)}
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    rates = {line["step"]: line["learning_rate"] for line in parts.metrics}
    assert [rates[step] for step in (1, 6, 7, 13)] == pytest.approx([0.1, 0.1, 0.05, 0.025])
