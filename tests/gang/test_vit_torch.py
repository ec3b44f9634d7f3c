"""The tutorial of a ViT on torch data: its example in the trainer, and its own program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.job import load as jobs
from tests import environments, needs
from tests.gang.runs import Result, assert_success, run_job

pytestmark = [pytest.mark.computes, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vit_torch"


def run_example(folder: Path, name: str, *overrides: str, **keys: Any) -> Result:
    """Run a job of the example at small size, with torch's packages before our own."""
    document = yaml.safe_load((EXAMPLE / name).read_text()) | {
        "code": str(EXAMPLE),
        "restarts": {"in_place": 0},
    }
    document |= keys
    libraries = needs.packages("torch")
    env = environments.LAZY | {"PYTHONPATH": f"{ROOT}:{libraries}", "USE_TORCH": "0"}
    return assert_success(run_job(folder, document, *overrides, env=env))


def test_example_trains_the_built_in_vit_on_the_torch_dataset(tmp_path: Path) -> None:
    small = (
        "train.model={kind: vit, layers: 1, width: 16, heads: 1, image: [32, 32], classes: 1000}",
    )
    steps = (
        "train.steps=4",
        "train.log_every=1",
        "train.optimizer.lr=1e-4",
        "train.data.args={length: 12, side: 32}",
    )
    result = run_example(tmp_path, "job.yaml", *small, *steps)
    assert list(result.losses) == [1, 2, 3, 4]
    assert all(6 < loss < 8 for loss in result.losses.values())  # ln 1000 = 6.9
    assert "read one at a time" not in result.stdout  # as they would be without workers


def test_program_of_the_tutorial_runs(tmp_path: Path) -> None:
    small = ["--steps=3", "--batch=2", "--workers=0", "--side=32", "--layers=1", "--width=64"]
    result = run_example(tmp_path, "tutorial.yaml", command=[sys.executable, "tutorial.py", *small])
    assert "step 3: loss " in result.stdout and result.summary["step"] == 3
    assert 5 < result.summary["metrics"]["loss"] < 9


@pytest.mark.parametrize("name", ["job.yaml", "tutorial.yaml"])
def test_jobs_of_the_example_are_valid(name: str) -> None:
    assert jobs.load_job(EXAMPLE / name).code == "."
