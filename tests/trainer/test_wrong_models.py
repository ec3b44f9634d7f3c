"""Jobs on models that are wrong, and folders that are: one sentence, exit code 64, before anything is compiled.

Each as `launcher run` starts it, in this process. What is said of single keys: tests/trainer/huggingface,
tests/trainer/adapters/test_wrong.py, tests/trainer/optim; of jobs of other kinds: tests/gang/test_wrong_calls.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxlaunch import contract
from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.errors import TrainerError
from jaxlaunch.trainer.huggingface import folder as folder_of
from jaxlaunch.trainer.loop.training import Place
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.process import exit_code, read_spec
from jaxlaunch.trainer.step import state
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.train import loop_of
from tests.trainer import references, tiny
from tests.trainer.adapters import folders


class Wrong(NamedTuple):
    """A job, and what is said of it."""

    says: str
    model: dict[str, Any]  # beside init_from
    case: str = "qwen2_tiny"  # of tests/fixtures: the folder
    keys: dict[str, Any] = {}  # of the train block
    spoil: Callable[[Path], object] = lambda folder: None  # makes the folder wrong


def said(**changed: Any) -> Callable[[Path], object]:
    """A config.json that says something else."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return spoil


def layers(count: int) -> Callable[[Path], object]:
    """A config.json of so many layers."""
    return said(num_hidden_layers=count, layer_types=["full_attention"] * count)


def without(pattern: str) -> Callable[[Path], object]:
    """A folder without the files of this pattern."""

    def spoil(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return spoil


def weights(**changed: Any) -> Callable[[Path], object]:
    """Weights of which some have another shape, or are not there (None)."""

    def spoil(folder: Path) -> None:
        found = dict(references.tensors(folder.name, "weights"))
        for end, shape in changed.items():
            name = next(each for each in found if each.endswith(end.replace("__", ".")))
            found.pop(name)
            if shape is not None:
                found[name] = np.zeros(shape, np.float32)
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        save_file(found, folder / "model.safetensors")

    return spoil


def file(content: bytes) -> Callable[[Path], object]:
    """A file of weights with this content."""

    def spoil(folder: Path) -> None:
        (path,) = folder.glob("*.safetensors")
        path.unlink()
        path.write_bytes(content)

    return spoil


def lora(**keys: Any) -> dict[str, Any]:
    return {"lora": keys}


def optimizer(**keys: Any) -> dict[str, Any]:
    return {"optimizer": keys}


HEADER = b'{"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}'
WRONG = {
    # folders
    "another width in the weights": Wrong(
        "embed_tokens.weight is [97, 32]", {}, spoil=weights(embed_tokens__weight=(97, 32))
    ),
    "another vocabulary in the weights": Wrong("is [50, 64]", {}, spoil=weights(embed_tokens__weight=(50, 64))),
    "a layer too few in the weights": Wrong("is missing", {}, spoil=layers(3)),
    "a layer too many in the weights": Wrong("is not used", {}, spoil=layers(1)),
    "a tensor that is not there": Wrong("is missing", {}, spoil=weights(norm__weight=None)),
    "an architecture that nobody knows": Wrong("model_type is mamba2, and only", {}, spoil=said(model_type="mamba2")),
    "keys that no family has": Wrong(
        "keys that these do not have: state_size", {}, spoil=said(model_type="x", state_size=3)
    ),
    "an encoder": Wrong("model_type is bert, and only", {}, spoil=said(model_type="bert")),
    "no model_type": Wrong("model_type", {}, spoil=said(model_type=None)),
    "a width that heads do not divide": Wrong(
        "hidden_size = 66 does not split into num_attention_heads = 4", {}, spoil=said(hidden_size=66)
    ),
    "a size that is text": Wrong("hidden_size", {}, spoil=said(hidden_size="wide")),
    "a negative size": Wrong("num_hidden_layers", {}, spoil=said(num_hidden_layers=-1)),
    "heads that groups do not divide": Wrong(
        "num_key_value_heads = 3 does not divide", {}, spoil=said(num_key_value_heads=3)
    ),
    "another activation": Wrong("hidden_act is relu2", {}, spoil=said(hidden_act="relu2")),
    "another rotary scaling": Wrong("dynamic", {}, spoil=said(rope_scaling={"rope_type": "dynamic", "factor": 2.0})),
    "quantized weights": Wrong(
        "which says that the weights are quantized", {}, spoil=said(quantization_config={"bits": 4})
    ),
    "more experts of a token than there are": Wrong(
        "= 9 is more than", {}, "mixtral_tiny", spoil=said(num_experts_per_tok=9)
    ),
    "no config": Wrong("config.json cannot be read", {}, spoil=without("config.json")),
    "half a config": Wrong("cannot be read", {}, spoil=lambda folder: (folder / "config.json").write_text("{")),
    "no weights": Wrong("qwen2_tiny", {}, spoil=without("*.safeten*")),
    "an empty file of weights": Wrong("safetensors", {}, spoil=file(b"")),
    "a file of weights that is cut off": Wrong("safetensors", {}, spoil=file(struct.pack("<Q", len(HEADER)) + HEADER)),
    "a page of a web server as weights": Wrong("safetensors", {}, spoil=file(b"<!DOCTYPE html><html>not found</html>")),
    # jobs that disagree with their folder
    "another width": Wrong("hidden_size is 64, train.model.width makes it 32", {"width": 32}),
    "other heads": Wrong("num_attention_heads is 4, train.model.heads makes it 8", {"heads": 8}),
    "other layers": Wrong("num_hidden_layers is 2, train.model.layers makes it 3", {"layers": 3}),
    "another vocabulary": Wrong("vocab_size is 97, train.model.vocab makes it 98", {"vocab": 98}),
    "another preset": Wrong("train.model.width makes it", {"preset": "qwen2.5-0.5b"}),
    "another kind": Wrong("train.model.kind is gpt2", {"kind": "gpt2"}),
    "other experts": Wrong("num_local_experts is 4, train.model.experts makes it 8", {"experts": 8}, "mixtral_tiny"),
    "another window": Wrong("sliding_window is 16", {"window": 8}, "mistral_tiny"),
    "a folder that is not there": Wrong("nowhere", {"init_from": "nowhere"}),
    # meshes
    "experts that ep does not divide": Wrong(
        "cannot be split evenly over ep = 8", {}, "mixtral_tiny", {"mesh": {"ep": 8}}
    ),
    "ep without experts": Wrong("train.mesh.ep = 2 splits experts", {}, keys={"mesh": {"dp": 4, "ep": 2}}),
    "heads that mp does not divide": Wrong("mp = 8", {}, keys={"mesh": {"mp": 8}}),
    "a batch that the mesh does not divide": Wrong("train.batch = 12 cannot be split evenly", {}, keys={"batch": 12}),
    # adapters
    "a target that is no product": Wrong("wq matches no linear layer", {}, keys=lora(targets=["wq"])),
    "adapters of experts": Wrong("w1 matches no linear layer", {}, "mixtral_tiny", lora(targets=["w1"])),
    "adapters of the embedding": Wrong("embed_tokens matches no linear layer", {}, keys=lora(targets=["embed_tokens"])),
    "adapters of the head": Wrong("lm_head matches no linear layer", {}, keys=lora(targets=["lm_head"])),
    "adapters that are not there": Wrong("train.lora.init_from", {}, keys=lora(init_from="nowhere")),
    "adapters of another rank": Wrong("rank is 4 there and 8 here", {}, keys=lora(init_from="PEFT", rank=8)),
    "a group of what is frozen": Wrong(
        "matches no parameter", {}, keys=lora() | optimizer(groups=[{"match": "head", "lr": 2}])
    ),
    # optimizers
    "a group that matches nothing": Wrong(
        "matches no parameter", {}, keys=optimizer(groups=[{"match": "wte", "lr": 2}])
    ),
    "nothing to train": Wrong("freeze every parameter", {}, keys=optimizer(groups=[{"match": ".*", "freeze": True}])),
    "an optimizer that does not exist": Wrong("is not a known optimizer", {}, keys=optimizer(name="adamx")),
    # samples while training
    "a sample of a token that is none": Wrong("has the token 97", {}, keys={"eval": {"samples": {"prompts": [[97]]}}}),
    "a sample of text without a tokenizer": Wrong("give token ids", {}, keys={"eval": {"samples": {"prompts": ["a"]}}}),
}


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the model is compiled: neither its start nor its step."""

    def compiles(*_: Any, **__: Any) -> None:
        raise AssertionError("it was not refused: it compiles")

    monkeypatch.setattr(state, "once", compiles)  # the options that the start is compiled with
    monkeypatch.setattr(Step, "compile_train", compiles)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_one_sentence_and_64_before_the_first_compile(name: str, never: None, tmp_path: Path) -> None:
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
        at = folders.start("lora_qwen2_tiny", tmp_path / "peft")
        block = json.loads(json.dumps(block).replace("PEFT", str(at)))
    with pytest.raises(TrainerError) as raised:
        train, task = read_spec({contract.TRAIN_SPEC: json.dumps(block)})
        train = peft.resolved(folder_of.resolved(train))
        tiny.run_to_an_error(loop_of(train, task, Place(str(tmp_path / "run")), Stop(), Progress(None)))
    assert exit_code(raised.value, has_stepped=False) == contract.BAD_SPEC
    assert wrong.says in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_there_are_forty() -> None:
    assert len(WRONG) >= 40
