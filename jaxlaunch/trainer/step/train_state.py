"""The state of a training, and where each of its arrays and each batch lies on the mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.contract import BATCH_AXES
from jaxlaunch.trainer.optim import optimizers, schedule_free
from jaxlaunch.trainer.optim.loss_scale import LossScale
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel import sharding
from jaxlaunch.trainer.parallel.sharding import Axes
from jaxlaunch.trainer.step.model_arrays import Named

Batch = Mapping[str, Any]


class TrainState(NamedTuple):
    """What a run carries from step to step, in flat dicts by parameter name. Donated to every train step.

    `opt` and `ema` are of the parameters that are trained, not of frozen ones. With adapters `params` are both: what is
    frozen is the model.
    """

    step: Any  # int32 scalar: optimizer steps that are complete
    params: Named
    opt: Any  # optax's state
    ema: Named | None  # float32 moving average, also of the statistics in `rest`
    rest: Named  # other arrays of the model: BatchNorm's statistics
    scale: LossScale | None = None  # under float16

    def evaluated_params(self) -> Named:
        """Return the parameters that evaluation uses: an average of them where there is one."""
        if self.ema is not None:
            return {name: self.ema.get(name, param) for name, param in self.params.items()}
        averaged = schedule_free.averaged(self.opt, self.params)
        return self.params if averaged is None else averaged

    def evaluated_rest(self) -> Named:
        """Return the other arrays that evaluation uses: their average where there is one, in their own dtypes."""
        ema = self.ema or {}
        return {name: ema[name].astype(leaf.dtype) if name in ema else leaf for name, leaf in self.rest.items()}


def statistics(rest: Named) -> Named:
    """Return those of a model's other arrays that can be averaged: statistics, not counts and keys."""
    return {name: leaf for name, leaf in rest.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}


class Placement:
    """The sharding of everything that a step reads and writes on a mesh.

    Attributes:
        mesh: The devices.
        everywhere: The sharding of what every device holds whole.
        rows: The sharding of a batch [B, ...].
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.mesh = mesh
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.rows = meshes.batch_sharding(mesh)
        self._parts = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))

    def put(self, batch: Mapping[str, np.ndarray[Any, Any]], size: int) -> dict[str, Array]:
        """Return the rows of this process as global arrays of `size` rows."""
        return {
            name: jax.make_array_from_process_local_data(self.rows, rows, (size, *rows.shape[1:]))
            for name, rows in batch.items()
        }

    def abstract_batch(self, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a global batch, with their shardings."""
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.rows) for name, x in batch.items()}

    def abstract_state(
        self,
        shapes: TrainState,
        axes: Mapping[str, Axes | None],
        optimizer: optax.GradientTransformation,
        frozen: Collection[str],
    ) -> TrainState:
        """Return the shapes and dtypes of a state, with their shardings by the named axes of its arrays."""
        where = {
            name: sharding.state_sharding(name, leaf.shape, axes[name], self.mesh)
            for name, leaf in (shapes.params | shapes.rest).items()
        }
        trained = {name: leaf for name, leaf in shapes.params.items() if name not in frozen}
        shardings = TrainState(
            step=self.everywhere,
            params={name: where[name] for name in shapes.params},
            opt=optimizers.state_shardings(optimizer, trained, {name: where[name] for name in trained}),
            ema=None if shapes.ema is None else {name: where[name] for name in shapes.ema},
            rest={name: where[name] for name in shapes.rest},
            scale=jax.tree.map(lambda leaf: self.everywhere, shapes.scale),
        )
        abstract: TrainState = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings
        )
        return abstract

    def replicate(self, tree: Any) -> Any:
        """Constrain the arrays of a tree to be whole on every device."""
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, self.everywhere), tree)

    def split_steps(self, rows: Array) -> Array:
        """Turn [B, K, ...] into [K, B, ...]; no row leaves its device."""
        return self._hold_parts(rows.swapaxes(0, 1))

    def split_micro_batches(self, rows: Array, count: int) -> Array:
        """Turn [B, ...] into [count, B / count, ...]: row i goes to micro-batch i mod count and stays on its device."""
        return self._hold_parts(rows.reshape(rows.shape[0] // count, count, *rows.shape[1:]).swapaxes(0, 1))

    def split_devices(self, rows: Array) -> Array:
        """Turn [B, ...] into [devices, B / devices, ...]: the rows of each device."""
        parts: Array = rows.reshape(meshes.shards(self.mesh), -1, *rows.shape[1:])
        split: Array = jax.lax.with_sharding_constraint(parts, self.rows)
        return split

    def _hold_parts(self, parts: Array) -> Array:
        """Constrain [K, B, ...] to have B split over the devices as a batch is."""
        held: Array = jax.lax.with_sharding_constraint(parts, self._parts)
        return held
