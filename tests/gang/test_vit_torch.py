"""The tutorial of a ViT on torch data: its example in the trainer, and its own program as it is typed in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.job import load as jobs
from tests import environments, needs
from tests.gang.runs import Result, launch, succeed

pytestmark = [pytest.mark.computes, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vit_torch"


def run(folder: Path, name: str, *small: str, **keys: Any) -> Result:
    """A job of the example at small size, with torch and transformers ahead of our own packages."""
    document = yaml.safe_load((EXAMPLE / name).read_text()) | {
        "code": str(EXAMPLE),
        "restarts": {"in_place": 0},
    }
    document |= keys
    libraries = needs.packages("torch")
    env = environments.LAZY | {"PYTHONPATH": f"{ROOT}:{libraries}", "USE_TORCH": "0"}
    return succeed(launch(folder, document, *small, env=env))


def test_the_example_trains_our_vit_on_the_dataset_of_the_tutorial_by_its_worker_processes(
    tmp_path: Path,
) -> None:
    small = (
        "train.model={kind: vit, layers: 1, width: 16, heads: 1, image: [32, 32], classes: 1000}",
    )
    steps = (
        "train.steps=4",
        "train.log_every=1",
        "train.optimizer.lr=1e-4",
        "train.data.args={length: 12, side: 32}",
    )
    found = run(tmp_path, "job.yaml", *small, *steps)
    assert list(found.losses) == [1, 2, 3, 4]
    assert all(6 < loss < 8 for loss in found.losses.values())  # ln 1000 = 6.9
    assert "read one at a time" not in found.stdout  # as they would be without workers


def test_the_tutorial_s_own_program_runs_as_it_is_typed(tmp_path: Path) -> None:
    small = ["--steps=3", "--batch=2", "--workers=0", "--side=32", "--layers=1", "--width=64"]
    found = run(tmp_path, "tutorial.yaml", command=[sys.executable, "tutorial.py", *small])
    assert "step 3: loss " in found.stdout and found.summary["step"] == 3
    assert 5 < found.summary["metrics"]["loss"] < 9


@pytest.mark.parametrize("name", ["job.yaml", "tutorial.yaml"])
def test_the_jobs_are_valid(name: str) -> None:
    assert jobs.load_job(EXAMPLE / name).code == "."
