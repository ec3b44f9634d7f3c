"""Learning rate schedules by name, and optimizers and schedules from factories.

A factory `module:Name` is a function of the user or of optax that returns an optimizer or a
schedule. Its signature decides what it receives: `learning_rate` or `lr` is the schedule,
`weight_decay` the decay, and `mask` the function that selects the parameters that decay. All other
arguments come from `args`. The result is traced with abstract arrays before the compilation.
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
from jaxlaunch.trainer.optim.transforms import Mask
from jaxlaunch.trainer.spec.optimizer import Link, Optimizer, is_user_path

RATE_PARAMETERS, MASK_PARAMETERS = ("learning_rate", "lr"), ("mask", "weight_decay_mask")


def build_schedule(optimizer: Optimizer, total_steps: int) -> optax.Schedule:
    """Build the schedule step (int32, from 0) -> learning rate (float32): warm-up, then decay.

    The first update uses the rate of step 0, as in torch and Hugging Face. If the warm-up starts at
    0, this update changes no parameter. From step `total_steps` on, the rate is `final` × lr. A
    user's factory can replace the schedule. Raises SpecError if warm-up and decay do not fit into
    `total_steps`, or if the user's factory fails.
    """
    lr, schedule = optimizer.lr, optimizer.schedule
    if is_user_path(schedule.name):
        return _user_schedule(optimizer, total_steps)
    try:
        decay = schedule.decay_steps(total_steps)
    except ValueError as error:
        raise SpecError(f"train.optimizer.{error}; shorten one of them, or train longer") from None
    warmup = optax.linear_schedule(schedule.start * lr, lr, schedule.warmup)
    constant = optax.constant_schedule(lr)
    joined = optax.join_schedules(
        [warmup, constant, _decay_schedule(optimizer, decay)],
        [schedule.warmup, max(schedule.warmup, total_steps - decay)],
    )
    return lambda step: joined(jnp.asarray(step, jnp.float32))


def _decay_schedule(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """Return the decay from lr to `final` × lr. Cosine: Loshchilov and Hutter 2017, equation 5."""
    lr, final = optimizer.lr, optimizer.schedule.final or 0.0
    if steps == 0:
        return optax.constant_schedule(lr)
    decays = {
        "linear": optax.linear_schedule(lr, final * lr, steps),
        "cosine": optax.cosine_decay_schedule(lr, steps, alpha=final),
        "exponential": optax.exponential_decay(lr, steps, final, end_value=final * lr),
    }
    name = optimizer.schedule.name
    return decays[(optimizer.schedule.shape or "cosine") if name == "wsd" else name]


def build_transformation(
    link: Link, rate: optax.Schedule, decay: float | None, mask: Mask
) -> optax.GradientTransformation:
    """Call the factory of `link` with the arguments that its signature has. Raises SpecError.

    For `decay` None the factory uses its own default.
    """
    path = f"train.optimizer: {link.name}"
    factory, parameters = _load_factory(path, link.name)
    values = [(RATE_PARAMETERS, rate), (("weight_decay",), decay), (MASK_PARAMETERS, mask)]
    arguments: dict[str, Any] = {}
    for keys, value in values:
        if value is not None and (key := next((key for key in keys if key in parameters), None)):
            arguments[key] = value
    if duplicates := [key for key in RATE_PARAMETERS if key in link.args and key in arguments]:
        raise SpecError(
            f"{path}: args sets {duplicates[0]}, which comes from train.optimizer.lr and its "
            "schedule; remove it from args"
        )
    transformation = _call_factory(path, factory, {**arguments, **link.args})
    if isinstance(transformation, optax.GradientTransformation):
        return transformation
    raise SpecError(
        f"{path} makes {user_code.describe_kind(transformation)}, not an "
        "optax.GradientTransformation (a pair init, update)"
    )


def factory_parameters(link: Link) -> set[str]:
    """Return the parameter names of the factory of `link`. Raises SpecError."""
    return set(_load_factory(f"train.optimizer: {link.name}", link.name)[1])


def may_decay(link: Link, decay: float | None) -> bool:
    """Return whether the factory of `link` may decay parameters if `decay` is passed to it."""
    return "weight_decay" in factory_parameters(link) and link.args.get("weight_decay", decay) != 0


def _user_schedule(optimizer: Optimizer, total_steps: int) -> optax.Schedule:
    """Return the schedule of a factory, called with `lr` and `total_steps` if it takes them."""
    config = optimizer.schedule
    path = f"train.optimizer.schedule: {config.name}"
    factory, parameters = _load_factory(path, config.name)
    values = {"lr": optimizer.lr, "total_steps": total_steps}
    arguments = {key: value for key, value in values.items() if key in parameters} | config.args
    schedule = _call_factory(path, factory, arguments)
    if not callable(schedule):
        raise SpecError(
            f"{path} makes {user_code.describe_kind(schedule)}, not a schedule: a function step -> "
            "learning rate"
        )
    try:
        with jax.numpy_dtype_promotion("standard"):
            shape = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        # User code may raise anything.
        raise SpecError(
            f"{path}: the schedule failed for a traced step: {first_line(error)}; correct it, with "
            "jnp.where in place of an `if` on the step"
        ) from error
    is_array = isinstance(shape, jax.ShapeDtypeStruct)
    if not is_array or shape.shape != () or not jnp.issubdtype(shape.dtype, jnp.number):
        description = user_code.describe_kind(shape)
        if is_array:
            description = f"an array of shape {list(shape.shape)}"
        raise SpecError(f"{path}: the schedule returns {description} for a step, not a number")

    def learning_rate(step: Any) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return jnp.asarray(schedule(jnp.asarray(step, jnp.int32)), jnp.float32)

    return learning_rate


def check_transformation(
    transformation: optax.GradientTransformation, params: Mapping[str, Any]
) -> None:
    """Raise SpecError if a transformation cannot update `params`, ShapeDtypeStructs by name."""
    try:
        state = jax.eval_shape(transformation.init, params)
        updates, next_state = jax.eval_shape(transformation.update, params, state, params)
    except SpecError:
        raise
    except Exception as error:
        # User code may raise anything.
        raise SpecError(f"train.optimizer: the update failed: {first_line(error)}") from error
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, dict(params)):
        raise SpecError(
            "train.optimizer: the update gives arrays of other shapes than the parameters"
        )
    state_types = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (state, next_state)
    ]
    if state_types[0] != state_types[1]:
        raise SpecError(
            "train.optimizer: the update returns a state with other shapes or dtypes than init; "
            "return the same ones"
        )


def _load_factory(
    path: str, name: str
) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    factory = user_code.load_object(name)
    if not callable(factory):
        raise SpecError(
            f"{path} is {user_code.describe_kind(factory)}, not a function that makes one"
        )
    try:
        return factory, inspect.signature(factory).parameters
    except (TypeError, ValueError):
        # Some builtins have no signature.
        return factory, {}


def _call_factory(path: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return factory(**arguments)
    except Exception as error:
        # User code may raise anything.
        raise SpecError(f"{path}({', '.join(arguments)}) failed: {first_line(error)}") from error
