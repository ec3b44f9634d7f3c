"""Schedule-free AdamW (Defazio et al. 2024, algorithm 1): trained at y, evaluated at x, the average of z.

optax.contrib.schedule_free weighs a step in the average by the rate of the next one, and takes b1 for what it was when
the state was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState

from jaxlaunch.trainer.optim.groups import Named

PyTree = Any


def schedule_free(
    rate: optax.Schedule,
    decay: float,
    mask: Callable[[Named], dict[str, bool]] | None,
    options: Mapping[str, Any],
) -> optax.GradientTransformation:
    """The transformation of y; its state is optax's, which holds z.

    The b1 of the state is that with which the parameters that go with it were made: a run that resumes under another
    one continues from the same x and z.
    """
    b1 = options["b1"]
    adam = optax.chain(
        optax.scale_by_rms(decay=options["b2"], eps=options["eps"], eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(decay, mask),
        optax.scale_by_learning_rate(rate),
    )

    def update(grads: Named, state: ScheduleFreeState, params: Named | None = None) -> tuple[Named, ScheduleFreeState]:
        assert params is not None, "the optimizer is always given its parameters"
        moves, after = adam.update(grads, state.base_optimizer_state, params)
        z = {name: leaf + moves[name] for name, leaf in state.z.items()}
        # One count for rate and weight: steps that fp16 skips count in the schedule alone.
        largest = jnp.maximum(state.max_lr, rate(state.base_optimizer_state[-1].count))
        total = state.weight_sum + largest**2
        share = jnp.where(total > 0, largest**2 / jnp.where(total > 0, total, 1.0), 0.0)
        x = {name: leaf + share * (z[name] - leaf) for name, leaf in _x(state, params).items()}
        updates = {name: b1 * leaf + (1.0 - b1) * z[name] - params[name] for name, leaf in x.items()}
        step = optax.safe_increment(state.step_count)
        return updates, ScheduleFreeState(jnp.float32(b1), total, step, largest, after, z)

    return optax.GradientTransformation(optax.contrib.schedule_free(adam, rate, b1).init, update)


def averaged(opt: PyTree, params: Named) -> Named | None:
    """The parameters that schedule-free evaluates, where `opt` is its state; None where no part of it is.

    The others are as they are. `opt` may hold one of optax's own states, of a transformation of the user's or of a
    group.
    """
    found = [each for each in jax.tree.leaves(opt, is_leaf=_is_free) if _is_free(each)]
    if not found:
        return None
    return {**params, **{name: leaf for each in found for name, leaf in _x(each, params).items()}}


def _x(state: ScheduleFreeState, params: Named) -> Named:
    """x = (y - (1 - b1) z) / b1 of the parameters y of this state."""
    return {name: (params[name] - (1.0 - state.b1) * z) / state.b1 for name, z in state.z.items()}


def _is_free(state: Any) -> bool:
    return isinstance(state, ScheduleFreeState)
