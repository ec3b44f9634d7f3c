"""Tasks, models and datasets that are wrong, each in one way, as users write them by mistake."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxlaunch.trainer.sources import synthetic
from jaxlaunch.trainer.task import Loss
from jaxlaunch.trainer.tasks.classify import Classify, standardize_images


class Net(nnx.Module):
    """Logits [B, 10] of images [B, 4, 4]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> Any:
        return self.out(images.reshape(len(images), -1))


class Pairs(Net):
    def __call__(self, images: jax.Array) -> Any:
        return super().__call__(images), images


class Flat(Net):
    def __call__(self, images: jax.Array) -> Any:
        return super().__call__(images).reshape(-1)


class Chosen(Net):
    def __call__(self, images: jax.Array) -> Any:
        return super().__call__(images).argmax(-1)


class Whole(Net):
    def __call__(self, images: jax.Array) -> Any:
        return jnp.ones((len(images), 10), jnp.int32)


class Forgetful(Net):
    def __call__(self, images: jax.Array) -> Any:
        super().__call__(images)


class Wide(Net):
    def __call__(self, images: jax.Array) -> Any:
        return self.out(jnp.ones((len(images), 17)))


class Late(Net):
    def __call__(self, images: jax.Array) -> Any:
        self.seen = nnx.BatchStat(jnp.zeros(()))
        return super().__call__(images)


class Narrowing(Net):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.seen = nnx.BatchStat(jnp.zeros((), jnp.float32))

    def __call__(self, images: jax.Array) -> Any:
        self.seen.set_value(jnp.zeros((), jnp.bfloat16))
        return super().__call__(images)


class NoCall(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(16, 10, rngs=rngs)


class TakesTwo(Net):
    def __call__(self, images: jax.Array, labels: jax.Array) -> Any:  # type: ignore[override]
        return super().__call__(images)


class NoParams(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs

    def __call__(self, images: jax.Array) -> Any:
        return jnp.zeros((len(images), 10))


class Holding(Net):
    """A model with one thing more."""

    held: Any = np.zeros(3)

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.table = self.held


class HoldingText(Holding):
    held = nnx.Param("text")


class HoldingWhole(Holding):
    held = nnx.Param(np.zeros(3, np.int32))


class Made(linen.Module):
    @linen.compact
    def __call__(self, images: jax.Array) -> Any:
        return linen.Dense(10)(images.reshape(len(images), -1))


made = Made()


def a_list() -> list[int]:
    return [1]


class Task(Classify):
    """Classify with Net."""

    defaults = {
        "model": {"kind": f"{__name__}:Net"},
        "data": {"source": "synthetic", "shape": [4, 4]},
    }


class NoModel(Task):
    def model(self, spec: Any, rngs: nnx.Rngs) -> Any:
        return None


class FunctionForAModel(Task):
    def model(self, spec: Any, rngs: nnx.Rngs) -> Any:
        return lambda images: images


class RowLosses(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return jnp.square(model(standardize_images(batch["image"]))).mean(-1)


class LossAndAux(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return jnp.square(model(standardize_images(batch["image"]))).mean(), {"size": 1.0}


class NoLoss(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        jnp.square(model(standardize_images(batch["image"]))).mean()


class ComplexLoss(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return jnp.fft.fft(model(standardize_images(batch["image"])).sum(-1))[0]


class CountForALoss(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return (model(standardize_images(batch["image"])).argmax(-1) != batch["label"]).sum()


class SumOfBooleans(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return super().loss(model, batch, rng)._replace(sum=jnp.array(True))


class WeightOfRows(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return super().loss(model, batch, rng)._replace(weight=batch["weight"])


class Metrics(Task):
    """Its metrics are `values`."""

    values: Any = {}

    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        loss: Loss = super().loss(model, batch, rng)
        return loss._replace(metrics=type(self).values)


class MetricsInAList(Metrics):
    values = [("hits", 1.0)]


class MetricAlone(Metrics):
    values = {"hits": jnp.float32(0.5)}


class MetricOfRows(Metrics):
    values = {"hits": (jnp.ones(8), 8.0)}


class MetricNamedLoss(Metrics):
    values = {"loss": (1.0, 1.0)}


class MetricNamedByANumber(Metrics):
    values = {5: (1.0, 1.0)}


class MetricWithoutAName(Metrics):
    values = {" ": (1.0, 1.0)}


class MetricOfTwoLines(Metrics):
    values = {"hits\nmisses": (1.0, 1.0)}


class MissingKey(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return jnp.square(model(batch["images"])).mean()


class BranchesOnAValue(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        mean = jnp.square(model(standardize_images(batch["image"]))).mean()
        return mean if mean > 0 else -mean


class CallsNumpy(Task):
    def loss(self, model: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        return np.asarray(model(standardize_images(batch["image"]))).mean()


class NoRng(Task):
    def loss(self, model: Any, batch: Any) -> Any:  # type: ignore[override]
        return 0.0


class ListExample(Task):
    def example(self, raw: dict[str, Any]) -> Any:
        return [raw["image"]]


class NoArrays(Task):
    def example(self, raw: dict[str, Any]) -> Any:
        return {}


class NumberedExample(Task):
    def example(self, raw: dict[str, Any]) -> Any:
        return {0: raw["image"]}


class OtherDefaults(Task):
    defaults = {"lr": 1}


class ListForASource(Task):
    def source(self, spec: Any, split: Any) -> Any:
        return [1, 2]


class OwnSource(Task):
    def source(self, spec: Any, split: Any) -> Any:
        return synthetic.Images(8, (4, 4), 10, first=0)


class TextExample(Task):
    def example(self, raw: dict[str, Any]) -> Any:
        return {"image": raw["image"], "label": "three"}


class WeightExample(Task):
    def example(self, raw: dict[str, Any]) -> Any:
        return {"image": raw["image"], "weight": np.float32(1)}


class Images:
    """A dataset of 16 images."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return np.zeros((4, 4), np.uint8), 0


class ThreeThings(Images):
    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), index)


class Raising(Images):
    def __getitem__(self, index: int) -> Any:
        return {}["label"]


class OneHot(Images):
    def __getitem__(self, index: int) -> Any:
        return np.zeros((4, 4), np.uint8), np.eye(10)[index % 10]


class HalfLength(Images):
    def __len__(self) -> int:
        return 16.5  # type: ignore[return-value]


class NegativeLength(Images):
    def __len__(self) -> int:
        return -1


class NoLength:
    def __getitem__(self, index: int) -> Any:
        return np.zeros((4, 4), np.uint8), 0


class Unbuildable(Images):
    def __init__(self) -> None:
        raise ValueError("no folder")
