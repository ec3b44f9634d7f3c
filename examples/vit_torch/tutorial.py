"""The tutorial's program: Hugging Face's Flax ViT, a torch DataLoader and one jitted step.

It runs under `command:` with three changes. Worker processes are spawned, because a DataLoader on
Linux forks by default, and a fork does not copy the threads of JAX; spawning needs a `main()`
behind a guard. `jaxlaunch.report` tells the agent the step, so that a hang is noticed. Sizes are
arguments, so that it can be tried on a CPU.

It needs torch, and a version of transformers before 5, which removed Flax.
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()

    loader = DataLoader(
        FakeDataset(side=options.side),
        options.batch,
        num_workers=options.workers,
        multiprocessing_context="spawn" if options.workers else None,
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

    seconds, step_started_at = 0.0, time.perf_counter()
    for step, (images, labels) in enumerate(loader, 1):
        state, loss = train_step(state, images.numpy(), labels[:, 0].numpy())
        jaxlaunch.report(step=step, loss=float(loss))
        now = time.perf_counter()
        # The first steps compile the program and fill the loader.
        if step > 2:
            seconds += now - step_started_at
        step_started_at = now
        if step == options.steps:
            break
    print(
        f"step {step}: loss {loss:.4f}, {seconds / max(step - 2, 1) * 1e3:.0f} ms a step",
        flush=True,
    )


if __name__ == "__main__":
    main()
