"""What a user might bring: tasks, a model, a map-style dataset. The tests' runs import it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.task import Loss
from jaxlaunch.trainer.tasks.classify import Classify, standardize_images


class Pairs:
    """A map-style dataset as PyTorch has them: pairs of an image and a label, without torch.

    If an example is `wrong`, images are floats and that one is NaN.
    """

    def __init__(self, count: int, wrong: int = -1) -> None:
        self._count, self._wrong = count, wrong

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        if index >= self._count:
            raise IndexError(index)
        label = index % 4
        image = np.full((8, 8), 20 * label, np.uint8)
        image[label] = 255
        if self._wrong < 0:
            return image, label
        return np.where(index == self._wrong, np.float32("nan"), image.astype(np.float32)), label


class Net(nnx.Module):
    """Two nnx layers with dropout between them that name no axes."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.last(self.drop(jax.nn.relu(self.first(images.reshape(len(images), -1)))))


class Convolution(linen.Module):
    """A flax.linen model with batch statistics and dropout."""

    width: int

    @linen.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = linen.Conv(self.width, (3, 3))(images[..., None])
        x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = linen.Dropout(0.1, deterministic=not train)(x.reshape(len(x), -1))
        return linen.Dense(10)(x)


class Split(Classify):
    """Classify with a custom model whose kernels are split over mp by path, and its own metric."""

    sharding = {r"first\.kernel": (None, "mp"), r"last\.kernel": ("mp", None)}

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Loss:
        loss = super().loss(model, batch, rng)
        threes = batch["weight"] * (batch["label"] == 3)
        hits = model(standardize_images(batch["image"])).argmax(-1) == batch["label"]
        return loss._replace(
            metrics=loss.metrics | {"accuracy_of_3": ((threes * hits).sum(), threes.sum())}
        )


class Line(nnx.Module):
    def __init__(self) -> None:
        self.slope = nnx.Param(jnp.zeros(()))


class Regression:
    """A task of its own from end to end: its data, batch, length, and a plain mean as its loss."""

    defaults = {
        "data": {"source": "array_record", "path": "unsaid", "eval_split": 0.25},
        "batch": 8,
        "epochs": 2,
        "optimizer": {"lr": 1e-9, "schedule": {"name": "constant"}},
        "eval": {"every": None},
        "checkpoint": {"every": None},
    }

    def model(self, spec: Any, rngs: nnx.Rngs) -> nnx.Module:
        return Line()

    def loss(self, model: Line, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        return jnp.square(model.slope[...] * batch["x"] - batch["y"]).mean()

    def source(self, spec: Any, split: Any) -> Any:
        return open_source(spec, split)

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        return {"x": raw["x"], "y": raw["y"]}

    def samples(self, model: Line, rng: jax.Array) -> dict[str, jax.Array]:
        return {"slope": model.slope[...], "noise": jax.random.uniform(rng, (2, 3))}

    def shown(self, samples: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        return {"noise": samples["noise"], "line": f"y = {samples['slope'].item():.1f} x"}


def momentum(learning_rate: optax.Schedule, decay: float = 0.9) -> optax.GradientTransformation:
    return optax.chain(optax.trace(decay), optax.scale_by_learning_rate(learning_rate))


def halving(lr: float, every: int) -> optax.Schedule:
    return lambda step: lr * 0.5 ** (step // every)


def a_list() -> list[int]:
    return []


def pairs() -> optax.Schedule:
    """Return a schedule of two rates."""
    return lambda step: jnp.stack([step, step])


def summed() -> optax.GradientTransformation:
    """Return updates that do not have the parameters' shapes."""
    return optax.stateless(lambda grads, params: jax.tree.map(jnp.sum, grads))


def forgetful() -> optax.GradientTransformation:
    """Return a transformation whose state changes its dtype."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()), lambda grads, state, params: (grads, jnp.int32(1))
    )


def raising() -> optax.GradientTransformation:
    """Return an update that looks for a missing parameter."""
    return optax.stateless(lambda grads, params: grads["nowhere"])
