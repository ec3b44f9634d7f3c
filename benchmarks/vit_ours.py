"""Our side of benchmarks.vit: the trainer's train step. `write` makes what the other sides read."""

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

WEIGHTS, BATCH, SIZES = "weights", "batch.npz", "sizes.json"  # in the folder that the sides share
SHIFT, SCALE = 128.0, 64.0  # pixel = (byte - SHIFT) / SCALE


def make_step(sizes: dict[str, Any], folder: pathlib.Path | None) -> tuple[Step, ViT]:
    """Return a step of the ViT of these sizes; weights come from `folder` or are random."""
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
        # Not in the process that is measured: its memory would be used.
        write_inputs(json.loads(sys.argv[2]), folder)
        return
    sizes = json.loads((folder / SIZES).read_text())
    made, _ = make_step(sizes, folder)
    read = np.load(folder / BATCH)
    ones = np.ones(len(read["labels"]), np.float32)
    batch = made.put_batch({"image": read["images"], "label": read["labels"], "weight": ones})
    made.compile_train(batch)
    state = made.init_state()

    def run_step() -> float:
        nonlocal state
        state, metrics = made.train(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    serve_steps(f"jax {jax.__version__}, {sizes['precision']}", run_step)


if __name__ == "__main__":
    main()
