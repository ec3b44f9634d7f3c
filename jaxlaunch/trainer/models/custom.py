"""Models of the user's, by module:Name: of flax.nnx, flax.linen or Haiku."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models import foreign
from jaxlaunch.trainer.spec import CustomModel, Loss, TrainSpec

Sample = Callable[[], tuple[Array, ...]]  # inputs of a model like those of a batch, of one example


def build(spec: TrainSpec, config: CustomModel, rngs: nnx.Rngs, sample: Sample | None = None) -> nnx.Module:
    """The model `Name(**other keys, rngs=rngs)`; of linen and Haiku, without rngs and made for the inputs `sample`.

    Raises SpecError for keys it does not take, and for remat and loss.
    """
    if spec.loss != Loss():
        raise SpecError(
            f"train.loss: {config.kind} is not a built-in model; add these terms in the loss of a task of your own"
        )
    if spec.remat != "none":
        raise SpecError(
            f"train.remat = {spec.remat}: {config.kind} is not a built-in model and rematerializes by itself; "
            "leave remat out"
        )
    make = user_code.load(config.kind)
    with user_code.placed(make):
        return _made(config, make, rngs, sample)


def _made(config: CustomModel, make: Any, rngs: nnx.Rngs, sample: Sample | None) -> nnx.Module:
    keys = config.model_extra or {}
    if user_code.is_haiku(make):
        return foreign.Haiku(foreign.of_haiku(make, keys), *_inputs(config, sample), rngs=rngs)
    if not isinstance(make, type) and (user_code.is_linen(make) or isinstance(make, nnx.Module)):
        what = f"train.model: {config.kind} is an object, {user_code.kind(make)}"
        raise SpecError(f"{what}; name its class, or a function that returns one")
    given = {**keys, "rngs": rngs} if not user_code.is_linen(make) and _takes_rngs(make) else dict(keys)
    try:
        model = make(**given)
    except TypeError as error:
        raise SpecError(f"train.model: {config.kind}({', '.join(given)}) failed: {error}") from error
    if user_code.is_linen(model):
        return foreign.Linen(model, *_inputs(config, sample), rngs=rngs)
    if not isinstance(model, nnx.Module):
        made = type(model).__name__
        raise SpecError(
            f"train.model: {config.kind} makes a {made}, not a flax.nnx.Module, a flax.linen.Module or a function that "
            "Haiku transformed"
        )
    return model


def _takes_rngs(make: Any) -> bool:
    """Whether `make` takes the random streams of nnx; a function that makes a linen module need not."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return True
    is_plain_function = inspect.isfunction(make) or inspect.isbuiltin(make)
    return not is_plain_function or any(each.name == "rngs" or each.kind is each.VAR_KEYWORD for each in parameters)


def _inputs(config: CustomModel, sample: Sample | None) -> tuple[Array, ...]:
    if sample is None:
        raise SpecError(
            f"train.model.kind = {config.kind} is made for a sample of its inputs, which custom.build was not given"
        )
    return sample()
