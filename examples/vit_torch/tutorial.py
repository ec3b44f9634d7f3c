"""The tutorial's program: Hugging Face's Flax ViT, a torch DataLoader and one jitted step.

It runs as it is typed, under `command:`, but for two changes. Worker processes are spawned: JAX has
threads, which a fork does not copy, and the default of a DataLoader on Linux is to fork. That needs
`main()` behind a guard. And `jaxlaunch.report` tells the agent the step, so that a hang is noticed.
Sizes are arguments, to try it on a CPU. It needs transformers < 5, the last with Flax, and torch.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import optax
from fake_images import FakeDataset
from flax.training.train_state import TrainState
from torch.utils.data import DataLoader
from transformers import FlaxViTForImageClassification, ViTConfig

import jaxlaunch


@jax.jit
def train_step(state: TrainState, images: Any, labels: Any) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(pixel_values=images, params=params, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main() -> None:
    sizes = argparse.ArgumentParser()
    for name, value in {
        "steps": 50,
        "batch": 128,
        "workers": 8,
        "side": 224,
        "layers": 12,
        "width": 768,
    }.items():
        sizes.add_argument(f"--{name}", type=int, default=value)
    options = sizes.parse_args()

    start = "spawn" if options.workers else None
    data = DataLoader(
        FakeDataset(side=options.side),
        options.batch,
        num_workers=options.workers,
        multiprocessing_context=start,
    )
    config = ViTConfig(
        image_size=options.side,
        num_hidden_layers=options.layers,
        hidden_size=options.width,
        num_attention_heads=options.width // 64,
        intermediate_size=4 * options.width,
        num_labels=1000,
    )
    model = FlaxViTForImageClassification(config, seed=0)
    state = TrainState.create(apply_fn=model.__call__, params=model.params, tx=optax.adamw(1e-4))

    seconds, step_began = 0.0, time.perf_counter()
    for step, (images, labels) in enumerate(data, 1):
        state, loss = train_step(state, images.numpy(), labels[:, 0].numpy())
        jaxlaunch.report(step=step, loss=float(loss))
        now = time.perf_counter()
        if step > 2:  # the first ones compile and fill the loader
            seconds += now - step_began
        step_began = now
        if step == options.steps:
            break
    print(
        f"step {step}: loss {loss:.4f}, {seconds / max(step - 2, 1) * 1e3:.0f} ms a step",
        flush=True,
    )


if __name__ == "__main__":
    main()
