"""Our side of benchmarks.vit: the step of the trainer.

With sizes as an argument it writes the inputs of all sides.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from benchmarks.side import serve_steps
from jaxlaunch.trainer.huggingface import save
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import CLASSIFY, TrainSpec, ViT
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.user_code import load_object

# Names in the folder that all sides read.
WEIGHTS, BATCH, SIZES = "weights", "batch.npz", "sizes.json"
# A pixel is (byte - SHIFT) / SCALE.
SHIFT, SCALE = 128.0, 64.0


def make_step(sizes: dict[str, Any], folder: pathlib.Path | None) -> tuple[Step, ViT]:
    """Return a step for a ViT of these sizes, with random weights or with those in `folder`."""
    model_keys = {
        key: value for key, value in sizes.items() if key not in ("batch", "lr", "precision")
    }
    start = {} if folder is None else {"init_from": str(folder / WEIGHTS)}
    height, width = sizes["image"]
    spec = TrainSpec.model_validate(
        {
            "task": CLASSIFY,
            "model": {
                "kind": "vit",
                "scan": False,
                "pixel_mean": [SHIFT] * 3,
                "pixel_std": [SCALE] * 3,
                **model_keys,
                **start,
            },
            "data": {"source": "synthetic", "shape": [height, width, 3]},
            "mesh": {"dp": 1},
            "batch": sizes["batch"],
            "precision": sizes["precision"],
            "optimizer": {"name": "adamw", "lr": sizes["lr"], "clip": None},
        }
    )
    step = Step(load_object(CLASSIFY)(), spec, mesh.build_mesh(spec.mesh, jax.devices()[:1]), 1000)
    assert isinstance(spec.model, ViT)
    return step, spec.model


def write_inputs(sizes: dict[str, Any], folder: pathlib.Path) -> None:
    """Write sizes, random weights and one batch of random images."""
    step, model = make_step(sizes, None)
    save.save_model(str(folder / WEIGHTS), model, step.init_state().params)
    rng, rows = np.random.default_rng(0), sizes["batch"]
    images = rng.integers(0, 256, (rows, *sizes["image"], 3), np.uint8)
    np.savez(
        folder / BATCH, images=images, labels=rng.integers(0, sizes["classes"], rows, np.int32)
    )
    (folder / SIZES).write_text(json.dumps(sizes))


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    if len(sys.argv) > 2:
        # The inputs are written in another process than the measured one, whose memory would
        # otherwise be warm.
        write_inputs(json.loads(sys.argv[2]), folder)
        return
    sizes = json.loads((folder / SIZES).read_text())
    step, _ = make_step(sizes, folder)
    arrays = np.load(folder / BATCH)
    weight = np.ones(len(arrays["labels"]), np.float32)
    batch = step.put_batch({"image": arrays["images"], "label": arrays["labels"], "weight": weight})
    step.compile_train(batch)
    state = step.init_state()

    def run_step() -> float:
        nonlocal state
        state, metrics = step.train(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    serve_steps(f"jax {jax.__version__}, {sizes['precision']}", run_step)


if __name__ == "__main__":
    main()
