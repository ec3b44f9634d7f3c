"""Compares a family of transformers with torch: python families.py FOLDER FAMILY.

It runs with the packages of the environment torchax and prints a JSON line. A child of this process
is killed in the middle of a training, which this process resumes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.text_model import load_text_model
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.torch_models import compare, export
from tests.trainer.torch_models.against_torch import (
    LENGTH,
    PROMPTS,
    build_step,
    difference,
    draw_tokens,
    generate_torch,
    load_torch,
    mean_loss,
)
from tests.trainer.torch_models.scenarios import save_tiny_model

STEPS, SAVED_STEP = 5, 2
B1, B2 = 0.9, 0.999
# Adam divides by the size of a gradient. With an epsilon above the rounding errors of gradients,
# its steps do not depend on the signs of those that are zero but for rounding.
ADAMW = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}
MESHES: dict[str, dict[str, int]] = {
    "one": {"dp": 1},
    "sharded": {"dp": 2, "fsdp": 2, "mp": 2},
    "experts": {"ep": 2},
}
BATCH = draw_tokens()


def build_family_step(folder: Path, mesh: Mapping[str, int]) -> Step:
    optimizer = {"name": "adamw", "b1": B1, "b2": B2, "clip": None, "schedule": "constant"}
    optimizer |= {"decay_on": "all", **ADAMW}
    step = build_step(NextToken(), folder / "model", mesh=dict(mesh), optimizer=optimizer)
    step.compile_train(BATCH)
    return step


def train(step: Step, state: Any, count: int) -> tuple[Any, list[float]]:
    batch, losses = step.put_batch(BATCH), []
    for _ in range(count):
        state, metrics = step.train(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def compute_logits(step: Step, state: Any) -> tuple[Any, Any]:
    """Return the logits of the rows, and of two packed rows of half the length each if possible."""
    segments_L = jnp.arange(LENGTH) // (LENGTH // 2) + 1

    def run_model(model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        tokens_BL = batch["tokens"][:, :-1]
        segments_BL = jnp.broadcast_to(segments_L[None], tokens_BL.shape)
        try:
            packed_BLV = model(tokens_BL, Visible(segments_BL=segments_BL))
        except SpecError:
            packed_BLV = None
        return model(tokens_BL), packed_BLV

    step.compile_eval(BATCH, run_model)
    _, (outputs, _) = step.evaluate(state, step.put_batch(BATCH))
    return jax.device_get(outputs)


def run_torch(module: Any, length: int = LENGTH) -> np.ndarray[Any, Any]:
    """Return the logits of rows of this length, one after the other."""
    tokens_BL = torch.tensor(BATCH["tokens"][:, :-1]).long()
    with torch.no_grad():
        parts = [
            module(input_ids=part, use_cache=False).logits for part in tokens_BL.split(length, 1)
        ]
    return torch.cat(parts, 1).numpy()


def train_torch(module: Any) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Train a module. Return its losses, first gradients and final parameters."""
    keys = {"lr": ADAMW["lr"], "eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
    optimizer = torch.optim.AdamW(module.parameters(), betas=(B1, B2), **keys)
    losses, gradients = [], {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(module, BATCH)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = gradients or {
            name: parameter.grad.numpy().copy()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        optimizer.step()
    final = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    return losses, gradients, final


def trained_difference(result: Any, expected: np.ndarray[Any, Any]) -> float:
    """Return the difference as a share of the largest value, or of how far the steps can move."""
    scale = max(float(np.abs(expected).max()), STEPS * ADAMW["lr"])
    return float(np.abs(np.asarray(result) - expected).max()) / scale


def compare_on_mesh(step: Step, module: Any, expected: Any) -> tuple[Any, dict[str, Any]]:
    """Train on a mesh. Return the final state and the differences from torch."""
    losses, gradients, final = expected
    state = step.init_state()
    logits_BLV, packed_BLV = compute_logits(step, state)
    state, first_losses = train(step, state, 1)
    moments = jax.device_get(step.builder.to_tree(state)["opt"])
    least = compare.TINY_GRADIENT * max(np.abs(gradient).max() for gradient in gradients.values())
    shares = {}
    for name, gradient in gradients.items():
        (key,) = (key for key in moments if key.endswith(f".mu.{name}"))
        scale = max(np.abs(gradient).max(), least)
        shares[name] = float(np.abs(moments[key] / (1 - B1) - gradient).max() / scale)
    worst = max(shares, key=shares.__getitem__)
    state, last_losses = train(step, state, STEPS - 1)
    return state, {
        "logits": difference(logits_BLV, run_torch(module)),
        "packed": None
        if packed_BLV is None
        else difference(packed_BLV, run_torch(module, LENGTH // 2)),
        "gradient": shares[worst],
        "parameter": worst,
        # What a text does not reach, such as a tower for images, stays as it was.
        "unused": all(
            np.array_equal(array, final[name])
            for name, array in jax.device_get({**state.params, **state.buffers}).items()
            if name in final and name not in gradients
        ),
        "losses": difference(first_losses + last_losses, losses),
        "trained": max(trained_difference(state.params[name], final[name]) for name in gradients),
    }


def train_until_killed(folder: Path) -> NoReturn:
    step = build_family_step(folder, MESHES["sharded"])
    state, _ = train(step, step.init_state(), SAVED_STEP)
    store = Store(str(folder / "checkpoints"), keep=1, uid="run")
    store.claim()
    store.save(SAVED_STEP, step.builder.to_tree(state), {})
    store.wait()
    train(step, state, 1)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process was not killed")


def resume(step: Step, folder: Path) -> Any:
    """Return the state after the remaining steps of the killed training."""
    store = Store(str(folder / "checkpoints"), keep=1, uid="run")
    store.claim()
    restored = store.restore(step.builder.to_tree(step.abstract))
    assert restored is not None and restored[0] == SAVED_STEP
    return train(step, step.builder.from_tree(restored[1]), STEPS - SAVED_STEP)[0]


def export_model(step: Step, state: Any, target: Path) -> None:
    params = {**state.params, **state.buffers}
    export.save_model(str(target), step.builder._spec.model, None, params, {})


def stop_chat(step: Step, state: Any, folder: Path) -> dict[str, Any]:
    """Name a token that the model says as the end of a turn, export, and generate with it."""
    export_model(step, state, folder / "export")
    exported = load_torch(folder / "export")
    logits_BLV, _ = compute_logits(step, state)
    said = generate_torch(exported, PROMPTS[0], 8)
    end = next(token for token in said[1:] if token != said[0])
    keys = {"eos_token_id": [end], "pad_token_id": 0}
    (folder / "model" / "generation_config.json").write_text(json.dumps(keys))
    export_model(step, state, folder / "chat")
    chat = load_torch(folder / "chat")
    prompt = torch.tensor([PROMPTS[0]])
    answer = chat.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=False)
    model = load_text_model(str(folder / "chat"), note=lambda text: None)
    ((sample,),) = model.generate(PROMPTS[:1], max_tokens=8)
    return {
        "exported": difference(run_torch(exported), logits_BLV),
        "said": said[: said.index(end) + 1],
        "transformers": answer[0, len(PROMPTS[0]) :].tolist(),
        "sample": [*sample.ids, end] if sample.ended else sample.ids,
    }


def compare_family(folder: Path, family: str) -> dict[str, Any]:
    # With the small weights that transformers draws, attention is a mean and each token the same.
    # Two layers have all kinds of layers of these families.
    save_tiny_model(family, folder / "model", scale=4.0, layers=2)
    command = [sys.executable, "-m", __spec__.name, str(folder)]
    child = subprocess.Popen([*command, "until_killed"])
    module = load_torch(folder / "model")
    expected = train_torch(load_torch(folder / "model"))
    result: dict[str, Any] = {"model_type": family, "meshes": {}}
    for name, mesh in MESHES.items():
        try:
            step = build_family_step(folder, mesh)
        except SpecError:
            assert name == "experts"
            continue
        state, result["meshes"][name] = compare_on_mesh(step, module, expected)
        if name == "sharded":
            assert child.wait() == -signal.SIGKILL
            resumed = resume(step, folder)
            arrays = jax.device_get((step.builder.to_tree(state), step.builder.to_tree(resumed)))
            result["resumed"] = jax.tree.all(jax.tree.map(np.array_equal, *arrays))
            result["chat"] = stop_chat(step, state, folder)
    return result


def main(folder: Path, family: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", compare.MESH_DEVICES)
    # The child and its parent compile the same steps.
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if family == "until_killed":
        train_until_killed(folder)
    print(json.dumps(compare_family(folder, family)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
