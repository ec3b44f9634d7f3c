"""The examples train as they promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.gang.run_files import read_json_lines
from tests.gang.runs import USUAL_COMPILES, run_job, run_launcher
from tests.trainer.text import corpora

pytestmark = [pytest.mark.computes, pytest.mark.extended]

EXAMPLES = Path(__file__).parents[2] / "examples"
NO_STANDBY = "restarts.in_place=0"  # processes that would take over where one fails


def test_language_model_beats_a_bigram_model_of_its_text(tmp_path: Path) -> None:
    document = yaml.safe_load((EXAMPLES / "lm.yaml").read_text())
    # YAML 1.1 reads 3e-3 as text; the launcher does not.
    document["train"]["optimizer"]["lr"] = 3e-3
    train = document["train"]
    assert (document["hosts"], document["accelerator"]["per_host"]) == (2, 4)
    assert (train["mesh"], train["accumulate"]) == ({"dp": 2, "fsdp": 2, "mp": 2}, 2)
    assert train["precision"] == "bf16" and train["remat"] != "none"
    # Half of its rows, four fifths of its steps and less held-out text are enough.
    steps, rows = train["steps"] * 4 // 5, train["batch"] // 2
    fewer = (f"train.steps={steps}", f"train.batch={rows}", "train.data.eval_split=0.02")
    # Of quick programs its steps take three times as long.
    result = run_job(tmp_path, document, NO_STANDBY, *fewer, env=USUAL_COMPILES)
    assert result.code == 0, result.stderr[-3000:]
    metrics = result.summary["metrics"]
    assert metrics["eval_bits_per_byte"] < metrics["eval_bigram_bits_per_byte"]
    assert 3.2 < metrics["eval_bigram_bits_per_byte"] < 3.8
    assert "bigram_bits_per_byte" in result.stdout


def test_mixture_of_experts_learns_and_stays_balanced(tmp_path: Path) -> None:
    half = (NO_STANDBY, "train.steps=30", "train.log_every=1")
    result = run_job(tmp_path, yaml.safe_load((EXAMPLES / "moe.yaml").read_text()), *half)
    assert result.code == 0, result.stderr[-3000:]
    first, last = result.metrics[0], result.metrics[-1]
    assert last["loss"] < 0.7 * first["loss"]
    assert sum(last[f"expert_load/{number}"] for number in range(4)) == pytest.approx(1.0)
    assert 1.0 <= last["expert_load_max"] < 2.0
    assert "expert_load_max" in result.stdout and "expert_load/" not in result.stdout


def test_groups_are_trained_apart_until_early_stopping(tmp_path: Path) -> None:
    result = run_job(tmp_path, yaml.safe_load((EXAMPLES / "groups.yaml").read_text()), NO_STANDBY)
    assert result.code == 0, result.stderr[-3000:]
    assert "train.optimizer.groups.0 (layers\\.0\\..*): 2 arrays" in result.stdout
    assert "frozen" in result.stdout
    assert "weight decay on matrices alone: 2 of 6 arrays" in result.stdout
    assert "stopped early at step" in result.stdout
    metrics = result.summary["metrics"]
    assert metrics["eval_accuracy"] > 0.85
    evaluated = read_json_lines(result.folder / "eval.jsonl")
    best = max(evaluated, key=lambda line: line["accuracy"])["step"]
    assert (result.folder / "checkpoints" / str(best)).is_dir()


def test_mixture_is_prepared_once_and_exported_with_its_tokenizer(tmp_path: Path) -> None:
    document = yaml.safe_load((EXAMPLES / "mixture.yaml").read_text())
    document |= {"hosts": 2, "accelerator": {"type": "cpu", "per_host": 1}}
    train = document["train"]
    assert train["data"]["tokenizer"] == "bytes"
    train["data"] |= {
        "tokenizer": corpora.save_tokenizer(tmp_path / "tokenizer"),
        "data_dir": str(tmp_path / "prepared"),
    }
    train["data"]["parts"] = {
        "json": {"weight": 0.7, "path": "stdlib://json/*.py", "eval_split": 0.2},
        "mail": {"weight": 0.3, "path": "stdlib://email/*.py", "eval_split": 0.1},
    }
    train["optimizer"] = {"lr": 3e-3, "schedule": {"name": "constant"}}
    train |= {
        "steps": 12,
        "log_every": 6,
        "batch": 8,
        "eval": {"every": 6},
        "checkpoint": {"every": None},
    }
    train["model"] |= {"layers": 1, "width": 32, "vocab": 512, "length": 64}
    result = run_job(tmp_path, document, NO_STANDBY)
    assert result.code == 0, result.stderr[-3000:]
    # Parts, hosts, splits; one of the hosts does it.
    assert result.stdout.count("preparing text") <= 2 * 2 * 2
    first, last = read_json_lines(result.folder / "eval.jsonl")
    assert last["bits_per_byte"] < first["bits_per_byte"] < 8
    assert last["perplexity"] < first["perplexity"]
    epochs = result.metrics[-1]
    assert epochs["epoch/mail"] > 0
    assert 66 <= round(epochs["epoch/json"] * _count_rows(tmp_path, "json")) <= 69
    run_launcher("export", result.folder, "--to", tmp_path / "out", check=True)
    original, exported = tmp_path / "tokenizer", tmp_path / "out"
    assert (exported / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes()
    settings = json.loads((original / "tokenizer_config.json").read_text())
    # transformers needs the class, which this tokenizer does not name.
    added = {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert json.loads((exported / "tokenizer_config.json").read_text()) == settings | added


def _count_rows(folder: Path, part: str) -> int:
    """Return the rows that a part of the mixture trains on, as `launcher prepare` reports them."""
    done = run_launcher("prepare", folder / "job.yaml", "-o", "json", check=True)
    datasets = json.loads(done.stdout)["prepared"]
    (dataset,) = (dataset for dataset in datasets if f"/{part}/" in dataset["first"])
    assert "preparing text" not in done.stderr
    return int(dataset["rows"]["train"])
