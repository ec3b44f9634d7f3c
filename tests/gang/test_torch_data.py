"""The field's own example of torch data, in the hands of the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer.data import records
from tests import environments, needs
from tests.gang.runs import job, launch, succeed

pytestmark = [pytest.mark.computes, pytest.mark.extended]

LENGTH, STEPS = 12, 5
VIT = {"kind": "vit", "layers": 1, "width": 32, "heads": 2, "image": [224, 224], "patch": 56, "classes": 1000}


def losses(folder: Path, data: dict[str, Any], env: dict[str, str] | None = None) -> dict[int, float]:
    """The losses by step of a run on these data, two processes long enough to begin the second epoch."""
    train = {
        "task": "classify",
        "model": VIT,
        "data": data,
        "batch": 4,
        "steps": STEPS,
        "log_every": 1,
        "optimizer": {"lr": 1e-3, "schedule": {"name": "constant"}},
    }
    return succeed(launch(folder, job(train, hosts=1, per_host=2), env=env)).losses


def test_a_torch_dataset_with_labels_of_shape_1_trains_to_the_losses_of_the_same_numbers_elsewhere(
    tmp_path: Path,
) -> None:
    libraries = needs.packages("torch")
    images = (np.random.default_rng(index).random((224, 224, 3), np.float32) for index in range(LENGTH))
    examples = ({"image": image, "label": index % 1000} for index, image in enumerate(images))
    records.write(tmp_path / "all.array_record", examples)
    torch = {"source": "torch", "dataset": "torch_images:RandomImages", "args": {"length": LENGTH}, "workers": 2}
    found = losses(tmp_path / "torch", torch, environments.LAZY | {"TORCH_LIBRARIES": str(libraries)})
    wanted = losses(tmp_path / "records", {"source": "array_record", "path": str(tmp_path / "all.array_record")})
    assert list(found) == list(range(1, STEPS + 1)) and found == wanted
    assert 6 < found[1] < 8 and found[STEPS] < found[1]  # ln 1000 = 6.9 before the first step
