"""The ResNet cases of tests/fixtures: a Hugging Face folder, steps and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.huggingface.folder import resolve_spec
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.classify import Classify
from tests import needs

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = ("resnet_tiny", "resnet_tiny_bottleneck")
AS_THEY_ARE = {"pixel_mean": [0.0] * 3, "pixel_std": [1.0] * 3}
BYTES = {"pixel_mean": [128.0] * 3, "pixel_std": [64.0] * 3}
ONES = {"weight": np.ones(8, np.float32)}


class Images(Classify):
    """Images of the size of the fixture's."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def source(self, spec: Any, split: str) -> Any:
        return [{"image": np.zeros(self.shape, np.float32), "label": 0}]


def tensors(case: str, file: str) -> dict[str, np.ndarray]:
    return load_file(needs.arrays(FIXTURES / case / f"{file}.safetensors"))


def described(case: str) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((FIXTURES / case / "config.json").read_text())
    return actual


def folder(case: str, target: Path) -> Path:
    """The case as Hugging Face would hold it."""
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(described(case)["hf_config"]))
    (target / "model.safetensors").symlink_to(needs.arrays(FIXTURES / case / "weights.safetensors"))
    return target


def step(
    case: str, init_from: Path | None, devices: int = 1, *, model: Any = None, **keys: Any
) -> Step:
    """Return a step of the case that starts from the folder, with plain SGD at rate 1."""
    sgd = {"name": "sgd", "lr": 1.0, "momentum": 0.9, "clip": None, "schedule": "constant"}
    classes = described(case)["kw"]["num_labels"]
    block = {"kind": "resnet", "classes": classes, **AS_THEY_ARE, **(model or {})}
    block |= {} if init_from is None else {"init_from": str(init_from)}
    job = {"task": "tests:R", "batch": 8, "mesh": {"dp": devices}, "model": block}
    train = spec.TrainSpec.model_validate({**job, "optimizer": sgd, **keys})
    train = resolve_spec(train)
    images = Images((*described(case)["size"], 3))
    return Step(images, train, mesh.build_mesh(train.mesh, jax.devices()[:devices]), 20)


def batch(case: str) -> dict[str, np.ndarray]:
    inputs = tensors(case, "io")
    images = inputs["pixel_values"].transpose(0, 2, 3, 1)
    return {"image": images, "label": inputs["labels"], **ONES}


def batches(case: str) -> list[dict[str, np.ndarray]]:
    """Of the curve, in bytes."""
    data = tensors(case, "train_data")
    images = data["images_u8"].transpose(0, 2, 3, 1)
    labels = data["labels"]
    return [{"image": images[index], "label": labels[index], **ONES} for index in data["index"]]
