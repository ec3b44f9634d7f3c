"""Print the median step time of Hugging Face's Flax ViT in bf16 under a tutorial's jitted step."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import optax
import transformers
from flax.training.train_state import TrainState

from benchmarks import side
from benchmarks.vit_flax import train_step


def main() -> None:
    sizes = json.loads(sys.argv[1])
    config = transformers.ViTConfig(
        num_hidden_layers=sizes["layers"],
        hidden_size=sizes["width"],
        num_attention_heads=sizes["heads"],
        intermediate_size=4 * sizes["width"],
        # The Flax model only supports square images, and takes one number.
        image_size=sizes["image"][0],
        patch_size=sizes["patch"],
        num_labels=sizes["classes"],
    )
    model = transformers.FlaxViTForImageClassification(config, dtype=jnp.bfloat16)
    optimizer = optax.chain(
        optax.clip_by_global_norm(sizes["clip"]), optax.adamw(sizes["lr"], weight_decay=0.0)
    )
    state = TrainState.create(apply_fn=model.__call__, params=model.params, tx=optimizer)
    pixels_key, labels_key = jax.random.split(jax.random.key(0))
    batch = {
        "pixel_values": jax.random.normal(pixels_key, (sizes["batch"], 3, *sizes["image"])),
        "labels": jax.random.randint(labels_key, sizes["batch"], 0, sizes["classes"]),
    }

    def launch_step() -> jax.Array:
        nonlocal state
        state, loss = train_step(state, batch)
        return loss

    print(json.dumps(side.median_step_s(launch_step, jax.block_until_ready)))


if __name__ == "__main__":
    main()
