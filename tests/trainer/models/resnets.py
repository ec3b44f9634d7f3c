"""The ResNets of tests/fixtures: a Hugging Face folder, a step that starts from it, and its batches."""

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
    found: dict[str, Any] = json.loads((FIXTURES / case / "config.json").read_text())
    return found


def folder(case: str, to: Path) -> Path:
    """The case as Hugging Face would hold it."""
    to.mkdir(parents=True)
    (to / "config.json").write_text(json.dumps(described(case)["hf_config"]))
    (to / "model.safetensors").symlink_to(needs.arrays(FIXTURES / case / "weights.safetensors"))
    return to


def step(
    case: str,
    init_from: Path | None,
    devices: int = 1,
    *,
    model: dict[str, Any] | None = None,
    **keys: Any,
) -> Step:
    """A step of the case's model that starts from the folder; plain SGD at rate 1 unless `keys` say otherwise."""
    sgd = {
        "name": "sgd",
        "lr": 1.0,
        "momentum": 0.9,
        "clip": None,
        "schedule": {"name": "constant"},
    }
    classes = described(case)["kw"]["num_labels"]
    block = {"kind": "resnet", "classes": classes, **AS_THEY_ARE, **(model or {})}
    block |= {} if init_from is None else {"init_from": str(init_from)}
    train = spec.TrainSpec.model_validate(
        {"task": "tests:R", "batch": 8, "mesh": {"dp": devices}, "model": block, "optimizer": sgd}
        | keys
    )
    train = resolve_spec(train)
    images = Images((*described(case)["size"], 3))
    return Step(images, train, mesh.build_mesh(train.mesh, jax.devices()[:devices]), 20)


def batch(case: str) -> dict[str, np.ndarray]:
    given = tensors(case, "io")
    return {"image": given["pixel_values"].transpose(0, 2, 3, 1), "label": given["labels"], **ONES}


def batches(case: str) -> list[dict[str, np.ndarray]]:
    """Of the curve, in bytes."""
    data = tensors(case, "train_data")
    images = data["images_u8"].transpose(0, 2, 3, 1)
    return [
        {"image": images[index], "label": data["labels"][index], **ONES} for index in data["index"]
    ]
