"""Evaluations of a trained model by `launcher eval` and `jaxlaunch.load`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import jaxlaunch
from jaxlaunch import contract
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.trainer.errors import CheckpointError
from jaxlaunch.trainer.evaluation import __main__ as program
from jaxlaunch.trainer.evaluation import task_model as evaluated
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.spec import DPO, LM
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import read_spec
from jaxlaunch.trainer.train import build_loop
from tests.launcher.invoke import launcher
from tests.trainer import references

PAIRS = Path(__file__).parents[3] / "examples" / "preferences.jsonl"
DECODER = {"kind": "decoder", "layers": 1, "width": 16, "heads": 2, "vocab": 256, "length": 31}
TRAINS: Mapping[str, dict[str, Any]] = {
    "lm": {
        "task": LM,
        "model": DECODER,
        "data": {"source": "text", "path": "stdlib://json/*.py", "eval_split": 0.05},
        "eval": {"every": None, "batches": 3},
    },
    "lora": {
        "task": LM,
        "model": {"init_from": "weights", "length": 15},
        "lora": {"rank": 2, "targets": ["q", "v"]},
        "data": {"source": "synthetic", "examples": 64, "eval_examples": 20},
    },
    "dpo": {
        "task": DPO,
        "model": DECODER | {"length": 63},
        "data": {"source": "text", "format": "preference", "path": str(PAIRS), "eval_split": 0.25},
    },
}


@pytest.fixture(scope="module", params=TRAINS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps on eight devices, as `launcher run` leaves it."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    train = {"batch": 8, "steps": 2, "eval": {"every": None}, "optimizer": {"lr": 0.05}}
    train |= TRAINS[request.param]
    if request.param == "lora":
        train["model"] |= {"init_from": str(references.folder("qwen2_tiny", folder / "weights"))}
    spec, task = read_spec({contract.TRAIN_SPEC: json.dumps(train)})
    context = RunContext(run_dir=str(folder))
    build_loop(folders.resolve_spec(spec), task, context, Stop(), Progress(None)).run()
    document = {"name": "run", "accelerator": {"type": "cpu", "per_host": 8}, "train": train}
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    (folder / ".lock").touch()
    return folder


def read_metrics(run: Path) -> dict[str, float]:
    """The last evaluation, without the step and the model that others are compared with."""
    last: dict[str, float] = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    assert last.pop("step") == 2
    return {
        name: value
        for name, value in last.items()
        if not name.startswith("bigram") and name != "time"
    }


def test_eval_command_reproduces_the_logged_metrics(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(module: str, *arguments: str, environ: Mapping[str, str]) -> Any:
        """The program in this process."""
        assert module == "jaxlaunch.trainer.evaluation"
        monkeypatch.setenv(contract.TRAIN_SPEC, environ[contract.TRAIN_SPEC])
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        capsys.readouterr()
        assert program.main() == 0
        return json.loads(capsys.readouterr().out)

    opened: list[evaluated.TaskModel] = []
    evaluation = evaluated.TaskModel._open_evaluation

    def counted(model: evaluated.TaskModel, data: Mapping[str, Any] | None) -> Any:
        """The evaluation, whose source is opened."""
        opened.append(model)
        return evaluation(model, data)

    monkeypatch.setattr(evaluated.TaskModel, "_open_evaluation", counted)
    monkeypatch.setattr(trainer_process, "run_program", here)
    actual = json.loads(launcher(capsys, monkeypatch, "eval", str(run), "-o", "json").out)
    expected = read_metrics(run)
    assert len(opened) == 1
    assert (actual["step"], actual["examples"]) == (2, expected.pop("examples"))
    assert expected["loss"] > 0
    assert actual["metrics"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_program_loads_the_trained_model(run: Path) -> None:
    loaded = jaxlaunch.load(str(run))
    assert loaded.step == 2
    _, train, _ = trainer_process.open_training(str(run))
    job = train.model_dump_json(exclude_unset=True)
    notes: list[str] = []
    repeated = evaluated.load_task_model(str(run / "checkpoints"), job, note=notes.append)
    batches = list(repeated.held_out())
    assert not notes
    if train.task == DPO:
        other = train.data.model_dump(exclude_unset=True) | {"split_seed": 1}
        changed = train.model_dump(exclude_unset=True, mode="json") | {"data": other}
        second = evaluated.load_task_model(
            str(run / "checkpoints"), json.dumps(changed), note=notes.append
        )
        assert len([*second.held_out()]) and len(notes) == 1
        assert (
            "not the held-out data of the training: preferences, version 2, eval, 0.25" in notes[0]
        )
    tokens, mask = (np.concatenate([batch[key] for batch in batches]) for key in ("tokens", "mask"))
    tokens, mask = tokens.reshape(-1, tokens.shape[-1])[:4], mask.reshape(-1, mask.shape[-1])[:4]
    logits = np.asarray(repeated.model(tokens[:, :-1]), np.float64)
    likely = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    likely = likely - np.log(np.exp(logits).sum(-1))
    actual = np.stack(loaded.logprobs(tokens.tolist()))
    assert mask.any()
    np.testing.assert_allclose(actual * mask, likely * mask, rtol=0, atol=1e-4)
    (sample,) = loaded.generate([tokens[0, :4].tolist()], max_tokens=3)[0]
    assert len(sample.ids) == 3


@pytest.mark.parametrize("run", ["lora"], indirect=True)
def test_adapters_of_a_changed_base_are_not_evaluated(tmp_path: Path, run: Path) -> None:
    _, train, _ = trainer_process.open_training(str(run))
    second = references.folder("qwen2_tiny", tmp_path / "weights")
    (file,) = second.glob("*.safetensors")
    changed = bytearray(file.read_bytes())
    changed[-2] ^= 64
    file.unlink()  # a link to the fixture
    file.write_bytes(changed)
    inputs = train.model_dump(exclude_unset=True, mode="json")
    inputs["model"]["init_from"] = str(second)
    with pytest.raises(
        CheckpointError,
        match="step 2 holds adapters of the weights of .* name the folder that they",
    ):
        evaluated.load_task_model(str(run / "checkpoints"), json.dumps(inputs))
