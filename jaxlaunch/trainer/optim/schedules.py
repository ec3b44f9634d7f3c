"""The learning rate as a function of the step, by name, out of optax's schedules.

The first update uses the rate of step 0, as in torch and Hugging Face: with a warm-up from 0 it changes no parameter.
Where the run ends, at step `total_steps`, the rate is `final` × lr; it stays there.
"""

import jax.numpy as jnp
import optax

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.optim import user_optimizers
from jaxlaunch.trainer.spec import Optimizer
from jaxlaunch.trainer.spec.optimizer import is_own


def build(optimizer: Optimizer, total_steps: int) -> optax.Schedule:
    """The schedule step (int32, from 0) -> learning rate (float32): warm-up, then constant lr, then the decay.

    Or the one that a function of the user's makes. Raises SpecError when warm-up and decay do not fit in `total_steps`,
    or where that function makes none.
    """
    lr, schedule = optimizer.lr, optimizer.schedule
    if is_own(schedule.name):
        return user_optimizers.schedule(optimizer, total_steps)
    try:
        decay = schedule.decay_steps(total_steps)
    except ValueError as error:
        raise SpecError(f"train.optimizer.{error}; shorten one of them, or train longer") from None
    warmup = optax.linear_schedule(schedule.start * lr, lr, schedule.warmup)
    held = optax.constant_schedule(lr)
    joined = optax.join_schedules(
        [warmup, held, _descent(optimizer, decay)], [schedule.warmup, max(schedule.warmup, total_steps - decay)]
    )
    return lambda step: joined(jnp.asarray(step, jnp.float32))


def _descent(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """From lr to `final` × lr in `steps`; cosine is Loshchilov and Hutter 2017 (SGDR), equation 5, one half wave."""
    lr, final = optimizer.lr, optimizer.schedule.final or 0.0
    if steps == 0:
        return optax.constant_schedule(lr)
    shapes = {
        "linear": optax.linear_schedule(lr, final * lr, steps),
        "cosine": optax.cosine_decay_schedule(lr, steps, alpha=final),
        "exponential": optax.exponential_decay(lr, steps, final, end_value=final * lr),
    }
    name = optimizer.schedule.name
    return shapes[(optimizer.schedule.shape or "cosine") if name == "wsd" else name]
