"""Changes that a resumed run describes: keys and the learning rate."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import LM, TrainSpec
from jaxlaunch.trainer.start import preflight
from jaxlaunch.trainer.step import resume
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.train import build_loop

CLASSIFY = "classify"
DATA = {"source": "synthetic", "examples": 64, "eval_examples": 8, "shape": [4, 4]}
MLP = {"kind": "mlp", "layers": 1, "width": 8}


def train_spec(**keys: Any) -> TrainSpec:
    return TrainSpec.model_validate(
        {"task": CLASSIFY, "data": DATA, "model": MLP, "batch": 8, **keys}
    )


def record_training(attention: str = "xla", /, **keys: Any) -> dict[str, Any]:
    spec = train_spec(**keys)
    return resume.training_record(spec, attention, spec.total_steps(64), open_source(spec, "eval"))


def test_equal_trainings_have_no_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert resume.describe_changes(record_training(), record_training(), 5) is None
        assert "compilation" not in caplog.text
        assert (
            resume.describe_changes(record_training(), record_training(optimizer={"lr": 0.5}), 5)
            is not None
        )
    assert "compilation" in caplog.text  # the rate is a schedule of JAX's


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"optimizer": {"weight_decay": 0.1}}, "train.optimizer.weight_decay 0.0 → 0.1"),
        ({"precision": "bf16"}, "train.precision fp32 → bf16"),
        (
            {"precision": {"matmul": "highest"}},
            'train.precision fp32 → {"params": "float32", "compute": "float32", ',
        ),
        ({"accumulate": 2}, "train.accumulate 1 → 2"),
        ({"mesh": {"fsdp": 2}}, "train.mesh.dp -1 → 1, train.mesh.fsdp 1 → 2"),
        ({"loss": {"smoothing": 0.1}}, "train.loss.smoothing 0.0 → 0.1"),
        ({"eval": {"batches": 2}}, "train.eval.batches null → 2"),
        ({"remat": ["up"]}, 'train.remat none → ["up"]'),
        ({"attention": "cudnn"}, "train.attention xla → cudnn"),
        (
            {"data": DATA | {"eval_examples": 9}},
            "train.data.eval_examples 8 → 9, the held-out data synthetic",
        ),
    ],
)
def test_changed_keys_are_described_with_values(keys: dict[str, Any], says: str) -> None:
    attention = keys.get(
        "attention", "xla"
    )  # as it is in use: auto may be another on other devices
    changed = resume.describe_changes(record_training(), record_training(attention, **keys), 5)
    assert str(changed).startswith(f"changed since step 5 was saved: {says}")


@pytest.mark.parametrize(
    "keys",
    [
        {"checkpoint": {"every": 3}},
        {"log_every": 7},
        {"eval": {"every": 7}},
        {"steps_per_dispatch": 2},
        {"data": DATA | {"threads": 2}},
    ],
)
def test_irrelevant_keys_are_not_described(keys: dict[str, Any]) -> None:
    assert resume.describe_changes(record_training(), record_training(**keys), 5) is None


def test_changed_learning_rate_is_described() -> None:
    """A cosine of two epochs has nearly ended at step 15 of 16; of four it is half way."""
    lr = {"optimizer": {"lr": 3e-3}}
    changed = resume.describe_changes(
        record_training(epochs=2, **lr), record_training(epochs=4, **lr), 15
    )
    assert changed == (
        "changed since step 15 was saved: train.epochs 2 → 4, the steps of the run 16 → 32, "
        "the learning rate at step 15 2.88e-05 → 0.00165"
    )


def test_checkpoint_without_record_has_no_changes() -> None:
    assert resume.describe_changes({"train.batch": 8}, record_training(), 5) is None


def test_record_of_another_version_is_compared() -> None:
    then = record_training()
    then["train"]["optimizer"]["momenta"] = (
        3  # a key that there is no more: the rate of then is not known
    )
    assert resume.describe_changes(then, record_training(), 5) == (
        "changed since step 5 was saved: train.optimizer.momenta 3 → null"
    )


def decoder(**model: Any) -> tuple[TrainSpec, dict[str, Any]]:
    sizes = {"kind": "decoder", "rope_scaling": {"factor": 8.0, "original_length": 64}, **model}
    spec = TrainSpec.model_validate({"task": LM, "model": sizes})
    return spec, resume.training_record(spec, "xla", 9, None)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({}, None),
        ({"window": 64}, "train.model.window null → 64"),
        ({"score_cap": 5.0}, "score_cap"),
    ],
)
def test_missing_keys_are_compared_by_defaults(model: dict[str, Any], says: str | None) -> None:
    _, then = decoder()
    for path in ("optimizer.chain", "optimizer.schedule.args", "model.window", "model.score_cap",
                 "model.rope_scaling.kind", "loss"):  # fmt: skip
        *above, key = path.split(".")
        del functools.reduce(lambda block, name: block[name], above, then["train"])[key]
    spec, now = decoder(**model)
    filled = {**then, "train": resume.fill_defaults(then["train"], now["train"], spec)}
    changed = resume.describe_changes(filled, now, 5)
    assert changed is None if says is None else says in str(changed)
    assert str(changed).count("→") == (says is not None)
    assert (preflight.describe_changes(_with_optimizer(filled), _with_optimizer(now)) == "") == (
        says is None
    )


def _with_optimizer(record: dict[str, Any]) -> dict[str, Any]:
    """What `preflight` reads of a checkpoint, out of a record."""
    return {key: record["train"][key] for key in ("model", "optimizer", "precision")}


def test_record_holds_no_arguments_or_paths() -> None:
    data = {
        "source": "torch",
        "dataset": "mine:Rows",
        "args": {"password": "hunter2"},
        "eval_args": {"key": "hunter2"},
    }
    train = TrainSpec.model_validate(
        {"task": CLASSIFY, "data": data, "checkpoint": {"path": "s3://hunter2"}}
    )
    assert "hunter2" not in str(resume.training_record(train, "xla", 10, None))


class Never:
    """Nobody tells this run to stop."""

    def poll(self) -> bool:
        return False


def test_resumed_run_notes_changes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(**keys: Any) -> str:
        stop: Any = Never()
        build_loop(
            train_spec(**keys), Classify(), RunContext(str(tmp_path)), stop, Progress(None)
        ).run()
        return capsys.readouterr().out

    assert "changed since" not in run(steps=2)
    out = run(steps=4, optimizer={"lr": 1e-2})
    assert out.count(
        "resumed at step 2 of 4\nchanged since step 2 was saved: train.optimizer.lr 0.0003 → 0.01, "
        "the steps of the run 2 → 4, the learning rate at step 2 0 → 0.005\n"
    ) == 1  # fmt: skip
    repeated = run(steps=4, optimizer={"lr": 1e-2}, remat="full", eval={"batches": 1})
    assert "nothing to do: the run finished at step 4" in repeated
    message = (
        "finished at step 4 with train.optimizer.lr = 0.01; this job says 0.02: use another name"
    )
    with pytest.raises(SpecError, match=message):
        run(steps=4, optimizer={"lr": 2e-2})
