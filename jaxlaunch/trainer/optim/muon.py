"""Muon (Jordan 2024): which parameters it has, and its update. What it does not have is AdamW's.

optax.contrib.muon corrects the averages for their start as Adam does, and gives Adam a Nesterov step; Jordan's does
neither, nor does torch.optim.Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonState

from jaxlaunch.trainer.optim import groups
from jaxlaunch.trainer.optim.groups import Axes, Named

Matrix = tuple[tuple[int, ...], tuple[int, ...]]  # the axes that are summed over, and those that are given
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's, of the iteration a X + b (X Xᵀ) X + c (X Xᵀ)² X


def muon(
    rate: optax.Schedule,
    decay: float,
    mask: Callable[[Named], dict[str, bool]] | None,
    axes: Axes,
    options: Mapping[str, Any],
) -> optax.GradientTransformation:
    """Muon for matrices between two layers, AdamW for the rest; under a mask only Muon's matrices decay."""

    def labels(params: Named) -> dict[str, str]:
        return {name: "adam" if muon_axes(name, leaf, axes) is None else "muon" for name, leaf in params.items()}

    of_muon = optax.chain(
        _orthogonalized(axes, options), optax.add_decayed_weights(decay), optax.scale_by_learning_rate(rate)
    )
    of_adam = optax.adamw(
        rate, options["b1"], options["b2"], options["eps"], weight_decay=decay if mask is None else 0.0
    )
    return optax.partition({"muon": of_muon, "adam": of_adam}, labels)


def muon_axes(name: str, leaf: Any, axes: Axes) -> Matrix | None:
    """Which axes of a parameter Muon sums over and which it gives; None: Adam has it.

    Layers that are stacked, and experts, are orthogonalized one by one, and so are query, key and value of one tensor.
    Embeddings, positions and heads (axes `vocab`, `classes`) are Adam's, as Jordan advises.
    """
    own_axes = axes.get(name)
    if isinstance(leaf, optax.MaskedNode) or not groups.is_matrix(name, leaf, axes):
        return None
    if own_axes is None:
        return ((0,), (1,)) if leaf.ndim == 2 else None
    first = leaf.ndim - len(own_axes)
    if {"vocab", "classes"}.intersection(own_axes) or own_axes == (None, "embed"):
        return None
    if len(own_axes) == 2:
        return ((first,), (first + 1,))
    used = [at for at, axis in enumerate(own_axes, first) if axis is not None and not axis.startswith("expert")]
    if len(used) < 2:
        return None
    cut = 1 if own_axes[used[0] - first] in ("embed", "rank") else -1
    return tuple(used[:cut]), tuple(used[cut:])


def _orthogonalized(axes: Axes, options: Mapping[str, Any]) -> optax.GradientTransformation:
    """The orthogonal matrices next to Nesterov's steps of the momentum, scaled by their shapes.

    Its state is optax's, which also holds a count and the coefficients.
    """
    beta, steps, eps = options["beta"], options["ns_steps"], options["eps"]

    def update(grads: Named, state: MuonState, params: Named | None = None) -> tuple[Named, MuonState]:
        momentum = optax.tree.update_moment(grads, state.mu, beta, 1)
        ahead = optax.tree.update_moment(grads, momentum, beta, 1)
        moves = {
            name: leaf
            if isinstance(leaf, optax.MaskedNode)
            else _of_matrices(leaf, muon_axes(name, leaf, axes), steps, eps, options["consistent_rms"])
            for name, leaf in ahead.items()
        }
        return moves, state._replace(count=optax.safe_increment(state.count), mu=momentum)

    return optax.GradientTransformation(optax.contrib.scale_by_muon(COEFFICIENTS).init, update)


def _of_matrices(leaf: jax.Array, at: Matrix | None, steps: int, eps: float, consistent_rms: float | None) -> jax.Array:
    """A parameter's step, each of its matrices for itself."""
    assert at is not None, "labels give Muon matrices alone"
    inputs, outputs = at
    order = tuple(axis for axis in range(leaf.ndim) if axis not in inputs + outputs) + inputs + outputs
    turned = leaf.transpose(order)
    fan_in, fan_out = (math.prod(leaf.shape[axis] for axis in each) for each in (inputs, outputs))
    found = _newton_schulz(turned.reshape(-1, fan_in, fan_out), steps, eps).reshape(turned.shape)
    back = tuple(order.index(axis) for axis in range(leaf.ndim))
    if consistent_rms is not None:
        return math.sqrt(max(fan_in, fan_out)) * consistent_rms * found.transpose(back)
    return math.sqrt(max(1.0, fan_out / fan_in)) * found.transpose(back)


def _newton_schulz(x: jax.Array, steps: int, eps: float) -> jax.Array:
    """Nearly U Vᵀ of each of a stack of matrices U S Vᵀ: singular values of 0.7 to 1.2."""
    if x.shape[-2] > x.shape[-1]:  # the smaller of X Xᵀ and Xᵀ X
        return _newton_schulz(x.mT, steps, eps).mT
    a, b, c = COEFFICIENTS
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x
