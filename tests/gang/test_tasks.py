"""Text, records, datasets, models and tasks of users, end to end."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.trainer.checkpoint import reader
from jaxlaunch.trainer.data import records
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from tests import needs
from tests.gang.run_files import read_json_lines
from tests.gang.runs import Result, assert_success, digits_block, make_job, run_job

pytestmark = pytest.mark.computes


@pytest.mark.extended
def test_decoder_trains_on_custom_text(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for number in range(5):
        (tmp_path / "corpus" / f"{number}.txt").write_text(
            "the quick brown fox jumps over the lazy dog. " * 20
        )
    train = digits_block(
        task="lm",
        model={"kind": "decoder", "layers": 1, "width": 32, "heads": 2, "vocab": 256, "length": 32},
        data={"source": "text", "path": "corpus/*.txt", "eval_split": 0.2, "bigram": True},
        mesh={"fsdp": 2},
        precision="bf16",
        attention="cudnn",
        optimizer={"name": "adafactor", "lr": 0.03, "ema": 0.5, "schedule": {"name": "constant"}},
        batch=8,
        steps=40,
        log_every=1000,
    )
    result = assert_success(run_job(tmp_path, make_job(train, hosts=2, per_host=1)))
    metrics = result.summary["metrics"]
    counts = [math.ceil((900 * files - 1) / 32) for files in range(1, 5)]
    assert metrics["eval_examples"] in counts
    assert metrics["eval_bits_per_byte"] < 6
    note = (
        "train.attention = cudnn is unavailable here: there is no CUDA device, the devices are "
        "cpu. Using xla"
    )
    assert result.summary["notes"] == [note]
    assert result.stdout.count(note) == 1  # of two ranks
    assert list(result.losses) == [40]  # the last step is always logged
    assert [path.name for path in (result.folder / "checkpoints").glob("[0-9]*")] == ["40"]


def test_custom_task_brings_its_defaults_and_its_loss(tmp_path: Path) -> None:
    y_N = np.arange(1, 53, dtype=np.float32)
    records.write(tmp_path / "all.array_record", ({"x": np.float32(1.0), "y": y} for y in y_N))
    train = {
        "task": "mine:Regression",
        "data": {"path": "all.array_record", "source": "array_record"},
        "precision": "tf32",
    }
    result = assert_success(
        run_job(tmp_path, make_job(train, hosts=1, per_host=4, processes_per_host=2))
    )
    held_out = read_held_out(tmp_path / "all.array_record")
    metrics = result.summary["metrics"]
    # Two batches of 8, and the second is not full.
    assert metrics["eval_examples"] == len(held_out) and 8 < len(held_out) < 16
    assert metrics["eval_loss"] == pytest.approx(float(np.square(held_out).mean()), rel=1e-6)
    assert result.summary["step"] == math.ceil(2 * (len(y_N) - len(held_out)) / 8)
    (row,) = RunReader(result.folder).read_report().to_json()["samples"]  # on the page
    assert (row["step"], row["samples"][1]) == (10, {"name": "line", "text": "y = 0.0 x"})
    assert row["samples"][0]["name"] == "noise"
    assert row["samples"][0]["image"].startswith("data:image/png")


def read_held_out(path: Path) -> np.ndarray:
    """Return the held-out quarter of the records."""
    data = {"source": "array_record", "path": str(path), "eval_split": 0.25}
    source = open_source(TrainSpec.model_validate({"task": "lm", "data": data}), "eval")
    assert source is not None
    return np.array([source[at]["y"] for at in range(len(source))])


@pytest.mark.parametrize(
    ("held_out", "batches", "evaluated", "processes"), [(50, 2, 32, 1), (3, None, 3, 2)]
)
def test_custom_model_is_split_by_path(
    tmp_path: Path, held_out: int, batches: int | None, evaluated: int, processes: int
) -> None:
    data = {
        "source": "torch",
        "dataset": "mine:Pairs",
        "args": {"count": 256},
        "eval_args": {"count": held_out},
    }
    train = digits_block(
        task="mine:Split",
        model={"kind": "mine:Net", "width": 16},
        data=data,
        mesh={"dp": -1, "mp": 2},
        accumulate=2,
        eval={"every": 10, "batches": batches},
    )
    result = assert_success(
        run_job(tmp_path, make_job(train, per_host=4, processes_per_host=processes))
    )
    metrics = result.summary["metrics"]
    assert metrics["eval_examples"] == evaluated
    assert metrics["eval_accuracy"] == 1.0
    # Of none there is no share.
    assert metrics["eval_accuracy_of_3"] == (1.0 if held_out > 3 else None)


@pytest.mark.extended
def test_models_of_other_libraries_agree_on_1_and_2_processes_and_resume(tmp_path: Path) -> None:
    # Not adam: it would make steps of the rounding errors that are the gradient of a bias before a
    # normalization.
    optimizer = {"name": "sgd", "lr": 0.1, "ema": 0.5, "schedule": {"name": "constant"}}
    train = digits_block(
        task="libraries:EachLibrary",
        steps=6,
        optimizer=optimizer,
        checkpoint={"every": 3, "keep": 2},
    )
    del train["model"]
    env = {"TORCH_LIBRARIES": str(needs.packages("torch"))}
    jobs = {1: make_job(train, per_host=1), 2: make_job(train, hosts=2, per_host=1)}
    on_one, on_two = (
        assert_success(run_job(tmp_path / str(count), document, env=env))
        for count, document in jobs.items()
    )
    names = [
        f"{model}{suffix}"
        for model in ("linen", "haiku", "hugging_face")
        for suffix in ("", "_accuracy")
    ]
    unbroken, lines = read_arrays(on_two.folder), read_measurements(on_two, names)
    for mine, theirs in zip(read_measurements(on_one, names), lines, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5)
    shutil.rmtree(on_two.folder / "checkpoints" / "6")
    resumed = assert_success(run_job(tmp_path / "2", jobs[2], env=env))
    assert "resumed at step 3 of 6" in resumed.stdout
    assert read_measurements(resumed, names)[-4:] == lines[-4:]
    assert read_arrays(resumed.folder) == unbroken


def read_measurements(result: Result, names: list[str]) -> list[list[float]]:
    """Return the models' metrics by step, and those of the last evaluation."""
    (*_, evaluation) = read_json_lines(result.folder / "eval.jsonl")
    assert len(result.losses) == 6 and evaluation["examples"] == 64
    return [[line[name] for name in names] for line in (*result.metrics[-6:], evaluation)]


def read_arrays(folder: Path) -> dict[str, bytes]:
    """Return the parameters, batch statistics and averages of the last checkpoint."""
    step = reader.find_step(str(folder / "checkpoints"), 6)
    parts = {part: step.part_arrays(part) for part in ("params", "rest", "ema", "opt")}
    assert len(parts["ema"]) > len(parts["params"]) > 20
    return {
        f"{part} {name}": array[...].tobytes()
        for part, stored in parts.items()
        for name, array in stored.items()
    }
