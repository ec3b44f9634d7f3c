"""The examples on a small published model, whole and by adapters: better than its start, and used elsewhere."""

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

    before: float  # bits a held-out byte
    after: float
    samples: list[Any]
    exported: str


def sentences(count: int, seed: int) -> list[str]:
    """The words in their order, from anywhere and of any number."""
    draw, words = random.Random(seed), TEXT.split() * 3
    starts = [(draw.randrange(8), draw.randint(4, 12)) for _ in range(count)]
    return [" ".join(words[start : start + length]) for start, length in starts]


def tokenizer(folder: Path) -> None:
    """As many tokens as the small model has, of letters and pieces of words."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<unk>", corpora.END, corpora.BEGIN]
    trainer = trainers.BpeTrainer(vocab_size=96, special_tokens=special, show_progress=False)
    made.train_from_iterator([*sentences(50, 0), "user assistant\n"], trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": corpora.END, "chat_template": chat_corpora.CHATML}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"} | config)
    )


def job(example: str, at: Path, **keys: Any) -> TrainSpec:
    """An example with the small model, few rows and few steps."""
    given: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())["train"]
    del given["epochs"]
    given["model"] |= {"init_from": str(at / "hf"), "length": references.LENGTH}
    files = {
        "path": str(at / given["data"]["path"]),
        "tokenizer": str(at / "hf"),
        "data_dir": str(at / "prepared"),
    }
    given["data"] |= files | {"eval_split": 0.1}
    given["optimizer"] |= {"lr": 0.01, "schedule": {"name": "constant"}}
    if "samples" in given["eval"]:
        given["eval"]["samples"] = {"prompts": ["the lazy"], "max_tokens": 4}
    given["eval"]["every"] = given["checkpoint"]["every"] = STEPS
    return weights.resolve_spec(
        TrainSpec.model_validate(given | {"batch": 8, "steps": STEPS, "mesh": {"dp": 8}} | keys)
    )


def bits_per_byte(training: BuiltInTraining) -> float:
    """Of the held-out rows, before the first step."""
    assert training.held_out.batches is not None
    state, bits, counted = training.step.init_state(), 0.0, 0.0
    for batch in training.held_out.batches.iterate(training.step.put_batch):
        training.step.compile_eval(batch)
        total, weight = training.step.evaluate(state, batch)[0]["bits_per_byte"]
        bits, counted = bits + float(total), counted + float(weight)
    return bits / counted


def trained(at: Path, spec: TrainSpec) -> Trained:
    training = BuiltInTraining(spec, NextToken(), RunContext(str(at)), Progress(None))
    before = bits_per_byte(training)
    Loop(training, RunContext(str(at)), Never(), Progress(None)).run()
    last = json.loads((at / "eval.jsonl").read_text().splitlines()[-1])
    sampled = at / "samples.jsonl"
    samples = (
        json.loads(sampled.read_text().splitlines()[-1])["samples"] if sampled.exists() else []
    )
    said = export(str(at / "checkpoints"), str(at / "out"), merged=spec.lora is not None)
    assert said["architecture"] == "Qwen2ForCausalLM"
    return Trained(before, last["bits_per_byte"], samples, str(at / "out"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    at = tmp_path_factory.mktemp("finetune")
    references.folder(CASE, at / "hf")
    tokenizer(at / "hf")
    (at / "corpus").mkdir()
    corpora.lines(at / "corpus" / "a.jsonl", sentences(120, 1))
    chats = [
        [{"role": "user", "content": said}, {"role": "assistant", "content": said.split()[0]}]
        for said in sentences(120, 2)
    ]
    chat_corpora.lines(at / "chats.jsonl", chats)
    jobs = {
        "whole": job("finetune", at),
        "adapters": job("finetune", at, lora=LORA),
        "chat": job("chat", at),
    }
    with pytest.MonkeyPatch.context() as patched:  # a process of its own would take seconds
        patched.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
        for name in jobs:
            (at / name).mkdir()
        return {name: trained(at / name, spec) for name, spec in jobs.items()}


@pytest.mark.parametrize("name", ["whole", "adapters", "chat"])
def test_held_out_text_costs_fewer_bits_a_byte_than_at_the_start(
    found: dict[str, Trained], name: str
) -> None:
    assert found[name].after < 0.8 * found[name].before


def test_what_is_exported_is_loaded_with_its_tokenizer_here_and_by_transformers(
    found: dict[str, Trained],
) -> None:
    alone = mesh.build_mesh(Mesh(dp=1), jax.devices()[:1])
    ours = {}
    for name, each in found.items():
        loaded = jaxlaunch.load(each.exported, mesh=alone)
        ((sample,),) = loaded.generate("the lazy", max_tokens=4)
        assert (loaded.text(sample) or "").strip()
        ours[name] = loaded.logprobs(TEXT)[0]
    try:
        environments.find_python("torch")
    except environments.Missing as error:
        needs.absent(str(error))
    program = str(Path(__file__).with_name("transformers_says.py"))
    folders = [each.exported for each in found.values()]
    for name, line in zip(
        found, environments.run_program("torch", program, TEXT, *folders).splitlines(), strict=True
    ):
        theirs = json.loads(line)
        assert theirs["chat"] and len(theirs["ids"]) == len(ours[name]) + 1
        np.testing.assert_allclose(ours[name], theirs["logprobs"], rtol=0, atol=1e-4, err_msg=name)
