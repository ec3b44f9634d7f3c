"""Optimizers and schedules of the user's, or of optax beside those that have a name: `module:Name`, a factory.

What it takes decides what it gets: `learning_rate` (or `lr`), the schedule; `weight_decay`; `mask`, which parameters
decay. Everything else is its `args`. What it returns is tried on shapes before anything is compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxlaunch.trainer import user_code
from jaxlaunch.trainer.errors import SpecError, first_line
from jaxlaunch.trainer.spec.optimizer import Link, Optimizer

Mask = Callable[[Any], Any]
RATES, MASKS = ("learning_rate", "lr"), ("mask", "weight_decay_mask")


def transformation(
    link: Link, rate: optax.Schedule, decay: float | None, mask: Mask | None
) -> optax.GradientTransformation:
    """What the factory of `link` makes; without a decay it has its own. Raises SpecError where it makes no
    transformation, or cannot be given these."""
    path = f"train.optimizer: {link.name}"
    make, takes = _factory(path, link.name)
    offered = {next((key for key in RATES if key in takes), ""): rate}
    offered |= {"weight_decay": decay} if "weight_decay" in takes and decay is not None else {}
    offered |= {next((key for key in MASKS if key in takes), ""): mask} if mask is not None else {}
    offered.pop("", None)
    if twice := [key for key in RATES if key in link.args and key in offered]:
        raise SpecError(f"{path} gets {twice[0]} of train.optimizer.lr and its schedule; take it out of args")
    found = _called(path, make, {**offered, **link.args})
    if isinstance(found, optax.GradientTransformation):
        return found
    raise SpecError(f"{path} makes {user_code.kind(found)}, not an optax.GradientTransformation (a pair init, update)")


def takes(link: Link) -> set[str]:
    """The names of the arguments that the factory of `link` takes. Raises SpecError."""
    return set(_factory(f"train.optimizer: {link.name}", link.name)[1])


def decays(link: Link, decay: float | None) -> bool:
    """Whether what the factory of `link` makes may decay, where it is offered `decay`."""
    return "weight_decay" in takes(link) and link.args.get("weight_decay", decay) != 0


def schedule(optimizer: Optimizer, total_steps: int) -> optax.Schedule:
    """The schedule step (int32, from 0) -> learning rate of the user's factory, called with lr and total_steps where
    it takes them. Raises SpecError where it makes none."""
    chosen = optimizer.schedule
    path = f"train.optimizer.schedule: {chosen.name}"
    make, names = _factory(path, chosen.name)
    given = {"lr": optimizer.lr, "total_steps": total_steps}
    found = _called(path, make, {key: value for key, value in given.items() if key in names} | chosen.args)
    if not callable(found):
        raise SpecError(f"{path} makes {user_code.kind(found)}, not a schedule: a function step -> learning rate")
    try:
        with jax.numpy_dtype_promotion("standard"):
            shape = jax.eval_shape(found, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # whatever a user's function raises
        raise SpecError(f"{path}: the schedule failed for a step under jit: {first_line(error)}") from error
    is_array = isinstance(shape, jax.ShapeDtypeStruct)
    if not is_array or shape.shape != () or not jnp.issubdtype(shape.dtype, jnp.number):
        raise SpecError(f"{path}: the schedule gives {_described(shape)} for a step, not a number")

    def rate(step: Any) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return jnp.asarray(found(jnp.asarray(step, jnp.int32)), jnp.float32)

    return rate


def check(whole: optax.GradientTransformation, params: Mapping[str, Any]) -> None:
    """Raises SpecError where a transformation with parts of the user's does not update these parameters.

    `params` are ShapeDtypeStructs by name; nothing is computed.
    """
    try:
        state = jax.eval_shape(whole.init, params)
        updates, after = jax.eval_shape(whole.update, params, state, params)
    except SpecError:
        raise
    except Exception as error:  # whatever a user's function raises
        raise SpecError(f"train.optimizer: the update failed: {first_line(error)}") from error
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, dict(params)):
        raise SpecError("train.optimizer: the update gives arrays of other shapes than the parameters")
    kinds = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (state, after)]
    if kinds[0] != kinds[1]:
        raise SpecError("train.optimizer: the update gives a state of other shapes or dtypes than init's")


def _factory(path: str, name: str) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    make = user_code.load(name)
    if not callable(make):
        raise SpecError(f"{path} is {user_code.kind(make)}, not a function that makes one")
    try:
        return make, inspect.signature(make).parameters
    except (TypeError, ValueError):  # a builtin without one
        return make, {}


def _called(path: str, make: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    try:
        return make(**given)
    except Exception as error:  # whatever a user's function raises
        raise SpecError(f"{path}({', '.join(given)}) failed: {first_line(error)}") from error


def _described(shape: Any) -> str:
    return (
        f"an array of shape {list(shape.shape)}" if isinstance(shape, jax.ShapeDtypeStruct) else user_code.kind(shape)
    )
