"""The examples on a small published model, fully and with adapters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import jaxlaunch
from jaxlaunch.trainer.export import export
from jaxlaunch.trainer.huggingface import folder as weights
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.sources import text
from jaxlaunch.trainer.spec import Mesh, TrainSpec
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.text import build
from jaxlaunch.trainer.train import BuiltInTraining
from tests import environments, needs
from tests.trainer import references
from tests.trainer.text import chat_corpora, corpora

pytestmark = pytest.mark.extended

EXAMPLES = Path(__file__).parents[3] / "examples"
CASE, STEPS = "qwen2_tiny", 24
TEXT = "the lazy fox jumps over a quick dog"
LORA = {"rank": 8, "alpha": 32, "targets": ["all-linear"]}


class Never:
    """Nobody tells this run to stop."""

    def poll(self) -> bool:
        return False


class Trained(NamedTuple):
    """What a training came to, and the folder it was exported to."""

    initial_bits: float  # of a held-out byte
    final_bits: float
    samples: list[Any]
    exported: str


def make_sentences(count: int, seed: int) -> list[str]:
    """The words in their order, from anywhere and of any number."""
    draw, words = random.Random(seed), TEXT.split() * 3
    starts = [(draw.randrange(8), draw.randint(4, 12)) for _ in range(count)]
    return [" ".join(words[start : start + length]) for start, length in starts]


def save_tokenizer(folder: Path) -> None:
    """As many tokens as the small model has, of letters and pieces of words."""
    built = Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", corpora.END, corpora.BEGIN]
    trainer = trainers.BpeTrainer(vocab_size=96, special_tokens=special, show_progress=False)
    built.train_from_iterator([*make_sentences(50, 0), "user assistant\n"], trainer)
    built.save(str(folder / "tokenizer.json"))
    config = {"eos_token": corpora.END, "chat_template": chat_corpora.CHATML}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"} | config)
    )


def make_job(example: str, folder: Path, **keys: Any) -> TrainSpec:
    """An example with the small model, few rows and few steps."""
    options: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())["train"]
    del options["epochs"]
    options["model"] |= {"init_from": str(folder / "hf"), "length": references.LENGTH}
    files = {
        "path": str(folder / options["data"]["path"]),
        "tokenizer": str(folder / "hf"),
        "data_dir": str(folder / "prepared"),
    }
    options["data"] |= files | {"eval_split": 0.1}
    options["optimizer"] |= {"lr": 0.01, "schedule": {"name": "constant"}}
    if "samples" in options["eval"]:
        options["eval"]["samples"] = {"prompts": ["the lazy"], "max_tokens": 4}
    options["eval"]["every"] = options["checkpoint"]["every"] = STEPS
    return weights.resolve_spec(
        TrainSpec.model_validate(options | {"batch": 8, "steps": STEPS, "mesh": {"dp": 8}} | keys)
    )


def bits_per_byte(training: BuiltInTraining) -> float:
    """Of the held-out rows, before the first step."""
    assert training.evaluator.batches is not None
    state, bits, counted = training.step.init_state(), 0.0, 0.0
    for batch in training.evaluator.batches.iterate(training.step.put_batch):
        training.step.compile_eval(batch)
        total, weight = training.step.evaluate(state, batch)[0]["bits_per_byte"]
        bits, counted = bits + float(total), counted + float(weight)
    return bits / counted


def train_model(folder: Path, spec: TrainSpec) -> Trained:
    training = BuiltInTraining(spec, NextToken(), RunContext(str(folder)), Progress(None))
    earlier = bits_per_byte(training)
    Loop(training, RunContext(str(folder)), Never(), Progress(None)).run()
    last = json.loads((folder / "eval.jsonl").read_text().splitlines()[-1])
    sampled = folder / "samples.jsonl"
    samples = (
        json.loads(sampled.read_text().splitlines()[-1])["samples"] if sampled.exists() else []
    )
    message = export(str(folder / "checkpoints"), str(folder / "out"), merged=spec.lora is not None)
    assert message["architecture"] == "Qwen2ForCausalLM"
    return Trained(earlier, last["bits_per_byte"], samples, str(folder / "out"))


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    at = tmp_path_factory.mktemp("finetune")
    references.folder(CASE, at / "hf")
    save_tokenizer(at / "hf")
    (at / "corpus").mkdir()
    corpora.write_lines(at / "corpus" / "a.jsonl", make_sentences(120, 1))
    chats = [
        [{"role": "user", "content": message}, {"role": "assistant", "content": message.split()[0]}]
        for message in make_sentences(120, 2)
    ]
    chat_corpora.write_lines(at / "chats.jsonl", chats)
    jobs = {
        "whole": make_job("finetune", at),
        "adapters": make_job("finetune", at, lora=LORA),
        "chat": make_job("chat", at),
    }
    with pytest.MonkeyPatch.context() as patched:  # a process of its own would take seconds
        patched.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
        for name in jobs:
            (at / name).mkdir()
        return {name: train_model(at / name, spec) for name, spec in jobs.items()}


@pytest.mark.parametrize("name", ["whole", "adapters", "chat"])
def test_finetuning_reduces_bits_per_byte(trainings: dict[str, Trained], name: str) -> None:
    assert trainings[name].final_bits < 0.8 * trainings[name].initial_bits


def test_export_loads_here_and_in_transformers(trainings: dict[str, Trained]) -> None:
    alone = mesh.build_mesh(Mesh(dp=1), jax.devices()[:1])
    actual = {}
    for name, item in trainings.items():
        loaded = jaxlaunch.load(item.exported, mesh=alone)
        ((sample,),) = loaded.generate("the lazy", max_tokens=4)
        assert (loaded.text(sample) or "").strip()
        actual[name] = loaded.logprobs(TEXT)[0]
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    program = str(Path(__file__).with_name("transformers_says.py"))
    folders = [training.exported for training in trainings.values()]
    for name, line in zip(
        trainings,
        environments.run_program("torch", program, TEXT, *folders).splitlines(),
        strict=True,
    ):
        reference = json.loads(line)
        assert reference["chat"] and len(reference["ids"]) == len(actual[name]) + 1
        np.testing.assert_allclose(
            actual[name], reference["logprobs"], rtol=0, atol=1e-4, err_msg=name
        )
