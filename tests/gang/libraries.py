"""Train models of flax.linen, Haiku and Hugging Face's Flax classes side by side in one task."""

from __future__ import annotations

import os
import sys
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxlaunch.trainer.models import custom
from jaxlaunch.trainer.task import Loss
from jaxlaunch.trainer.tasks.classify import Classify
from tests.gang.mine import Convolution

os.environ["USE_TORCH"] = "0"  # of transformers: torch stays unimported
# Before ours: transformers wants its own version of tokenizers.
sys.path.insert(0, os.environ["TORCH_LIBRARIES"])

from transformers.models.vit import modeling_flax_vit as theirs  # noqa: E402 (the path is set first)

sys.path.pop(0)


class ViT(linen.Module):
    """Return the logits of Hugging Face's ViT, which returns an object."""

    @linen.compact
    def __call__(self, images: jax.Array, deterministic: bool) -> jax.Array:
        small = {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        size = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
        module = theirs.FlaxViTForImageClassificationModule(
            theirs.ViTConfig(
                **small, **size, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0
            )
        )
        return module(images[..., None], deterministic=deterministic).logits


def haiku_mlp(images: jax.Array, is_training: bool) -> jax.Array:
    rows = images.reshape(len(images), -1)
    return hk.nets.MLP([16, 10])(
        rows, **({"dropout_rate": 0.1, "rng": hk.next_rng_key()} if is_training else {})
    )


class Models(nnx.Module):
    """One model of each library."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        image = jnp.zeros((1, 8, 8))
        self.linen = custom.Linen(Convolution(width=4), image, rngs=rngs)
        self.haiku = custom.Haiku(hk.transform(haiku_mlp), image, rngs=rngs)
        self.hugging_face = custom.Linen(ViT(), image, rngs=rngs)


class EachLibrary(Classify):
    """The sum of the models' losses: each is trained as if it were alone."""

    def model(self, spec: Any, rngs: nnx.Rngs) -> nnx.Module:
        # As a program that was copied here may: the trainer has joined before.
        jax.distributed.initialize()
        return Models(rngs)

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Loss:
        names = ("linen", "haiku", "hugging_face")
        losses = {name: Classify.loss(self, getattr(model, name), batch, rng) for name in names}
        metrics = {name: (loss.sum, loss.weight) for name, loss in losses.items()}
        metrics |= {f"{name}_accuracy": loss.metrics["accuracy"] for name, loss in losses.items()}
        return Loss(sum(loss.sum for loss in losses.values()), batch["weight"].sum(), metrics)
