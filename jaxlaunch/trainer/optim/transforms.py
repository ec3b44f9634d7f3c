"""Muon and schedule-free AdamW; their docstrings name the differences from optax.contrib."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState, ScheduleFreeState

PyTree = Any
# Parameter name -> array.
NamedArrays = dict[str, Any]
# Parameter name -> its named axes, or None.
Axes = Mapping[str, tuple[str | None, ...] | None]
# A function that selects the parameters that decay; None selects all.
Mask = Callable[[NamedArrays], dict[str, bool]] | None
# The axes of an array that are the inputs of a matrix, and those that are its outputs.
MatrixAxes = tuple[tuple[int, ...], tuple[int, ...]]
# Jordan's coefficients of the iteration a X + b (X Xᵀ) X + c (X Xᵀ)² X.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def is_matrix(name: str, leaf: Any, axes: Axes) -> bool:
    """Return whether a parameter is a matrix in each layer, and not a bias or a scale."""
    param_axes = axes.get(name)
    count = leaf.ndim if param_axes is None else len(param_axes)
    return count >= 2 and not name.rpartition(".")[2].endswith(("bias", "scale"))


def make_muon(
    rate: optax.Schedule, decay: float, mask: Mask, axes: Axes, options: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Return Muon (Jordan 2024) for matrices of hidden layers, and AdamW for all other parameters.

    With a mask, only Muon's matrices decay. Like Jordan's version and torch.optim.Muon, and unlike
    optax.contrib.muon, it has no bias correction for Muon's averages and no Nesterov step for Adam.
    """

    def label_parameters(params: NamedArrays) -> dict[str, str]:
        matrices = {name: muon_axes(name, leaf, axes) for name, leaf in params.items()}
        return {name: "adam" if matrices[name] is None else "muon" for name in params}

    muon = optax.chain(
        _orthogonalize_updates(axes, options),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(rate),
    )
    adam_decay = decay if mask is None else 0.0
    adam = optax.adamw(rate, options["b1"], options["b2"], options["eps"], weight_decay=adam_decay)
    return optax.partition({"muon": muon, "adam": adam}, label_parameters)


def muon_axes(name: str, leaf: Any, axes: Axes) -> MatrixAxes | None:
    """Return the input and output axes of a parameter for Muon; None if Adam optimizes it.

    Further axes are stacks of matrices, which are orthogonalized separately: layers, experts, and
    the query, key and value of one tensor. As Jordan advises, Adam optimizes embeddings, positions
    and output heads (axes `vocab`, `classes`).
    """
    param_axes = axes.get(name)
    if isinstance(leaf, optax.MaskedNode) or not is_matrix(name, leaf, axes):
        return None
    if param_axes is None:
        return ((0,), (1,)) if leaf.ndim == 2 else None
    layer_axes = leaf.ndim - len(param_axes)
    if {"vocab", "classes"}.intersection(param_axes) or param_axes == (None, "embed"):
        return None
    if len(param_axes) == 2:
        return ((layer_axes,), (layer_axes + 1,))
    matrix_axes = [
        index
        for index, axis in enumerate(param_axes, layer_axes)
        if axis is not None and not axis.startswith("expert")
    ]
    if len(matrix_axes) < 2:
        return None
    split = 1 if param_axes[matrix_axes[0] - layer_axes] in ("embed", "rank") else -1
    return tuple(matrix_axes[:split]), tuple(matrix_axes[split:])


def _orthogonalize_updates(axes: Axes, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """Return Muon's step: the orthogonal matrix nearest to the Nesterov step.

    The state is that of optax.contrib.scale_by_muon.
    """
    beta, steps, eps = options["beta"], options["ns_steps"], options["eps"]

    def update(
        grads: NamedArrays, state: MuonState, params: NamedArrays | None = None
    ) -> tuple[NamedArrays, MuonState]:
        momentum = optax.tree.update_moment(grads, state.mu, beta, 1)
        updates = optax.tree.update_moment(grads, momentum, beta, 1)
        for name, leaf in updates.items():
            if not isinstance(leaf, optax.MaskedNode):
                matrix_axes = muon_axes(name, leaf, axes)
                updates[name] = _orthogonal_step(
                    leaf, matrix_axes, steps, eps, options["consistent_rms"]
                )
        return updates, state._replace(count=optax.safe_increment(state.count), mu=momentum)

    return optax.GradientTransformation(optax.contrib.scale_by_muon(COEFFICIENTS).init, update)


def _orthogonal_step(
    leaf: jax.Array,
    matrix_axes: MatrixAxes | None,
    steps: int,
    eps: float,
    consistent_rms: float | None,
) -> jax.Array:
    """Return the orthogonal step of a parameter, computed for each of its matrices."""
    assert matrix_axes is not None, "labels give Muon only matrices"
    inputs, outputs = matrix_axes
    stack_axes = tuple(axis for axis in range(leaf.ndim) if axis not in inputs + outputs)
    order = stack_axes + inputs + outputs
    transposed = leaf.transpose(order)
    fan_in, fan_out = (math.prod(leaf.shape[axis] for axis in side) for side in (inputs, outputs))
    stack = _newton_schulz(transposed.reshape(-1, fan_in, fan_out), steps, eps)
    orthogonal = stack.reshape(transposed.shape).transpose(
        tuple(map(order.index, range(leaf.ndim)))
    )
    if consistent_rms is not None:
        return math.sqrt(max(fan_in, fan_out)) * consistent_rms * orthogonal
    return math.sqrt(max(1.0, fan_out / fan_in)) * orthogonal


def _newton_schulz(x: jax.Array, steps: int, eps: float) -> jax.Array:
    """Approximate U Vᵀ for each matrix U S Vᵀ of a stack, with singular values from 0.7 to 1.2."""
    if x.shape[-2] > x.shape[-1]:
        # The iteration then multiplies with the smaller one of X Xᵀ and Xᵀ X.
        return _newton_schulz(x.mT, steps, eps).mT
    a, b, c = COEFFICIENTS
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


def make_schedule_free(
    rate: optax.Schedule, decay: float, mask: Mask, options: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Return schedule-free AdamW (Defazio et al. 2024, algorithm 1).

    The parameters are y, at which the gradients are computed. Evaluation uses x, the average of the
    sequence z of the base optimizer.

    The state is optax's ScheduleFreeState, which holds z. Its b1 is the one with which y was
    computed, so that a run that resumes with another b1 continues from the same x and z. Unlike
    here, optax.contrib.schedule_free weights a step in the average by the rate of the next step,
    and keeps the b1 of the initial state.
    """
    b1 = options["b1"]
    b2, eps = options["b2"], options["eps"]
    adam = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(decay, mask),
        optax.scale_by_learning_rate(rate),
    )

    def update(
        grads: NamedArrays, state: ScheduleFreeState, params: NamedArrays | None = None
    ) -> tuple[NamedArrays, ScheduleFreeState]:
        assert params is not None, "the optimizer is always given its parameters"
        adam_updates, adam_state = adam.update(grads, state.base_optimizer_state, params)
        z = {name: leaf + adam_updates[name] for name, leaf in state.z.items()}
        # The weight uses the count of the rate, in which steps that fp16 skips count, too.
        max_lr = jnp.maximum(state.max_lr, rate(state.base_optimizer_state[-1].count))
        total = state.weight_sum + max_lr**2
        share = jnp.where(total > 0, max_lr**2 / jnp.where(total > 0, total, 1.0), 0.0)
        old_x, x = _average_params(state, params), {}
        for name, leaf in old_x.items():
            x[name] = leaf + share * (z[name] - leaf)
        updates = {
            name: b1 * leaf + (1.0 - b1) * z[name] - params[name] for name, leaf in x.items()
        }
        step = optax.safe_increment(state.step_count)
        return updates, ScheduleFreeState(jnp.float32(b1), total, step, max_lr, adam_state, z)

    return optax.GradientTransformation(optax.contrib.schedule_free(adam, rate, b1).init, update)


def averaged_params(opt: PyTree, params: NamedArrays) -> NamedArrays | None:
    """Return the parameters with schedule-free averages; None if `opt` has no such state."""

    def is_schedule_free(state: Any) -> bool:
        return isinstance(state, ScheduleFreeState)

    states = list(filter(is_schedule_free, jax.tree.leaves(opt, is_leaf=is_schedule_free)))
    if not states:
        return None
    averaged = dict(params)
    for state in states:
        averaged |= _average_params(state, params)
    return averaged


def _average_params(state: ScheduleFreeState, params: NamedArrays) -> NamedArrays:
    """Return the averages x = (y - (1 - b1) z) / b1 for parameters y."""
    return {name: (params[name] - (1.0 - state.b1) * z) / state.b1 for name, z in state.z.items()}
