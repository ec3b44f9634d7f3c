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
    actual: dict[str, Any] = json.loads((references.FIXTURES / case / "config.json").read_text())
    return actual


def write_start(case: str, target: Path, **changed: Any) -> Path:
    """The adapters before the first step, as peft writes them."""
    target.mkdir(parents=True)
    keys = config(case)["adapter_config"] | changed
    (target / "adapter_config.json").write_text(json.dumps(keys))
    started = needs.arrays(references.FIXTURES / case / "start.safetensors")
    shutil.copy(started, target / "adapter_model.safetensors")
    return target


def base_folder(case: str, target: Path) -> Path:
    """The model that the adapters are of."""
    return target if target.exists() else references.folder(BASES[case], target)


def train_spec(case: str, root: Path, lora: dict[str, Any] | None = None, **keys: Any) -> TrainSpec:
    """A job on the case's adapters, with its optimizer; `lora` has keys besides their folder."""
    inputs = config(case)
    rates = {key: inputs["opt"]["kw"][key] for key in ("lr", "weight_decay")}
    adamw = {"name": "adamw", **rates, "clip": inputs["clip"], "schedule": "constant"}
    if not (root / "peft").exists():
        write_start(case, root / "peft")
    block = {"init_from": str(root / "peft"), **(lora or {})}
    keys = {"optimizer": adamw, "batch": inputs["batch"], "lora": block, **keys}
    source = base_folder(case, root / "hf")
    return peft.resolve_lora(references.train_spec(BASES[case], source, **keys))


def step(case: str, root: Path, devices: int = 1, lora: Any = None, **keys: Any) -> Step:
    train = train_spec(case, root, lora, **keys)
    return Step(NextToken(), train, mesh.build_mesh(train.mesh, jax.devices()[:devices]), STEPS)


def batches(case: str) -> list[dict[str, np.ndarray]]:
    ones = {"mask": np.ones((8, 47), np.float32), "weight": np.ones(8, np.float32)}
    return [{"tokens": tokens, **ones} for tokens in references.tensors(case, "data")["tokens"]]


def train(
    compiled: Step, case: str, steps: int = STEPS
) -> tuple[dict[str, np.ndarray], TrainState]:
    """Loss and gradient norm of each step, and the state after them."""
    item = batches(case)[:steps]
    compiled.compile_train(compiled.put_batch(item[0]))
    state, output = compiled.init_state(), []
    for rows in item:
        state, metrics = compiled.train(state, compiled.put_batch(rows))
        output.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.array(output).T
    return {"loss": losses, "grad_norm": norms}, state


def checkpoint_meta(compiled: Step, train: TrainSpec) -> dict[str, Any]:
    """Return the metadata of a checkpoint."""
    meta = train.model_dump(mode="json", include={"model", "lora"})
    return meta | {"base": compiled.builder.base}
