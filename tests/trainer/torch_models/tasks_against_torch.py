"""Compares tasks of tiny models of transformers with torch: python tasks_against_torch.py FOLDER.

It runs with the packages of the environment torchax. Each case prints a JSON line of its name and
its largest differences, as shares of the largest value.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.torch
import torch
import transformers

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.reward import Reward
from jaxlaunch.trainer.torch_models import compare
from tests.trainer.torch_models.against_torch import (
    LENGTH,
    MESH,
    ROWS,
    build_step,
    difference,
    draw_pairs,
    largest_difference,
    train_once,
)

CLASSES, PAD = 3, 1
ONE_DEVICE = {"dp": 1}


def save_model(model_type: str, folder: Path, auto_class: str, **keys: Any) -> None:
    """Write a tiny random model without dropout, with the head of a class of transformers."""
    tiny = compare.shrink_config(transformers.AutoConfig.for_model(model_type).to_dict())
    dropouts = {name: 0.0 for name in tiny if "dropout" in name and tiny[name] is not None}
    tiny |= {**dropouts, "pad_token_id": PAD, **keys}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**tiny)
    getattr(transformers, auto_class).from_config(config).save_pretrained(folder)


def draw_texts() -> dict[str, np.ndarray]:
    """Draw texts of different lengths, whose padding is 0 as in our data."""
    draw = np.random.default_rng(0)
    length = np.array([LENGTH, 3, 11, 7], np.int32)
    tokens = draw.integers(2, 120, (ROWS, LENGTH), np.int32)
    return {
        "tokens": np.where(np.arange(LENGTH) < length[:, None], tokens, 0),
        "length": length,
        "label": np.array([0, 2, 1, 2], np.int32),
        "weight": np.ones(ROWS, np.float32),
    }


def as_inputs(tokens: np.ndarray, length: np.ndarray) -> dict[str, Any]:
    """Return padded texts as transformers' collators pad them."""
    mask = np.arange(tokens.shape[1]) < length[:, None]
    ids = torch.tensor(np.where(mask, tokens, PAD)).long()
    return {"input_ids": ids, "attention_mask": torch.tensor(mask).long()}


def compare_classes(folder: Path, model_type: str, mesh: Any = MESH) -> dict[str, Any]:
    model, batch = folder / "model", draw_texts()
    auto_class = "AutoModelForSequenceClassification"
    save_model(model_type, model, auto_class, num_labels=CLASSES)
    head = {"head": "sequence_classification"}
    step = build_step(Classify(), model, head, mesh=mesh)
    state, metrics, gradients = train_once(step, batch)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    labels = torch.tensor(batch["label"]).long()
    outputs = module(**as_inputs(batch["tokens"], batch["length"]), labels=labels)
    outputs.loss.backward()
    initial = step.init_state()

    def predict(params: Any, buffers: Any, rows: Any) -> Any:
        return Classify().predict(step.loss.evaluation_model(params, buffers), rows)

    with step.builder.trace_context():
        rows = step.put_batch(batch)
        logits = jax.jit(predict)(initial.params, initial.buffers, rows)
    chosen = outputs.logits.argmax(-1) == labels
    return {
        "loss": difference(metrics["loss"], outputs.loss.detach()),
        "logits": difference(logits, outputs.logits.detach()),
        "accuracy": difference(metrics["accuracy"], chosen.float().mean()),
        "gradient": largest_difference(gradients, module),
    }


def compare_rewards(folder: Path, model_type: str) -> dict[str, Any]:
    """A reward model from the body of a language model, whose head is drawn."""
    model, pairs = folder / "model", draw_pairs()
    pairs["length"] = np.array([[LENGTH + 1, 5], [3, 11], [7, 7], [9, 2]], np.int32)
    save_model(model_type, model, "AutoModelForCausalLM")
    head = {"head": "sequence_classification", "classes": 1}
    step = build_step(Reward(), model, head)
    initial = step.builder.saved_params(step.init_state().params)
    _, metrics, gradients = train_once(step, pairs)
    module = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    score = torch.tensor(np.asarray(initial["score.weight"]))
    with torch.no_grad():
        module.eval().score.weight.copy_(score)
    length = pairs["length"].reshape(-1)
    tokens = np.where(
        np.arange(LENGTH + 1) < length[:, None], pairs["tokens"].reshape(-1, LENGTH + 1), 0
    )
    rewards = module(**as_inputs(tokens, length)).logits[:, 0].view(-1, 2)
    loss = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
    loss.backward()
    return {
        "loss": difference(metrics["loss"], loss.detach()),
        "margin": difference(metrics["margin"], rewards.diff(dim=1).neg().mean().detach()),
        "gradient": largest_difference(gradients, module),
        "drawn": float(score.std()),
    }


def start_new_head(folder: Path) -> dict[str, Any]:
    """A folder with another number of classes, and with a tensor of an older transformers."""
    model = folder / "model"
    save_model("bert", model, "AutoModelForSequenceClassification", num_labels=2)
    path = model / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["bert.embeddings.position_ids"] = torch.arange(4)[None]
    safetensors.torch.save_file(tensors, path)
    head = {"head": "sequence_classification", "classes": CLASSES}
    builder = build_step(Classify(), model, head, mesh=ONE_DEVICE).builder
    params = builder.init_state().params
    pooler = "bert.pooler.dense.weight"
    fault = ""
    try:
        builder.init_state(draws_head=False)
    except SpecError as error:
        fault = str(error)
    return {
        "shape": [*params["classifier.weight"].shape],
        "pooler": difference(params[pooler], tensors[pooler]),
        "fault": fault,
    }


FAMILIES = ("bert", "roberta", "distilbert", "modernbert", "qwen3", "llama")
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{name: partial(compare_classes, model_type=name) for name in FAMILIES},
    "new head": start_new_head,
    "reward": partial(compare_rewards, model_type="qwen3"),
    "bert on one device": partial(compare_classes, model_type="bert", mesh=ONE_DEVICE),
}


def main(folder: Path, names: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name in names or CASES:
        place = folder / name.replace(" ", "_")
        place.mkdir()
        print(json.dumps({"case": name, **CASES[name](place)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
