"""The global mesh of all devices with axes dp, fsdp, ep, mp, and the rows that a process reads.

A job with several TPU slices has two kinds of links: fast ones inside a slice (ICI), and a network
between slices (DCN). As in JAX's hybrid meshes, each axis of size n is the product of its DCN size
and its ICI size. The DCN part is the outer one.
"""

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

# Devices [dp, fsdp, ep, mp].
Grid = np.ndarray[Any, Any]
# The number of slices that each axis spans.
DcnSizes = tuple[int, ...]


def build_mesh(
    mesh: spec.Mesh,
    devices: Sequence[jax.Device] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> jax.sharding.Mesh:
    """Build the mesh of the spec.

    On TPUs the axes follow the torus, mp first. On other platforms the devices of a process are
    adjacent. If the spec has no `dcn`, the outermost axes are divided over the slices; `note` is
    called with a sentence about this, and with one if the axes cannot follow the torus. Axis types
    are Auto, because ported models do not trace with Explicit, the default of `jax.make_mesh`.
    Raises SpecError if the product of the axes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    try:
        sizes = mesh.resolve(len(devices))
    except ValueError as error:
        raise SpecError(f"train.mesh: {error}") from None
    dcn_sizes: DcnSizes = tuple(mesh.dcn.get(axis, 1) for axis in MESH_AXES)  # type: ignore[call-overload]
    for axis, size, count in zip(MESH_AXES, sizes, dcn_sizes, strict=True):
        if size % count:
            raise SpecError(f"train.mesh.dcn: {axis} = {count} does not divide {axis} = {size}")
    # For GPUs JAX calls each host a slice. The order by processes already follows the hosts.
    slices = len(set(map(slice_index, devices))) if devices[0].platform == "tpu" else 1
    choices = [dcn_sizes]
    if not mesh.dcn and slices > 1:
        choices = list(_divide_slices(sizes, slices))
    dcn_sizes, grid = _arrange_devices(devices, sizes, choices, note)
    if not mesh.dcn and slices > 1:
        counts = zip(MESH_AXES, dcn_sizes, strict=True)
        parts = ", ".join(f"{axis}: {count}" for axis, count in counts if count > 1)
        note(
            f"train.mesh has no dcn: its axes are divided over the {slices} slices as dcn: "
            f"{{{parts}}} says"
        )
    return jax.sharding.Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _divide_slices(sizes: Sequence[int], slices: int) -> Iterator[DcnSizes]:
    """Yield the ways to divide axes over slices, those that divide the outermost most first."""
    if not sizes:
        if slices == 1:
            yield ()
        return
    for count in range(math.gcd(sizes[0], slices), 0, -1):
        if sizes[0] % count == 0 and slices % count == 0:
            yield from ((count, *rest) for rest in _divide_slices(sizes[1:], slices // count))


def _arrange_devices(
    devices: list[jax.Device],
    sizes: Sequence[int],
    choices: Sequence[DcnSizes],
    note: Callable[[str], None],
) -> tuple[DcnSizes, Grid]:
    """Return the first of the DCN sizes with which the axes follow the torus, and the grid.

    If there is none, the first choice is taken and the grid follows slices and processes.
    """
    if devices[0].platform == "tpu":
        reasons: list[str] = []
        for dcn_sizes in choices:
            ici_sizes = _ici_sizes(sizes, dcn_sizes)
            grid = _torus_grid(devices, ici_sizes, dcn_sizes, reasons.append)
            if grid is not None:
                return dcn_sizes, grid
        note(reasons[0])
    dcn_sizes, ici_sizes = choices[0], _ici_sizes(sizes, choices[0])
    sorted_devices = np.array(
        sorted(devices, key=lambda device: (slice_index(device), device.process_index, device.id))
    )
    # This puts the DCN part of each axis before its ICI part.
    order = [axis + part for axis in range(len(sizes)) for part in (0, len(sizes))]
    parts = sorted_devices.reshape(*dcn_sizes, *ici_sizes)
    return dcn_sizes, parts.transpose(order).reshape(sizes)


def _ici_sizes(sizes: Sequence[int], dcn_sizes: Sequence[int]) -> list[int]:
    return [size // count for size, count in zip(sizes, dcn_sizes, strict=True)]


def resolve_mesh(mesh: Mapping[str, int] | spec.Mesh | jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return a JAX mesh unchanged; build one from numbers of devices by axis. Raises SpecError."""
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh
    if isinstance(mesh, spec.Mesh):
        return build_mesh(mesh)
    return build_mesh(parse_axes(mesh, "load", {"fsdp": 4, "mp": 2}))


def parse_axes(mesh: Mapping[str, int], function: str, example: Mapping[str, int]) -> spec.Mesh:
    """Parse the argument `mesh` of jaxlaunch.FUNCTION. Raises SpecError with the `example`."""
    try:
        return spec.Mesh.model_validate(dict(mesh))
    except (pydantic.ValidationError, TypeError, ValueError) as error:
        reason = "is not a dict"
        if isinstance(error, pydantic.ValidationError):
            reason = pydantic_message(error.errors()[0])
        hint = f"give devices per axis, such as {example}"
        raise SpecError(f"jaxlaunch.{function}(mesh={mesh!r}): {reason}; {hint}") from None


def slice_index(device: jax.Device) -> int:
    """Return the slice of a device, 0 on platforms without slices."""
    # Not all platforms have this attribute, and JAX's type does not declare it.
    return getattr(device, "slice_index", 0)


def _torus_grid(
    devices: list[jax.Device],
    ici_sizes: Sequence[int],
    dcn_sizes: Sequence[int],
    note: Callable[[str], None],
) -> Grid | None:
    """Return TPU devices along the torus; None, with a note of the reason, if it is impossible.

    Physical axes are split only if needed.
    """
    slices, granules = len(set(map(slice_index, devices))), math.prod(dcn_sizes)
    processes = {device.process_index for device in devices}
    make_grid: Callable[..., Grid] = partial(mesh_utils.create_device_mesh, ici_sizes, devices)
    if granules != 1 or slices != 1:
        # The dcn of a job can also divide the processes of one slice.
        make_grid = partial(
            mesh_utils.create_hybrid_device_mesh,
            ici_sizes,
            dcn_sizes,
            devices,
            process_is_granule=granules != slices and granules == len(processes),
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
    """Return the rows of a global batch that a process reads.

    Processes that differ only in mp read the same rows. On a torus, the parts of the batch on the
    devices of one process may not be contiguous. The processes then read contiguous rows in the
    order of their first parts. Every row is still read once, but is at another position of the
    batch. Raises SpecError if dp × fsdp × ep does not divide `batch`, or if the parts of two
    processes overlap without being equal.
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
            listed = ", ".join(map(str, own_parts))
            raise SpecError(
                f"train.mesh: process {process} holds the parts {listed} of the batch, which "
                "overlap with others'"
            )
        start = sum(map(len, groups[: groups.index(own_parts)]))
    return range(start * size, (start + len(own_parts)) * size)
