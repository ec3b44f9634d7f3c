"""Hugging Face's Flax ViT in bf16 under a tutorial's jitted step: the median seconds of a step, on stdout."""

from __future__ import annotations

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax
import transformers
from flax.training.train_state import TrainState

from benchmarks.vit_flax import train_step

WARM, STEPS = 3, 20


def main() -> None:
    sizes = json.loads(sys.argv[1])
    config = transformers.ViTConfig(
        num_hidden_layers=sizes["layers"],
        hidden_size=sizes["width"],
        num_attention_heads=sizes["heads"],
        intermediate_size=4 * sizes["width"],
        image_size=sizes["image"][0],  # one number: its Flax model knows only squares
        patch_size=sizes["patch"],
        num_labels=sizes["classes"],
    )
    model = transformers.FlaxViTForImageClassification(config, dtype=jnp.bfloat16)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    state = TrainState.create(apply_fn=model.__call__, params=model.params, tx=optimizer)
    pixels_key, labels_key = jax.random.split(jax.random.key(0))
    batch = {
        "pixel_values": jax.random.normal(pixels_key, (sizes["batch"], 3, *sizes["image"])),
        "labels": jax.random.randint(labels_key, sizes["batch"], 0, sizes["classes"]),
    }
    before, stamps = None, []
    for _ in range(WARM + STEPS):
        state, loss = train_step(state, batch)
        if before is not None:
            before.block_until_ready()
        before = loss
        stamps.append(time.perf_counter())
    took = stamps[WARM:]
    print(json.dumps(statistics.median([after - since for since, after in zip(took, took[1:], strict=False)])))


if __name__ == "__main__":
    main()
