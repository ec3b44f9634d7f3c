"""Hugging Face's Flax ViT with a train step as in tutorials: value_and_grad, apply_gradients, jit.

It runs in the environment that benchmarks.vit builds, which does not have the trainer.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
from flax.training.train_state import TrainState

from benchmarks.side import serve_steps


@jax.jit
def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> Any:
        logits = state.apply_fn(
            pixel_values=batch["pixel_values"], params=params, train=True
        ).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    sizes, arrays = json.loads((folder / "sizes.json").read_text()), np.load(folder / "batch.npz")
    # The Flax model only supports square images, and takes one number.
    side = sizes["image"][0]
    dtype = jnp.bfloat16 if sizes["precision"] == "bf16" else jnp.float32
    model = transformers.FlaxViTForImageClassification.from_pretrained(
        folder / "weights", image_size=side, dtype=dtype
    )
    state = TrainState.create(
        apply_fn=model.__call__, params=model.params, tx=optax.adamw(sizes["lr"], weight_decay=0.0)
    )
    pixels = (arrays["images"].astype(np.float32) - 128) / 64
    batch = {
        "pixel_values": jnp.asarray(pixels.transpose(0, 3, 1, 2)),
        "labels": jnp.asarray(arrays["labels"]),
    }

    def run_step() -> float:
        nonlocal state
        state, loss = train_step(state, batch)
        jax.block_until_ready(state)
        return float(loss)

    serve_steps(
        f"transformers {transformers.__version__}, flax {flax.__version__}, jax {jax.__version__}",
        run_step,
    )


if __name__ == "__main__":
    main()
