"""The examples do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.gang.runs import launch

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
    result = launch(tmp_path, document)
    assert result.code == 0, result.stderr[-3000:]
    metrics = result.summary["metrics"]
    assert metrics["eval_bits_per_byte"] < metrics["eval_bigram_bits_per_byte"]
    assert 3.2 < metrics["eval_bigram_bits_per_byte"] < 3.8
    assert "bigram_bits_per_byte" in result.stdout
