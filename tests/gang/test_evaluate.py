"""`jaxlaunch.load` and `launcher eval`: what a run logged of its held-out data, computed again from its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxlaunch
from jaxlaunch.launcher.report import run_files
from tests.gang.runs import HERE, digits, job, launch, succeed
from tests.launcher.invoke import Left, launcher

pytestmark = pytest.mark.computes

EXACT = ("accuracy", "examples")  # counts: equal on any number of devices


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training on eight devices, with an average, whose best step is not its newest."""
    folder = tmp_path_factory.mktemp("run")
    train = digits(
        data={"source": "synthetic", "examples": 512, "eval_examples": 72, "shape": [8, 8]},
        mesh={"dp": 2, "fsdp": 2, "mp": 2},
        steps=30,
        optimizer={"name": "sgd", "lr": 0.3, "ema": 0.8, "schedule": {"name": "constant"}},
        eval={"every": 5},
        checkpoint={"every": 10, "keep": 1, "best": {"metric": "eval/loss"}},
        log_every=10,
    )
    return succeed(launch(folder, job(train, per_host=8))).folder


def logged(run: Path) -> dict[int, dict[str, Any]]:
    return {
        line["step"]: line
        for line in map(json.loads, (run / "eval.jsonl").read_text().splitlines())
    }


def test_the_held_out_numbers_of_a_run_on_eight_devices_are_found_again_on_one(run: Path) -> None:
    (best,) = {min(logged(run), key=lambda step: logged(run)[step]["loss"])}
    for step in (None, "best"):
        loaded = jaxlaunch.load(str(run), step=step, ema=True)
        assert isinstance(loaded.step, int) and loaded.step == (best if step else 30)
        found, then = loaded.evaluate(), logged(run)[loaded.step]
        assert {name: found[name] for name in EXACT} == {name: then[name] for name in EXACT}
        assert found["loss"] == pytest.approx(then["loss"], rel=1e-5)


def test_the_last_evaluation_of_a_training_says_what_the_command_says_of_the_classes(
    run: Path,
) -> None:
    told = json.loads((run / "classification.json").read_text())
    _, again = jaxlaunch.load(str(run), ema=True).report()
    assert again is not None and told["step"] == 30 and told["ema"] is True
    for key in ("examples", "top1", "per_class", "confusion"):
        assert told[key] == again[key], key
    assert (
        told["top1"] == logged(run)[30]["accuracy"]
        and run_files.read_classification(run) is not None
    )


def test_what_is_loaded_predicts_and_has_the_held_out_data(run: Path) -> None:
    notes: list[str] = []
    plain, average = jaxlaunch.load(str(run), note=notes.append), jaxlaunch.load(str(run), ema=True)
    assert notes == ["step 30 has a moving average, which its training evaluates: take it with ema"]
    assert not np.array_equal(plain.params["head.kernel"], average.params["head.kernel"])
    batches = list(average.held_out())
    images, labels, weights = (
        np.concatenate([each[key] for each in batches]) for key in ("image", "label", "weight")
    )
    logits = average.predict(images)
    assert (logits.shape, float(weights.sum())) == ((80, 10), 72)
    accuracy = float(((logits.argmax(-1) == labels) * weights).sum() / weights.sum())
    assert accuracy == pytest.approx(logged(run)[30]["accuracy"], rel=1e-6)
    np.testing.assert_allclose(average.predict(images[:3]), logits[:3], rtol=1e-5, atol=1e-5)
    assert average.evaluate({"eval_examples": 24})["examples"] == 24
    assert type(average.model).__name__ == "MLP"


@pytest.fixture
def evaluate(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(*arguments: str) -> Left:
        return launcher(capsys, monkeypatch, "eval", *arguments)

    return call


def test_the_command_says_what_was_logged(run: Path, evaluate: Any) -> None:
    found = json.loads(evaluate(str(run), "--ema", "-o", "json").out)
    assert (found["step"], found["examples"]) == (30, 72)
    assert found["metrics"]["accuracy"] == logged(run)[30]["accuracy"]
    text = evaluate(str(run), "--data", "eval_examples=24")
    first, summary, *_ = text.out.splitlines()
    assert (
        first.startswith("step 30  loss ")
        and first.endswith("examples 24")
        and summary.startswith("top-1 ")
    )
    told = json.loads((run / "classification.json").read_text())
    assert (told["step"], told["ema"], told["examples"], told["top1"]) == (
        30,
        True,
        72,
        found["metrics"]["accuracy"],
    )
    assert told | {"step": 0, "ema": 0} == found["classification"] | {"step": 0, "ema": 0}
    shown = run_files.read_classification(run)  # on the page
    assert shown is not None
    assert (shown["ema"], shown["confusion"], len(shown["worst"])) == (
        True,
        told["confusion"],
        len(told["worst"]),
    )
    assert (
        sum(map(sum, told["confusion"]))
        == sum(each["examples"] for each in told["per_class"])
        == 72
    )
    assert "has a moving average" in text.err


@pytest.mark.parametrize(
    ("arguments", "says"),
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
def test_what_cannot_be_evaluated_is_a_sentence(
    run: Path, evaluate: Any, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: t\nhosts: 1\naccelerator: {type: cpu}\ncommand: [ls]\n"
    )
    left = evaluate(
        *(each.replace("RUN", str(run)).replace("COMMAND", str(tmp_path)) for each in arguments)
    )
    assert left.code == 2 and says in left.err and "Traceback" not in left.err, left.err


def test_a_task_and_a_model_of_one_s_own_are_loaded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)
    train = digits(
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
    run = succeed(launch(tmp_path, job(train))).folder
    found, then = jaxlaunch.load(str(run)).evaluate(), logged(run)[10]
    assert (
        {name: found[name] for name in EXACT}
        == {name: then[name] for name in EXACT}
        == {**dict.fromkeys(EXACT, 50), "accuracy": then["accuracy"]}
    )
