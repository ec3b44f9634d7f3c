"""Models of flax.linen and of Haiku as users write them; jobs name them."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxlaunch.trainer.models import custom
from jaxlaunch.trainer.task import Loss
from jaxlaunch.trainer.tasks.classify import Classify
from tests.trainer import tiny


class CNN(linen.Module):
    """A convolution, its batch statistics, dropout; it sows an auxiliary loss."""

    width: int = 4
    dropout: float = 0.2

    @linen.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:  # [B, H, W] -> [B, 10]
        x = linen.Conv(self.width, (3, 3), strides=4)(images[..., None])
        x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = linen.Dropout(self.dropout, deterministic=not train)(x.reshape(len(x), -1))
        self.sow("losses", "size", jnp.square(x).mean())
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", None))
        return linen.Dense(10, kernel_init=init)(x)


class Listed(linen.Module):
    """The axes of its weights are given as a list."""

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ["embed", None])
        return linen.Dense(10, kernel_init=init)(images.reshape(len(images), -1))


class Normalized(linen.Module):
    """Batch statistics of the images themselves."""

    @linen.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(
            images.reshape(len(images), -1)
        )
        return linen.Dense(10)(x)


class Fickle(linen.Module):
    """It makes a variable only when it trains."""

    @linen.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        if train:
            self.variable("batch_stats", "late", jnp.zeros, ())
        self.variable("batch_stats", "early", jnp.zeros, ())
        return linen.Dense(10)(images.reshape(len(images), -1))


class Net(hk.Module):
    """Two layers, batch statistics, dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width

    def __call__(self, images: jax.Array, is_training: bool) -> jax.Array:
        x = hk.Linear(self.width)(images.reshape(len(images), -1))
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        x = hk.dropout(hk.next_rng_key(), 0.2 if is_training else 0.0, x)
        return hk.Linear(10)(x)


mlp = hk.transform(lambda images: hk.nets.MLP([8, 10])(images.reshape(len(images), -1)))


def linen_mlp(width: int) -> linen.Module:
    """A function in place of a class."""
    return linen.Sequential([lambda x: x.reshape(len(x), -1), linen.Dense(width), linen.Dense(10)])


class Images(Classify):
    """Classify with the batches of tiny.Digits, which have no source."""

    batch = tiny.Digits.batch

    def model(self, spec: Any, rngs: nnx.Rngs) -> nnx.Module:
        return custom.build_model(spec, spec.model, rngs, lambda: (jnp.zeros((1, 28, 28)),))


class Sowing(Images):
    """The auxiliary loss that the model sowed is added and reported."""

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Loss:
        loss = super().loss(model, batch, rng)
        (size,) = jax.tree.leaves(model.sown("losses"))
        return loss._replace(
            sum=loss.sum + 0.1 * size * loss.weight,
            metrics=loss.metrics | {"size": (size * loss.weight, loss.weight)},
        )
