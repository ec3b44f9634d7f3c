"""The page of the Python API is current, and the examples of its docstrings run."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import jaxlaunch
from jaxlaunch import contract
from jaxlaunch.trainer import task
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.loop.run import RunOptions
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.train import build_loop
from tests import api
from tests.trainer.generate.generators import bytes_model

EXAMPLES = dict(api.find_examples())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs of the examples: `runs/lm`, and `runs/digits`."""
    home = tmp_path_factory.mktemp("home")
    model = bytes_model()
    store = Store(str(home / "runs" / "lm"), keep=1, uid="mine")
    store.claim()
    params = {
        name: np.asarray(leaf) for name, leaf in model.network.stack_params(model.weights).items()
    }
    recorded = {"data": {"source": "text", "tokenizer": "bytes"}}
    store.save(
        2,
        {"params": params},
        {"model": model.network.config.model_dump(mode="json"), "train": recorded},
    )
    store.close()
    digits = home / "runs" / "digits"
    digits.mkdir()
    (digits / ".lock").touch()
    train = {
        "task": "classify",
        "data": {"source": "tfds", "name": "digits"},
        "batch": 64,
        "steps": 2,
    }
    job = {"name": "digits", "accelerator": {"type": "cpu", "per_host": 8}, "train": train}
    (digits / "job.yaml").write_text(json.dumps(job))
    spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(train)})
    build_loop(spec, task, RunContext(run_dir=str(digits)), Stop(), Progress(None)).run()
    return home


@pytest.mark.usefixtures("standard")
@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_example_runs(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    result: dict[str, object] = {"__name__": "example"}
    exec(compile(EXAMPLES[name], f"<the example of {name}>", "exec"), result)
    if name in ("Task", "Classify"):
        created = result["Curve" if name == "Task" else "TwoHeads"]
        assert task.make_task("example", created)


def test_mesh_and_precision_arguments_are_checked(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    for name, split in (("lm", {"fsdp": -1}), ("digits", {"dp": 2, "mp": 4})):
        assert jaxlaunch.load(f"runs/{name}", mesh=split).step == 2
        with pytest.raises(
            jaxlaunch.TrainerError, match=r"load\(mesh=.*'tp'.*; give devices per axis, such as"
        ):
            jaxlaunch.load(f"runs/{name}", mesh={"tp": 8})
    with pytest.raises(TypeError, match="is for language models only"):
        jaxlaunch.load("runs/digits", precision="bf16")


def test_run_defaults_equal_run_options() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(RunOptions)}
    inputs = {
        name: parameter.default
        for name, parameter in inspect.signature(jaxlaunch.run).parameters.items()
    }
    assert {
        name: value for name, value in inputs.items() if name in defaults and name != "steps"
    } == {name: value for name, value in defaults.items() if name != "steps"}
    assert set(inputs) == set(defaults) | {"step", "state", "data"}
