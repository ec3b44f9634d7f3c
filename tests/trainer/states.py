"""The planned and actual bytes of the states of six models: `python -m tests.trainer.states`.

Exits with 1 where they differ. The suite has one of each model and of each mesh.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import jax

from jaxlaunch.trainer import plan, spec
from jaxlaunch.trainer.plan import Plan
from jaxlaunch.trainer.task import Task
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken
from tests.trainer import tiny

RESNET = spec.ResNet(stem="small", stem_width=8, depths=[1, 1], widths=[8, 16], classes=10)
MODELS: dict[str, tuple[Task, spec.Model]] = {
    "decoder": (NextToken(), tiny.DECODER),
    "every option": (NextToken(), tiny.WIDE),
    "experts": (NextToken(), tiny.EXPERTS),
    "gpt2": (NextToken(), tiny.GPT2),
    "vit": (Classify(), tiny.VIT),
    "resnet": (Classify(), RESNET),
}
ADAFACTOR: dict[str, Any] = {"name": "adafactor"}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {  # each with an optimizer
    "dp8": ({"dp": 8}, {"name": "adamw", "ema": 0.9}),
    "fsdp8": ({"fsdp": 8}, ADAFACTOR),
    "dp4-mp2": ({"dp": 4, "mp": 2}, {"name": "sgd"}),
    "fsdp4-mp2": ({"fsdp": 4, "mp": 2}, {"name": "adamw"}),
    "dp2-fsdp4": ({"dp": 2, "fsdp": 4}, {"name": "lion"}),
    "dp2-fsdp2-mp2": ({"dp": 2, "fsdp": 2, "mp": 2}, {"name": "adamw", "ema": 0.9}),
}
WITH_EXPERTS = {"fsdp2-ep4": ({"fsdp": 2, "ep": 4}, {"name": "adamw"})}


def state_bytes(model: str, mesh: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a device's state by part, as planned and as held by device 0."""
    (task, model_spec), (axes, optimizer) = MODELS[model], (MESHES | WITH_EXPERTS)[mesh]
    name = "lm" if isinstance(task, NextToken) else "classify"
    keys = {"task": name, "batch": tiny.ROWS, "model": model_spec, "mesh": axes}
    train = spec.TrainSpec(**keys, optimizer=spec.Optimizer(**{"lr": 1e-3, **optimizer}))
    planned_step = Plan(plan.with_synthetic_data(train, task), task)
    state = planned_step.step.init_state()
    parts = {"parameters": state.params, "optimizer": state.opt, "average": state.ema}
    parts["other"] = (state.buffers, state.scale, state.step)
    planned = planned_step.state_bytes()
    return {part: planned[part] for part in parts}, {
        part: _held(tree) for part, tree in parts.items()
    }


def _held(tree: Any) -> int:
    shards = (shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


def main() -> int:
    """Prints a line for each of the 37."""
    jax.config.update("jax_num_cpu_devices", 8)
    differ = 0
    for model, mesh in [
        *itertools.product(MODELS, MESHES),
        *(("experts", mesh) for mesh in WITH_EXPERTS),
    ]:
        planned, held = state_bytes(model, mesh)
        differ += planned != held
        print(
            f"{model}, {mesh}: {sum(held.values())} bytes, "
            f"{'as planned' if planned == held else planned}"
        )
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
