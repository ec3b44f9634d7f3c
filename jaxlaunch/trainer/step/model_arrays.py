"""The arrays of an nnx model by name: the model is split once, and merged again inside each trace.

Outside of a trace the arrays are in flat dicts by name ("blocks.mlp.up"), the cheapest tree to call a step with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.adapters.lora import OWN
from jaxlaunch.trainer.parallel.sharding import Axes

State = Any  # nnx.State, a tree of nnx variables
Named = dict[str, Any]  # name -> array, or ShapeDtypeStruct


class ModelArrays:
    """The structure of `model`: `params` and `rest` describe its arrays by name, `axes` has their named axes."""

    def __init__(self, model: nnx.Module) -> None:
        self._graph, params, self._rngs, rest = _split(model)
        self.params, self.rest = _named(params), _named(rest)
        self.axes = _axes(params) | _axes(rest)
        self._params_tree, self._rest_tree = jax.tree.structure(params), jax.tree.structure(rest)

    def split(self, model: nnx.Module) -> tuple[Named, Named]:
        """The parameters of `model`, and what else it holds but random streams (BatchNorm's statistics, counters)."""
        _, params, _, rest = _split(model)
        return _named(params), _named(rest)

    def merge(self, params: Named, rest: Named, rng: Array) -> Any:
        """The model of these arrays. Its random streams start from `rng`, so a step draws the same when repeated."""
        return nnx.merge(
            self._graph,
            jax.tree.unflatten(self._params_tree, [params[name] for name in self.params]),
            _seeded(self._rngs, rng),
            jax.tree.unflatten(self._rest_tree, [rest[name] for name in self.rest]),
        )


def _split(model: nnx.Module) -> tuple[Any, State, State, State]:
    graph, *states = nnx.split(model, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
    params, rngs, _, rest = states
    return graph, params, rngs, rest


def _named(state: State) -> Named:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {_name(str(key.key) for key in path[:-1]): leaf for path, leaf in leaves}


def _name(path: Iterable[str]) -> str:
    """The dotted name of a parameter: one that adapters wrapped keeps that which it had."""
    *front, last = path
    return ".".join(front if last == OWN else [*front, last])


def _axes(state: State) -> dict[str, Axes | None]:
    """The named axes of each array: by our metadata `axes`, or by flax's own `nnx.with_partitioning`."""
    found: dict[str, Axes | None] = {}
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        axes = metadata.get("axes") or metadata.get("out_sharding")
        found[_name(map(str, path))] = tuple(axes) if axes else None
    return found


def _seeded(rngs: State, rng: Array) -> State:
    """The random streams, each with its own key from `rng` and count 0."""
    leaves, tree = jax.tree.flatten(rngs)
    keys = jax.random.split(rng, max(len(leaves), 1))
    fresh = [
        (key if leaf.shape == () else jax.random.split(key, leaf.shape))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=False)
    ]
    return jax.tree.unflatten(tree, fresh)
