"""The global mesh of all devices with axes dp, fsdp, ep, mp, and the rows of a process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pydantic
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlaunch.contract import BATCH_AXES, MESH_AXES
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError, pydantic_message

Grid = np.ndarray[Any, Any]  # devices [dp, fsdp, ep, mp]
Across = tuple[int, ...]  # number of slices that each axis spans


def build_mesh(
    mesh: spec.Mesh,
    devices: Sequence[jax.Device] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> jax.sharding.Mesh:
    """Build the mesh of the spec. Across slices the dcn part of an axis is outermost.

    On TPU the axes follow the torus, mp first. Elsewhere the devices of a process are adjacent.
    Without dcn the axes are divided over the slices, beginning with the outermost. `note` is called
    with a sentence about this, and if the torus could not be followed. Axis types are Auto, because
    ported models do not trace with Explicit, the default of `jax.make_mesh`. Raises SpecError if
    the product of the axes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    try:
        sizes = mesh.resolve(len(devices))
    except ValueError as error:
        raise SpecError(f"train.mesh: {error}") from None
    across: Across = tuple(mesh.dcn.get(axis, 1) for axis in MESH_AXES)  # type: ignore[call-overload]
    for axis, size, count in zip(MESH_AXES, sizes, across, strict=True):
        if size % count:
            raise SpecError(f"train.mesh.dcn: {axis} = {count} does not divide {axis} = {size}")
    # JAX calls a host of GPUs a slice, but the processes already follow the hosts.
    slices = len(set(map(slice_index, devices))) if devices[0].platform == "tpu" else 1
    ways = [across] if mesh.dcn or slices == 1 else list(_slice_divisions(sizes, slices))
    across, grid = _lay_out(devices, sizes, ways, note)
    if not mesh.dcn and slices > 1:
        counts = zip(MESH_AXES, across, strict=True)
        parts = ", ".join(f"{axis}: {count}" for axis, count in counts if count > 1)
        note(
            f"train.mesh has no dcn: its axes are divided over the {slices} slices as dcn: "
            f"{{{parts}}} says"
        )
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _slice_divisions(sizes: Sequence[int], slices: int) -> Iterator[Across]:
    """Yield the ways to divide axes over slices, those with most outermost divisions first."""
    if not sizes:
        if slices == 1:
            yield ()
        return
    for count in range(math.gcd(sizes[0], slices), 0, -1):
        if sizes[0] % count == 0 and slices % count == 0:
            yield from ((count, *rest) for rest in _slice_divisions(sizes[1:], slices // count))


def _lay_out(
    devices: list[jax.Device],
    sizes: Sequence[int],
    ways: Sequence[Across],
    note: Callable[[str], None],
) -> tuple[Across, Grid]:
    """Return the first division over slices that follows the torus, or the first, and its grid."""
    if devices[0].platform == "tpu":
        reasons: list[str] = []
        for across in ways:
            grid = _torus_grid(devices, _sizes_per_slice(sizes, across), across, reasons.append)
            if grid is not None:
                return across, grid
        note(reasons[0])
    across, inside = ways[0], _sizes_per_slice(sizes, ways[0])
    near = np.array(
        sorted(devices, key=lambda device: (slice_index(device), device.process_index, device.id))
    )
    # Each pair is the dcn part of an axis and its remainder.
    order = [axis + part for axis in range(len(sizes)) for part in (0, len(sizes))]
    return across, near.reshape(*across, *inside).transpose(order).reshape(sizes)


def _sizes_per_slice(sizes: Sequence[int], across: Sequence[int]) -> list[int]:
    return [size // count for size, count in zip(sizes, across, strict=True)]


def resolve_mesh(mesh: Mapping[str, int] | spec.Mesh | jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return a JAX mesh unchanged, or build one from devices per axis. Raises SpecError."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    if isinstance(mesh, spec.Mesh):
        return build_mesh(mesh)
    return build_mesh(parse_axes(mesh, "load", {"fsdp": 4, "mp": 2}))


def parse_axes(mesh: Mapping[str, int], function: str, example: Mapping[str, int]) -> spec.Mesh:
    """Parse the `mesh` argument of a public function, devices per axis. Raises SpecError."""
    try:
        return spec.Mesh.model_validate(dict(mesh))
    except (pydantic.ValidationError, TypeError, ValueError) as error:
        why = "is not a dict"
        if isinstance(error, pydantic.ValidationError):
            why = pydantic_message(error.errors()[0])
        hint = f"give devices per axis, such as {example}"
        raise SpecError(f"jaxlaunch.{function}(mesh={mesh!r}): {why}; {hint}") from None


def slice_index(device: jax.Device) -> int:
    """Return the slice of a device, 0 on platforms without slices."""
    # Only devices of some platforms have this attribute, and JAX's type does not declare it.
    return getattr(device, "slice_index", 0)


def _torus_grid(
    devices: list[jax.Device],
    inside: Sequence[int],
    across: Sequence[int],
    note: Callable[[str], None],
) -> Grid | None:
    """Return TPU devices along the torus, or None; physical axes are split only if needed."""
    slices, granules = len(set(map(slice_index, devices))), math.prod(across)
    processes = {device.process_index for device in devices}
    make_grid: Callable[..., Grid] = partial(mesh_utils.create_device_mesh, inside, devices)
    if granules != 1 or slices != 1:
        of_processes = granules != slices and granules == len(processes)
        make_grid = partial(
            mesh_utils.create_hybrid_device_mesh,
            inside,
            across,
            devices,
            process_is_granule=of_processes,
        )
    reason = ""
    for is_split in (False, True):
        try:
            return make_grid(allow_split_physical_axes=is_split)
        except (AssertionError, AttributeError, NotImplementedError, ValueError) as error:
            # JAX raises these for missing devices and unusual shapes.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    note(
        "train.mesh does not follow the TPU's torus, its devices are in the order of their "
        f"processes: {reason[:200]}"
    )
    return None


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows over dp, fsdp and ep, replicated along mp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def count_shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Return the number of parts of a batch: dp × fsdp × ep."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def describe_shards(mesh: jax.sharding.Mesh) -> str:
    """Return text such as `dp × fsdp = 8`, with ep if it is larger than 1."""
    axes = " × ".join(axis for axis in BATCH_AXES if axis != "ep" or mesh.shape[axis] > 1)
    return f"{axes} = {count_shards(mesh)}"


def process_rows(mesh: jax.sharding.Mesh, batch: int, process: int | None = None) -> range:
    """Return the rows of a global batch that a process reads. An mp group shares its rows.

    A torus may give a process parts of the batch that are not contiguous. Processes then read
    contiguous rows in the order of their first parts, so that every row is read once, although at
    another position in the batch. Raises SpecError if dp × fsdp × ep does not divide `batch`, or if
    the parts of two processes partly overlap.
    """
    process = jax.process_index() if process is None else process
    parts = count_shards(mesh)
    if batch % parts:
        raise SpecError(
            f"train.batch = {batch} cannot be split evenly over {describe_shards(mesh)} devices"
        )
    indexes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    processes, size = indexes.reshape(-1, mesh.shape["mp"]), batch // parts
    parts_by_process = {
        int(rank): tuple(np.flatnonzero((processes == rank).any(1)).tolist())
        for rank in np.unique(processes)
    }
    own_parts = parts_by_process[process]
    if all(indexes[-1] - indexes[0] + 1 == len(indexes) for indexes in parts_by_process.values()):
        start = own_parts[0]
    else:
        groups = sorted(set(parts_by_process.values()))
        if sum(map(len, groups)) != parts:
            mine = ", ".join(map(str, own_parts))
            raise SpecError(
                f"train.mesh: process {process} holds the parts {mine} of the batch, which overlap "
                "with others'"
            )
        start = sum(map(len, groups[: groups.index(own_parts)]))
    return range(start * size, (start + len(own_parts)) * size)
