"""The global mesh: axes dp, fsdp, mp over all devices of all processes, and which rows of a batch live here."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainer import spec
from trainer.contract import MESH_AXES
from trainer.errors import SpecError

BATCH_AXES = ("dp", "fsdp")  # the mesh axes that split a batch


def build(mesh: spec.Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh of the spec, each process's devices together; across slices, the dcn part of an axis is outermost.

    Axis types are Auto: `jax.make_mesh` defaults to Explicit, under which a ported model does not trace.
    Raises SpecError when the axes do not multiply to the devices.
    """
    near = sorted(jax.devices() if devices is None else devices, key=_place)
    try:
        sizes = mesh.resolve(len(near))
    except ValueError as error:
        raise SpecError(f"train.mesh: {error}") from None
    across = [mesh.dcn.get(axis, 1) for axis in ("dp", "fsdp", "mp")]
    for axis, size, count in zip(MESH_AXES, sizes, across, strict=True):
        if size % count:
            raise SpecError(f"train.mesh.dcn: {axis} = {count} does not divide {axis} = {size}")
    inside = [size // count for size, count in zip(sizes, across, strict=True)]
    grid = np.array(near).reshape(*across, *inside).transpose(0, 3, 1, 4, 2, 5).reshape(sizes)
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _place(device: jax.Device) -> tuple[int, int, int]:
    return (getattr(device, "slice_index", 0), device.process_index, device.id)


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """How the first dimension of a batch is split: over dp and fsdp, copied along mp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def rows(mesh: jax.sharding.Mesh, batch: int) -> range:
    """The rows of a global batch that this process's devices need; processes that share an mp group share rows.

    Raises SpecError when dp × fsdp does not divide `batch`, or when the rows are not contiguous.
    """
    shards = mesh.shape["dp"] * mesh.shape["fsdp"]
    if batch % shards:
        raise SpecError(f"train.batch = {batch} does not divide over dp × fsdp = {shards} devices")
    places = batch_sharding(mesh).addressable_devices_indices_map((batch,)).values()
    spans = sorted({index[0].indices(batch)[:2] for index in places if index is not None})
    for (_, stop), (start, _) in zip(spans, spans[1:], strict=False):
        if stop != start:
            raise SpecError(f"train.mesh: process {jax.process_index()} holds rows up to {stop} and from {start} on")
    return range(spans[0][0], spans[-1][1])
