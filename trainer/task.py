"""What a task is: a model, its loss, its examples. The one seam a user's training code meets."""

from __future__ import annotations

import importlib
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from flax import nnx
from jax import Array

from trainer.data.source import Source
from trainer.errors import SpecError
from trainer.spec import TrainSpec

Split = Literal["train", "eval"]


class Loss(NamedTuple):
    """Sums, not means, so that micro-batches and devices add up to one global mean. Float32 scalars."""

    sum: Array
    weight: Array  # what the sum is divided by: examples, targets
    metrics: dict[str, tuple[Array, Array]] = {}  # name -> (sum, weight)


class Task(Protocol):
    """A class built without arguments.

    It may have two class attributes: `defaults`, a mapping merged below the user's train block; and `sharding`, path
    rules for a model that does not name its axes: {r".*kernel": ("embed", "hidden")}, a pattern for the whole name of a
    parameter -> a logical or mesh axis, or None, for each of its last dimensions.
    """

    def model(self, spec: TrainSpec, rngs: nnx.Rngs, /) -> nnx.Module:
        """A new model; traced under jit, so no host ever holds its weights."""

    def loss(self, model: Any, batch: dict[str, Array], rng: Array, /) -> Loss | Array:
        """The loss of a batch, whose `weight` [B] is 0 on padded rows. A bare scalar is a mean, 1 per example.

        The model's parameters are in the compute dtype of `spec.precision`; the batch is as `example` made it.
        """

    def source(self, spec: TrainSpec, split: Split, /) -> Source | None:
        """Random access to the raw records of a split; None when there is no such split."""

    def example(self, raw: dict[str, Any], /) -> dict[str, np.ndarray[Any, Any]]:
        """One raw record as arrays of fixed shapes."""


def load(path: str) -> Any:
    """The object that `module:Name` names. Raises SpecError, saying why, when it does not import."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        raise SpecError(f"{path}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise SpecError(f"{path}: {module_name} has no {name!r}. It defines {_public(module)}.")
        found = getattr(found, part)
    return found


def _public(module: Any) -> str:
    names = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return ", ".join(sorted(names)) or "nothing"
