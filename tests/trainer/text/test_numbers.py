"""The metrics of a run on text: per position, target, byte and part."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.sources import text
from jaxlaunch.trainer.spec import LM, TrainSpec
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.text import build, tokenizer
from jaxlaunch.trainer.train import BuiltInTraining
from tests.trainer.held_out import held_out_texts
from tests.trainer.text import corpora

LENGTH, BATCH = 48, 8
PARTS = {
    name: list(filter(None, corpora.make_texts(count, seed=count)))
    for name, count in (("code", 60), ("web", 90))
}


class Never:
    """Nobody tells this run to stop."""

    def poll(self) -> bool:
        return False


def read_last(folder: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / f"{name}.jsonl").read_text().splitlines()[-1])
    return result


def score_texts(texts: list[str], place: str) -> tuple[int, int]:
    """Return the held-out targets, all tokens of a document but its first, and their bytes."""
    source_data = tokenizer.load_tokenizer(place)
    targets = counted = 0
    for content in itertools.compress(texts, held_out_texts(texts, 0.2)):
        (ids,) = source_data.encode_batch([content])
        targets += len(ids)  # the end of a document is one
        counted += len(content.encode()) - int(source_data.byte_counts[ids[0]])
    return targets, counted


def test_metrics_count_tokens_targets_bytes_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
    place = corpora.save_tokenizer(tmp_path / "tokenizer")
    parts = {
        name: {
            "weight": 1,
            "path": corpora.write_lines(tmp_path / f"{name}.jsonl", texts),
            "eval_split": 0.2,
        }
        for name, texts in PARTS.items()
    }
    data = {
        "source": "mixture",
        "tokenizer": place,
        "packing": "first-fit",
        "data_dir": f"{tmp_path}/out",
    }
    model = {"kind": "gpt2", "layers": 1, "width": 32, "heads": 4, "vocab": 512, "length": LENGTH}
    keys = {
        "data": {**data, "parts": parts},
        "model": model,
        "batch": BATCH,
        "steps": 5,
        "log_every": 1,
    }
    spec = TrainSpec.model_validate(
        {"task": LM, "checkpoint": {"every": None}, "eval": {"every": None}, **keys}
    )
    training = BuiltInTraining(spec, NextToken(), RunContext(str(tmp_path)), Progress(None))
    batch = training.pipeline.read_batch(4)
    targets, tokens = float(batch["mask"].sum()), float((batch["segments"] > 0).sum()) - BATCH
    Loop(training, RunContext(str(tmp_path)), Never(), Progress(None)).run()
    message = read_last(tmp_path, "metrics")
    assert message["tokens_per_s"] == pytest.approx(tokens / BATCH * message["examples_per_s"])
    assert message["targets_per_s"] == pytest.approx(targets / BATCH * message["examples_per_s"])
    assert message["targets_per_s"] < message["tokens_per_s"]
    result = read_last(tmp_path, "eval")
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    nats = targets = counted = 0.0
    for name, texts in PARTS.items():
        of_part, bytes_of_part = score_texts(texts, place)
        nats = nats + of_part * result[f"loss/{name}"]
        targets = targets + of_part
        counted = counted + bytes_of_part
        bits = of_part * result[f"loss/{name}"] / math.log(2) / bytes_of_part
        assert result[f"bits_per_byte/{name}"] == pytest.approx(bits, rel=1e-4)
        assert result[f"perplexity/{name}"] == pytest.approx(math.exp(result[f"loss/{name}"]))
        assert result[f"examples/{name}"] > 0
    assert result["loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / counted, rel=1e-4)
    assert result["examples"] == result["examples/code"] + result["examples/web"]
    assert result["loss/code"] != result["loss/web"]
