"""Half precision reaches what float32 does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.runs import job, launch

pytestmark = pytest.mark.computes

DIGITS = {
    "task": "trainer.tasks.classify:Classify",
    "data": {"source": "tfds", "name": "digits"},
    "batch": 128,
    "epochs": 20,
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "eval": {"every": None},
    "checkpoint": {"every": None},
}


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory: pytest.TempPathFactory) -> float:
    return trained(tmp_path_factory.mktemp("fp32"), "fp32")


def trained(folder: Path, precision: str) -> float:
    """Accuracy on the held-out digits."""
    result = launch(folder, job(DIGITS | {"precision": precision}, per_host=2))
    assert result.code == 0, result.stderr[-3000:]
    return float(result.summary["metrics"]["eval_accuracy"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_reads_digits_as_well_as_float32(tmp_path: Path, accuracy: float, precision: str) -> None:
    assert accuracy > 0.95
    assert trained(tmp_path, precision) == pytest.approx(accuracy, abs=0.005)
