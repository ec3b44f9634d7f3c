"""Faults of a user's task, model or dataset are reported before the first compilation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.errors import TrainerError
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.train import build_loop
from tests.trainer import wrong_code

HERE = wrong_code.__name__
FILE = r"wrong_code\.py:\d+"

MODELS = {
    "Pairs": r"the model, a Pairs, returned a tuple of 2; return real logits \[8, "
    r"classes\], an array",
    "Flat": r"a Flat, returned float32\[80\]; return real logits \[8, classes\]",
    "Chosen": r"a Chosen, returned int32\[8\]; return real logits",
    "Whole": r"a Whole, returned int32\[8, 10\]; return real logits",
    "Forgetful": "a Forgetful, returned None; return real logits",
    "Wide": r"loss raised TypeError: dot_general .*in __call__\); its batch holds image uint8\[8, "
    r"4, 4\], label",
    "Late": "the model's seen is not there before a step and .* after it; make it in the "
    "model's __init__",
    "Narrowing": r"the model's seen is float32\[\] before a step and bfloat16\[\] after it",
    "NoCall": r"TypeError: 'NoCall' object is not callable .*; a loss is called with \(model, "
    r"batch, rng\)",
    "TakesTwo": r"TakesTwo.__call__\(\) missing 1 required positional argument: 'labels'",
    "NoParams": "a NoParams, has no parameters; make them nnx.Param in __init__",
    "Holding": r"the model's table is a ndarray; make it nnx.Param\(array\), or "
    r"nnx.Variable\(array\)",
    "HoldingText": "the model's table is a str; make it nnx.Param",
    "HoldingWhole": r"table is int32\[3\] in an nnx.Param; only floats are trained, so make it "
    r"nnx.Variable",
    "made": "is an object, the flax.linen module Made; name its class, or a function that "
    "returns one",
    "a_list": "makes a list, not a flax.nnx.Module, a flax.linen.Module or a function that Haiku "
    "transformed",
}
TASKS = {
    "NoModel": "model returned None, not a flax.nnx.Module",
    "FunctionForAModel": "model returned a function, not a flax.nnx.Module",
    "RowLosses": r"loss returned an array of shape \[8\], not a scalar; a bare loss is the mean "
    r"over the batch",
    "LossAndAux": "loss returned a tuple of 2, not a scalar or a Loss; metrics go into "
    "jaxlaunch.Loss",
    "NoLoss": "loss returned None, not a scalar",
    "ComplexLoss": "loss returned .*, not a scalar",
    "CountForALoss": "loss returned a number of int32, which has no gradient; return a float",
    "SumOfBooleans": "Loss.sum is a number of bool, which has no gradient; return a float",
    "WeightOfRows": r"Loss.weight is an array of shape \[8\], not a scalar; it is the sum "
    r"over the batch",
    "MetricsInAList": r"Loss.metrics is a list, not a dict \{name: \(sum, weight\)\}",
    "MetricAlone": r"metric 'hits' is the number 0.5, not a pair \(sum, weight\)",
    "MetricOfRows": r"the sum of metric 'hits' is an array of shape \[8\], not a scalar",
    "MetricNamedLoss": "a metric cannot be named 'loss'; the trainer's own records use",
    "MetricNamedByANumber": "the name of metric 5 is an int, not text",
    "MetricWithoutAName": "a metric is named ' '; name it in one line of text",
    "MetricOfTwoLines": r"a metric is named 'hits\\nmisses'; name it in one line of text",
    "MissingKey": r"loss raised KeyError: 'images' .*in loss\); its batch holds image "
    r"uint8\[8, 4, 4\]",
    "BranchesOnAValue": r"loss raised TracerBoolConversionError: .*in loss\)",
    "CallsNumpy": r"loss raised TracerArrayConversionError: .*in loss\)",
    "NoRng": r"NoRng.loss\(\) takes 3 positional arguments but 4 were given .*; a loss is called "
    r"with \(model, batch",
    "ListExample": r"example 0 has become a list; the task's example\(\) must return a dict of "
    r"arrays by name",
    "NoArrays": r"example 0 has no arrays; the task's example\(\) must return a dict of "
    r"arrays by name",
    "NumberedExample": r"example 0 has the key 0, not text; the task's example\(\) must "
    r"return a dict",
    "ListForASource": "source returned a list; a source has __len__, __getitem__ and fingerprint",
    "TextExample": "label of <U5; the task's example\\(\\) must return numbers",
    "WeightExample": "a key weight, which the batch reserves for the weight of each "
    "example; rename it",
}
DATASETS = {
    "ThreeThings": r"an item is a mapping or a pair \(image, label\), not tuple of 3",
    "Raising": "example 0 cannot be read: KeyError: 'label'",
    "OneHot": "it looks one-hot: its class is 0",
    "HalfLength": "its __len__ must return the number of its examples: 'float' object cannot be "
    "interpreted",
    "NegativeLength": "its __len__ must return the number of its examples: .* >= 0",
    "NoLength": "has no __len__; a map-style dataset has both",
    "Unbuildable": "cannot be built.*ValueError: no folder",
}


def refusal(tmp_path: Path, **train: Any) -> str:
    """What building a run of this train block says; nothing is compiled for it."""
    block = {"task": f"{HERE}:Task", "mesh": {"dp": -1}, "batch": 8, "steps": 2, **train}
    with pytest.raises(TrainerError) as reports:
        spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(block)})
        build_loop(spec, task, RunContext(run_dir=str(tmp_path)), Stop(), Progress(None))
    message = str(reports.value)
    assert len(message.splitlines()) == 1 and "JitTracer" not in message
    return message


@pytest.fixture(autouse=True)
def no_compiles(monkeypatch: pytest.MonkeyPatch, standard: None) -> None:
    def lower(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled before it was checked")

    monkeypatch.setattr("jaxlaunch.trainer.step.executable.Executable.__init__", lower)


def test_wrong_code_has_many_cases() -> None:
    assert len(MODELS) + len(TASKS) + len(DATASETS) > 40


@pytest.mark.parametrize("name", MODELS)
def test_wrong_model_is_reported_with_file(name: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, model={"kind": f"{HERE}:{name}"})
    assert re.search(MODELS[name], message) and re.search(FILE, message), message


@pytest.mark.parametrize("name", TASKS)
def test_wrong_task_is_reported_with_file(name: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, task=f"{HERE}:{name}")
    assert re.search(TASKS[name], message) and re.search(FILE, message), message


@pytest.mark.parametrize("name", DATASETS)
def test_wrong_dataset_is_reported_with_file(name: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, data={"source": "torch", "dataset": f"{HERE}:{name}"})
    assert re.search(DATASETS[name], message) and re.search(FILE, message), message


def test_wrong_default_key_names_task(tmp_path: Path) -> None:
    message = refusal(tmp_path, task=f"{HERE}:OtherDefaults")
    assert (
        message
        == f"train.lr: Extra inputs are not permitted (of the defaults of {HERE}:OtherDefaults)"
    )


def test_workers_of_custom_source_are_refused(tmp_path: Path) -> None:
    data = {"source": "torch", "dataset": f"{HERE}:Images", "workers": 4}
    message = refusal(tmp_path, task=f"{HERE}:OwnSource", data=data)
    expected = (
        r"OwnSource: source returned an Images, which the 4 processes of train.data.workers "
        r"do not read; .*Remove"
    )
    assert re.search(expected, message) and re.search(FILE, message), message


def test_valid_code_is_accepted(tmp_path: Path) -> None:
    block = {"task": f"{HERE}:Task", "mesh": {"dp": jax.device_count()}, "batch": 8, "steps": 2}
    spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(block)})
    assert (
        build_loop(
            spec, task, RunContext(run_dir=str(tmp_path)), Stop(), Progress(None)
        ).settings.steps
        == 2
    )
