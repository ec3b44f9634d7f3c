"""What a training is on fewer devices than its job has at most: a smaller mesh, and the same global batch. Pure."""

from __future__ import annotations

import math

from jaxlaunch.contract import BATCH_AXES, MESH_AXES
from jaxlaunch.trainer.spec.mesh import Mesh, said
from jaxlaunch.trainer.spec.model import CustomModel
from jaxlaunch.trainer.spec.train import TrainSpec
from jaxlaunch.trainer.spec.vision.models import ResNet


def mesh_on(mesh: Mesh, devices: int, full: int) -> Mesh:
    """The mesh of `full` devices on fewer: dp is smaller, or else fsdp. Raises ValueError where neither can be."""
    sizes = dict(zip(MESH_AXES, mesh.resolve(full), strict=True))
    for axis in ("dp", "fsdp"):
        others = math.prod(size for other, size in sizes.items() if other != axis)
        if devices % others == 0 and 0 < devices // others <= sizes[axis]:
            return mesh.model_copy(update=sizes | {axis: devices // others})
    raise ValueError(f"{said(sizes)} does not shrink to {devices} devices: neither dp nor fsdp alone can")


def on_devices(spec: TrainSpec, devices: int, full: int) -> TrainSpec:
    """The training of a job with `full` devices on fewer of them, of the same batches: more micro-batches keep each
    device's part as small as it was. Raises ValueError where the mesh or the batch cannot be divided so."""
    if devices == full:
        return spec
    mesh = mesh_on(spec.mesh, devices, full)
    before, after = _shards(spec.mesh, full), _shards(mesh, devices)
    if spec.batch % after:
        raise ValueError(f"batch {spec.batch} cannot be divided evenly over {after} devices in place of {before}")
    part, least = spec.batch // after, -(-spec.accumulate * before // after)
    fitting = (count for count in range(least, part + 1) if part % count == 0)
    if isinstance(spec.model, CustomModel | ResNet):  # batch norm sees a micro-batch: another size is another training
        if spec.batch_norm == "device":
            raise ValueError(
                "batch_norm: device sees each device's part of the batch, which grows; use global or frozen"
            )
        fitting = (count for count in (spec.accumulate,) if part % count == 0)
    accumulate = next(fitting, None)
    if accumulate is None:
        raise ValueError(
            f"batch {spec.batch} cannot be divided evenly over {after} devices × accumulate {spec.accumulate}"
        )
    return spec.model_copy(update={"mesh": mesh, "accumulate": accumulate})


def _shards(mesh: Mesh, devices: int) -> int:
    return math.prod(mesh.resolve(devices)[: len(BATCH_AXES)])
