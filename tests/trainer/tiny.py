"""The smallest tasks that still learn, and runs of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.models.classifiers import MLP, ViT
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.step.state import TrainState
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken

SIZES: dict[str, Any] = {"width": 32, "heads": 4, "kv_heads": 2, "vocab": 32, "length": 16}
DECODER = spec.Decoder(layers=2, **SIZES)
# Every option of a decoder at once; the number of layers is not a multiple of its pattern.
WIDE = spec.Decoder(
    layers=3,
    **SIZES,
    head_size=12,
    biases=["qkv", "out", "mlp"],
    qk_norm="whole",
    norms="both",
    norm_from_one=True,
    activation="gelu_tanh",
    embedding_scale=True,
    query_scalar=10.0,
    score_cap=5.0,
    logit_cap=4.0,
    window=6,
    pattern=["window", "full"],
    rope_local_theta=100.0,
    rope_scaling=spec.RopeScaling(kind="yarn", factor=2.0, original_length=8),
)
# One layer without experts, two with; every loss that a router has.
EXPERTS = spec.Decoder(
    layers=3,
    **SIZES,
    experts=4,
    expert_hidden=24,
    dense_layers=[0],
    balance=0.02,
    router_z=1e-3,
)
GPT2 = spec.GPT2(layers=2, width=32, heads=4, vocab=32, length=16)
VIT = spec.ViT(layers=2, width=32, heads=4, image=[16, 16], channels=1, patch=4, pool="mean")
ROWS = 16


class Digits(Classify):
    """MNIST-shaped images of two bright halves."""

    def model(self, spec: spec.TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        return MLP(spec.model, (28, 28), rngs, ModelOptions.from_spec(spec))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        label = rng.integers(0, 10, ROWS, np.int32)
        image = rng.integers(0, 256, (ROWS, 28, 28)) // 4
        image[np.arange(ROWS), 2 * label] += 128
        return {
            "image": image.astype(np.uint8),
            "label": label,
            "weight": np.ones(ROWS, np.float32),
        }


class Pictures(Classify):
    """Images of one bright row, for a ViT; its length of 16 divides."""

    def model(self, spec: spec.TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        return ViT(spec.model, rngs, ModelOptions.from_spec(spec))

    def batch(self, step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        label = rng.integers(0, 10, ROWS, np.int32)
        image = rng.integers(0, 128, (ROWS, 16, 16))
        image[np.arange(ROWS), label] += 127
        return {
            "image": image.astype(np.uint8),
            "label": label,
            "weight": np.ones(ROWS, np.float32),
        }


class Counting(NextToken):
    """Tokens that count up, from anywhere."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        start = np.random.default_rng(step).integers(0, 32, (ROWS, 1))
        tokens = ((start + np.arange(17)[None]) % 32).astype(np.int32)
        mask = np.ones((ROWS, 16), np.float32)
        mask[::3, 5:] = 0  # rows of unequal weight: a mean of means would show
        return {"tokens": tokens, "mask": mask, "weight": np.ones(ROWS, np.float32)}


class MeanLoss(Digits):
    """A user's task as short as it gets: the loss is a bare mean."""

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Array:
        result = super().loss(model, batch | {"weight": jax.numpy.ones_like(batch["weight"])}, rng)
        return result.sum / result.weight


MODELS: dict[type, tuple[spec.Model, float]] = {
    Counting: (DECODER, 1e-2),
    Pictures: (VIT, 3e-3),
    Digits: (spec.MLP(layers=2, width=32), 1e-3),
}


def train_spec(task: Any, **keys: Any) -> spec.TrainSpec:
    """A spec whose mesh is given by `mesh={"dp": 2}`; `optimizer` as keys too."""
    model, lr = next(defaults for kind, defaults in MODELS.items() if isinstance(task, kind))
    optimizer = spec.Optimizer(**{"lr": lr, **keys.pop("optimizer", {})})
    axes = spec.Mesh(**keys.pop("mesh", {}))
    return spec.TrainSpec(
        **{
            "task": "tests:Tiny",
            "batch": ROWS,
            "model": model,
            "mesh": axes,
            "optimizer": optimizer,
            **keys,
        }
    )


def build(task: Any, steps: int = 20, **keys: Any) -> Step:
    """A step on as many of the 8 devices as its mesh wants, not compiled yet."""
    train = train_spec(task, **keys)
    axes = (train.mesh.dp, train.mesh.fsdp, train.mesh.ep, train.mesh.mp)
    devices = jax.devices()[: math.prod(max(1, size) for size in axes)]
    return Step(task, train, mesh.build_mesh(train.mesh, devices), steps)


def compiled_step(task: Any, steps: int = 20, **keys: Any) -> Step:
    """A step that can train on the task's batches."""
    step = build(task, steps, **keys)
    step.compile_train(step.put_batch(task.batch(0)))
    return step


def run(task: Any, steps: int = 20, **keys: Any) -> tuple[np.ndarray, TrainState]:
    """Losses of `steps` steps from the start, and the state after them."""
    return train_steps(compiled_step(task, steps, **keys), task, steps)


def train_steps(step: Step, task: Any, steps: int) -> tuple[np.ndarray, TrainState]:
    """The same of a step that is compiled."""
    state, losses = step.init_state(), []
    for number in range(steps):
        state, metrics = step.train(state, step.put_batch(task.batch(number)))
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


def run_to_an_error(loop: Loop[Any]) -> None:
    """Run a loop that raises, and release its folder, whose claim a thread would renew."""
    try:
        loop.run()
    finally:
        loop.end_saves(process_continues=True)
