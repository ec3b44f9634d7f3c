"""The frozen model that a training compares itself with: the one that it began from.

A second copy of its parameters, which no checkpoint holds; of adapters none, for without them the model is what it was.
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxlaunch.trainer.adapters.kernel import FrozenKernel
from jaxlaunch.trainer.errors import SpecError

NAME = "reference"  # the attribute of the model that holds it
PREFIX = f"{NAME}."  # of its parameters' names


def put(model: nnx.Module, made: nnx.Module) -> None:
    """Gives `model` the reference `made`. Raises SpecError for a model that uses the name itself."""
    if hasattr(model, NAME):
        raise SpecError(f"{type(model).__name__} has an attribute {NAME}, where its frozen copy is kept; rename it")
    setattr(model, NAME, made)


def of(model: nnx.Module) -> Any:
    """The reference of `model`, as in evaluation: its frozen copy, or itself without its adapters."""
    found: Any = getattr(model, NAME, None)
    if found is None:
        graph, arrays = nnx.split(model)
        found = nnx.merge(graph, arrays)  # another object of the same arrays: the model's own adapters stay on
        for _, module in nnx.iter_modules(found):
            if isinstance(module, FrozenKernel):
                module.is_adapted = False
    found.eval()
    return found
