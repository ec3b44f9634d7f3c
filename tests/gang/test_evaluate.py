"""`jaxlaunch.load` and `launcher eval` repeat the evaluations of a run from its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxlaunch
from jaxlaunch.launcher.report import run_files
from tests.gang.run_files import read_json_lines
from tests.gang.runs import HERE, assert_success, digits_block, make_job, run_job
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.schemas import check_output

pytestmark = pytest.mark.computes

EXACT = ("accuracy", "examples")  # counts: equal on any number of devices


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on eight devices with a moving average; the best step is not the newest."""
    folder = tmp_path_factory.mktemp("run")
    train = digits_block(
        data={"source": "synthetic", "examples": 512, "eval_examples": 72, "shape": [8, 8]},
        mesh={"dp": 2, "fsdp": 2, "mp": 2},
        steps=30,
        optimizer={"name": "sgd", "lr": 0.3, "ema": 0.8, "schedule": {"name": "constant"}},
        eval={"every": 5},
        checkpoint={"every": 10, "keep": 1, "best": {"metric": "eval/loss"}},
        log_every=10,
    )
    return assert_success(run_job(folder, make_job(train, per_host=8))).folder


def read_evaluations(run_folder: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_json_lines(run_folder / "eval.jsonl")}


def test_evaluation_on_one_device_equals_that_on_eight(run_folder: Path) -> None:
    (best,) = {
        min(
            read_evaluations(run_folder),
            key=lambda step: read_evaluations(run_folder)[step]["loss"],
        )
    }
    for step in (None, "best"):
        loaded = jaxlaunch.load(str(run_folder), step=step, ema=True)
        assert isinstance(loaded.step, int) and loaded.step == (best if step else 30)
        metrics, expected = loaded.evaluate(), read_evaluations(run_folder)[loaded.step]
        assert {name: metrics[name] for name in EXACT} == {name: expected[name] for name in EXACT}
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_last_evaluation_of_a_training_reports_the_classes(run_folder: Path) -> None:
    classification = json.loads((run_folder / "classification.json").read_text())
    _, repeated = jaxlaunch.load(str(run_folder), ema=True).report()
    assert repeated is not None and classification["step"] == 30 and classification["ema"] is True
    for key in ("examples", "top1", "per_class", "confusion"):
        assert classification[key] == repeated[key], key
    assert classification["top1"] == read_evaluations(run_folder)[30]["accuracy"]
    assert run_files.read_classification(run_folder) is not None


def test_loaded_model_predicts_and_has_the_held_out_data(run_folder: Path) -> None:
    notes: list[str] = []
    plain = jaxlaunch.load(str(run_folder), note=notes.append)
    average = jaxlaunch.load(str(run_folder), ema=True)
    assert notes == ["step 30 has a moving average, which its training evaluates: take it with ema"]
    assert not np.array_equal(plain.params["head.kernel"], average.params["head.kernel"])
    batches = list(average.held_out())
    images, labels, weights = (
        np.concatenate([batch[key] for batch in batches]) for key in ("image", "label", "weight")
    )
    logits = average.predict(images)
    assert (logits.shape, float(weights.sum())) == ((80, 10), 72)
    accuracy = float(((logits.argmax(-1) == labels) * weights).sum() / weights.sum())
    assert accuracy == pytest.approx(read_evaluations(run_folder)[30]["accuracy"], rel=1e-6)
    np.testing.assert_allclose(average.predict(images[:3]), logits[:3], rtol=1e-5, atol=1e-5)
    assert average.evaluate({"eval_examples": 24})["examples"] == 24
    assert type(average.model).__name__ == "MLP"


@pytest.fixture
def evaluate(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    def call_eval(*arguments: str) -> CommandResult:
        return launcher(capsys, monkeypatch, "eval", *arguments)

    return call_eval


def test_eval_command_reports_the_logged_metrics(run_folder: Path, evaluate: Any) -> None:
    answer = check_output("eval", evaluate(str(run_folder), "--ema", "-o", "json").out)
    assert (answer["step"], answer["examples"]) == (30, 72)
    assert answer["metrics"]["accuracy"] == read_evaluations(run_folder)[30]["accuracy"]
    text = evaluate(str(run_folder), "--data", "eval_examples=24")
    first, summary, *_ = text.out.splitlines()
    assert first.startswith("step 30  loss ")
    assert first.endswith("examples 24")
    assert summary.startswith("top-1 ")
    classification = json.loads((run_folder / "classification.json").read_text())
    assert classification["step"] == 30
    assert classification["ema"] is True
    assert classification["examples"] == 72
    assert classification["top1"] == answer["metrics"]["accuracy"]
    assert classification | {"step": 0, "ema": 0} == answer["classification"] | {
        "step": 0,
        "ema": 0,
    }
    shown = run_files.read_classification(run_folder)  # on the page
    assert shown is not None
    assert shown["ema"] is True
    assert shown["confusion"] == classification["confusion"]
    # These examples have no name that a reader could look up.
    assert len(classification["worst"]) == 20 and shown["worst"] == []
    assert (
        sum(map(sum, classification["confusion"]))
        == sum(row["examples"] for row in classification["per_class"])
        == 72
    )
    assert "has a moving average" in text.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "There is no run nowhere"),
        (("RUN/checkpoints",), "is not the folder of a run: it has no job.yaml"),
        (("RUN", "--step", "20"), "holds no finished step 20; it holds"),
        (("RUN", "--best", "--step", "30"), "--best and --step 30 name two steps"),
        (("RUN", "--data", "eval_exmples=3"), 'Did you mean "eval_examples"?'),
        (("RUN", "--data", "eval_examples=0"), "train.data has no held-out examples"),
        (("COMMAND",), "runs its own command: the launcher knows neither its model nor its data"),
    ],
)
def test_evaluation_that_is_not_possible_is_refused(
    run_folder: Path, evaluate: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: t\nhosts: 1\naccelerator: {type: cpu}\ncommand: [ls]\n"
    )
    result = evaluate(
        *(
            argument.replace("RUN", str(run_folder)).replace("COMMAND", str(tmp_path))
            for argument in arguments
        )
    )
    assert result.code == 2 and message in result.err and "Traceback" not in result.err, result.err


def test_custom_task_and_model_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    train = digits_block(
        task="mine:Split",
        model={"kind": "mine:Net", "width": 16},
        data={
            "source": "torch",
            "dataset": "mine:Pairs",
            "args": {"count": 64},
            "eval_args": {"count": 50},
        },
        steps=10,
        batch=8,
    )
    run = assert_success(run_job(tmp_path, make_job(train))).folder
    metrics, expected = jaxlaunch.load(str(run)).evaluate(), read_evaluations(run)[10]
    assert (
        {name: metrics[name] for name in EXACT}
        == {name: expected[name] for name in EXACT}
        == {**dict.fromkeys(EXACT, 50), "accuracy": expected["accuracy"]}
    )
