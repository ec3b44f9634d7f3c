"""The examples do what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.gang.runs import USUAL_COMPILES, launch

pytestmark = pytest.mark.computes

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_language_model_beats_a_bigram_of_the_same_text(tmp_path: Path) -> None:
    document = yaml.safe_load((EXAMPLES / "lm.yaml").read_text())
    # YAML 1.1 reads 3e-3 as text; the launcher does not.
    document["train"]["optimizer"]["lr"] = 3e-3
    train = document["train"]
    assert (document["hosts"], document["accelerator"]["per_host"]) == (2, 4)
    assert (train["mesh"], train["accumulate"]) == ({"dp": 2, "fsdp": 2, "mp": 2}, 2)
    assert train["precision"] == "bf16" and train["remat"] != "none"
    result = launch(tmp_path, document, env=USUAL_COMPILES)  # of quick programs its steps take three times as long
    assert result.code == 0, result.stderr[-3000:]
    metrics = result.summary["metrics"]
    assert metrics["eval_bits_per_byte"] < metrics["eval_bigram_bits_per_byte"]
    assert 3.2 < metrics["eval_bigram_bits_per_byte"] < 3.8
    assert "bigram_bits_per_byte" in result.stdout


def test_groups_are_trained_apart_until_they_get_no_better(tmp_path: Path) -> None:
    result = launch(tmp_path, yaml.safe_load((EXAMPLES / "groups.yaml").read_text()))
    assert result.code == 0, result.stderr[-3000:]
    assert "train.optimizer.groups.0 (layers\\.0\\..*): 2 arrays" in result.stdout and "frozen" in result.stdout
    assert "weight decay on matrices alone: 2 of 6 arrays" in result.stdout
    assert "stopped early at step" in result.stdout
    metrics = result.summary["metrics"]
    assert metrics["eval_accuracy"] > 0.85
    evaluated = [json.loads(line) for line in (result.folder / "eval.jsonl").read_text().splitlines()]
    best = max(evaluated, key=lambda line: line["accuracy"])["step"]
    assert (result.folder / "checkpoints" / str(best)).is_dir()
