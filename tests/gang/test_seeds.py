"""Equal seeds give equal runs to the bit; steps sent to the devices together round a few numbers otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import USUAL_COMPILES, Result, digits, job, launch, succeed
from tests.gang.test_meshes import MODELS

pytestmark = [pytest.mark.computes, pytest.mark.extended]

GPT2 = MODELS["gpt2"]
DROPPING = GPT2 | {"model": GPT2["model"] | {"layers": 1, "dropout": 0.2}, "steps": 11, "log_every": 1}


def train(folder: Path, **keys: Any) -> Result:
    result = succeed(launch(folder, job(digits(**(DROPPING | keys)), hosts=2, per_host=1), env=USUAL_COMPILES))
    assert sorted(result.losses) == list(range(1, DROPPING["steps"] + 1))
    return result


def test_two_runs_of_one_seed_are_bit_equal_and_many_steps_in_one_dispatch_the_same_run(tmp_path: Path) -> None:
    once, again = train(tmp_path / "once"), train(tmp_path / "again")
    together = train(tmp_path / "together", steps_per_dispatch=4, eval={"every": 5}, checkpoint={"every": 7})
    assert again.losses == once.losses
    assert list(together.losses.values()) == pytest.approx(list(once.losses.values()), rel=1e-6)
