"""Invalid models and folders are refused with exit code 64 before compilation.

Each as `launcher run` starts it, in this process: one or two of each kind. Every single key is in
tests/trainer/huggingface, tests/trainer/adapters/test_wrong.py and tests/trainer/optim; jobs of
other kinds are in tests/gang/test_wrong_calls.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.errors import TrainerError
from jaxlaunch.trainer.huggingface import folder as folder_of
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import exit_code, read_spec
from jaxlaunch.trainer.step import state
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.train import build_loop
from tests.trainer import references, tiny
from tests.trainer.adapters import folders


class InvalidJob(NamedTuple):
    """A job, and a part of its error."""

    says: str
    model: dict[str, Any]  # in addition to init_from
    case: str = "qwen2_tiny"  # of tests/fixtures: the folder
    keys: dict[str, Any] = {}  # of the train block
    spoil: Callable[[Path], object] = lambda folder: None  # makes the folder wrong


def change_config(**changed: Any) -> Callable[[Path], object]:
    """A config.json that says something else."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return spoil


def change_layers(count: int) -> Callable[[Path], object]:
    """A config.json of so many layers."""
    return change_config(num_hidden_layers=count, layer_types=["full_attention"] * count)


def replace_weights(content: bytes) -> Callable[[Path], object]:
    """A file of weights with this content."""

    def spoil(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        path.unlink()
        path.write_bytes(content)

    return spoil


def lora_block(**keys: Any) -> dict[str, Any]:
    return {"lora": keys}


def optimizer_block(**keys: Any) -> dict[str, Any]:
    return {"optimizer": keys}


HEADER = b'{"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}'
WRONG = {
    # folders
    "a layer too few in the weights": InvalidJob("more are missing", {}, spoil=change_layers(3)),
    "an encoder": InvalidJob(
        "model_type is bert, and only", {}, spoil=change_config(model_type="bert")
    ),
    "half a config": InvalidJob(
        "cannot be read", {}, spoil=lambda folder: (folder / "config.json").write_text("{")
    ),
    "a file of weights that is cut off": InvalidJob(
        "safetensors", {}, spoil=replace_weights(struct.pack("<Q", len(HEADER)) + HEADER)
    ),
    # jobs that disagree with their folder
    "another width": InvalidJob("hidden_size is 64, train.model.width makes it 32", {"width": 32}),
    # meshes
    "experts that ep does not divide": InvalidJob(
        "cannot be split evenly over ep = 8", {}, "mixtral_tiny", {"mesh": {"ep": 8}}
    ),
    # adapters
    "a target that is no product": InvalidJob(
        "wq matches no linear layer", {}, keys=lora_block(targets=["wq"])
    ),
    "adapters of another rank": InvalidJob(
        "rank is 4 there and 8 here", {}, keys=lora_block(init_from="PEFT", rank=8)
    ),
    # optimizers
    "a group that matches nothing": InvalidJob(
        "matches no parameter", {}, keys=optimizer_block(groups=[{"match": "wte", "lr": 2}])
    ),
    # samples while training
    "a sample of a token that is none": InvalidJob(
        "has the token 97", {}, keys={"eval": {"samples": {"prompts": [[97]]}}}
    ),
    "a sample of text without a tokenizer": InvalidJob(
        "give token ids", {}, keys={"eval": {"samples": {"prompts": ["a"]}}}
    ),
}


@pytest.fixture
def forbid_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the model is compiled: neither its start nor its step."""

    def compiles(*_: Any, **__: Any) -> None:
        raise AssertionError("it was not refused: it compiles")

    # The options with which the start is compiled.
    monkeypatch.setattr(state, "setup_compiler_options", compiles)
    monkeypatch.setattr(Step, "compile_train", compiles)


@pytest.mark.parametrize("name", WRONG)
def test_invalid_model_is_rejected_before_compilation(
    name: str, forbid_compilation: None, tmp_path: Path
) -> None:
    wrong, folder = WRONG[name], references.folder(WRONG[name].case, tmp_path / WRONG[name].case)
    wrong.spoil(folder)
    block: dict[str, Any] = {
        "task": "lm",
        "model": {"init_from": str(folder), "length": 16, **wrong.model},
        "data": {"source": "synthetic", "examples": 64, "eval_examples": 16},
        "batch": 8,
        "steps": 2,
        "mesh": {"dp": 8},
        **wrong.keys,
    }
    if "PEFT" in json.dumps(block):
        index = folders.write_start("lora_qwen2_tiny", tmp_path / "peft")
        block = json.loads(json.dumps(block).replace("PEFT", str(index)))
    with pytest.raises(TrainerError) as raised:
        train, task = read_spec({contract.TRAIN_SPEC: json.dumps(block)})
        train = peft.resolve_lora(folder_of.resolve_spec(train))
        context = RunContext(str(tmp_path / "run"))
        tiny.run_to_an_error(build_loop(train, task, context, Stop(), Progress(None)))
    assert exit_code(raised.value, has_stepped=False) == contract.BAD_SPEC
    assert wrong.says in str(raised.value) and len(str(raised.value).splitlines()) == 1
