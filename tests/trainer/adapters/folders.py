"""The adapters of tests/fixtures as a job would meet them, and steps that train them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.lm import NextToken
from tests import needs
from tests.trainer import references

BASES = {"lora_qwen2_tiny": "qwen2_tiny", "lora_qwen3_tiny_rs": "qwen3_tiny"}
STEPS = 20


def config(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((references.FIXTURES / case / "config.json").read_text())
    return found


def start(case: str, to: Path, **changed: Any) -> Path:
    """The adapters before the first step, as peft writes them."""
    to.mkdir(parents=True)
    (to / "adapter_config.json").write_text(json.dumps(config(case)["adapter_config"] | changed))
    started = needs.arrays(references.FIXTURES / case / "start.safetensors")
    shutil.copy(started, to / "adapter_model.safetensors")
    return to


def base(case: str, to: Path) -> Path:
    """The model that the adapters are of."""
    return to if to.exists() else references.folder(BASES[case], to)


def train_spec(case: str, at: Path, lora: dict[str, Any] | None = None, **keys: Any) -> TrainSpec:
    """A job on the case's adapters, with its optimizer; `lora` has keys besides their folder."""
    given = config(case)
    adamw = {
        "name": "adamw",
        "lr": given["opt"]["kw"]["lr"],
        "weight_decay": given["opt"]["kw"]["weight_decay"],
        "clip": given["clip"],
        "schedule": {"name": "constant"},
    }
    if not (at / "peft").exists():
        start(case, at / "peft")
    block = {"init_from": str(at / "peft"), **(lora or {})}
    keys = {"optimizer": adamw, "batch": given["batch"], "lora": block, **keys}
    return peft.resolve_lora(references.train_spec(BASES[case], base(case, at / "hf"), **keys))


def step(
    case: str, at: Path, devices: int = 1, lora: dict[str, Any] | None = None, **keys: Any
) -> Step:
    train = train_spec(case, at, lora, **keys)
    return Step(NextToken(), train, mesh.build_mesh(train.mesh, jax.devices()[:devices]), STEPS)


def batches(case: str) -> list[dict[str, np.ndarray]]:
    ones = {"mask": np.ones((8, 47), np.float32), "weight": np.ones(8, np.float32)}
    return [{"tokens": tokens, **ones} for tokens in references.tensors(case, "data")["tokens"]]


def run(of: Step, case: str, steps: int = STEPS) -> tuple[dict[str, np.ndarray], TrainState]:
    """Loss and gradient norm of each step, and the state after them."""
    each = batches(case)[:steps]
    of.compile_train(of.put_batch(each[0]))
    state, said = of.init_state(), []
    for rows in each:
        state, metrics = of.train(state, of.put_batch(rows))
        said.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.array(said).T
    return {"loss": losses, "grad_norm": norms}, state


def meta(of: Step, train: TrainSpec) -> dict[str, Any]:
    """What a checkpoint says beside the arrays."""
    return {**train.model_dump(mode="json", include={"model", "lora"}), "base": of.builder.base}
