"""Half precision reaches what float32 does."""

from __future__ import annotations

import json

import pytest

from tests.gang.runs import each, job, launch, succeed

pytestmark = [pytest.mark.computes, pytest.mark.extended]

DIGITS = {
    "task": "classify",
    "data": {"source": "tfds", "name": "digits"},
    "batch": 128,
    "epochs": 20,
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "eval": {"every": None},
    "checkpoint": {"every": None},
}


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Accuracy on the held-out digits by precision."""
    folder = tmp_path_factory.mktemp("precision")
    blocks = {precision: DIGITS | {"precision": precision} for precision in ("fp32", "bf16", "fp16")}
    succeed(launch(folder, job(command=each(folder, blocks), per_host=2)))
    lines = {name: (folder / name / "eval.jsonl").read_text().splitlines() for name in blocks}
    return {name: float(json.loads(last)["accuracy"]) for name, (*_, last) in lines.items()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_reads_digits_as_well_as_float32(accuracy: dict[str, float], precision: str) -> None:
    assert accuracy["fp32"] > 0.95
    assert accuracy[precision] == pytest.approx(accuracy["fp32"], abs=0.005)
