"""The requests of a job: devices, processes, mesh and batch, as plain data. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NotRequired

# pydantic, which makes the schema of these classes, needs this class before Python 3.12.
from typing_extensions import TypedDict

from jaxlaunch.contract import BATCH_AXES, MESH_AXES
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.trainer.spec import TrainSpec

if TYPE_CHECKING:
    from jaxlaunch.launcher.job.load import JobFile


class BatchLayout(TypedDict):
    """The split of a batch over the devices."""

    # Devices by axis.
    mesh: Mapping[str, int]
    accumulate: int
    batch_per_device: int


class SmallerGang(TypedDict):
    """The job on fewer hosts. If the task determines the batch, only the devices are known."""

    hosts: int
    devices: int
    mesh: NotRequired[Mapping[str, int]]
    accumulate: NotRequired[int]
    batch_per_device: NotRequired[int]


class JobRequest(TypedDict):
    """The request of a job. A job with a `command` has no mesh and no batch."""

    name: str
    slices: int
    hosts: int
    devices: int
    processes: int
    devices_per_process: int
    accelerator: str
    spares: NotRequired[int]
    fewer_hosts: NotRequired[list[SmallerGang]]
    mesh: NotRequired[Mapping[str, int]]
    batch: NotRequired[int]
    accumulate: NotRequired[int]
    batch_per_device: NotRequired[int]
    # The same of each role by its name. The other fields are then those of the lead.
    roles: NotRequired[Mapping[str, Any]]


def summarize_file(file: JobFile) -> JobRequest:
    """Return the request of a job, and of each of its roles."""
    if not file.roles:
        return summarize_job(file.spec)
    roles = {role.name: summarize_job(role.file.spec) for role in file.roles}
    return {**summarize_job(file.spec), "name": file.name, "roles": roles}


def summarize_job(job: JobSpec) -> JobRequest:
    """Return the request of a job."""
    request: JobRequest = {
        "name": job.name,
        "slices": job.slices,
        "hosts": job.hosts,
        "devices": job.devices,
        "processes": job.processes,
        "devices_per_process": job.devices_per_process,
        "accelerator": job.accelerator.type,
    }
    if job.spares or job.is_elastic:
        request["spares"] = job.spares
        request["fewer_hosts"] = list_smaller_gangs(job)
    if job.train is not None:
        layout = _batch_layout(job.train, job.devices)
        request["mesh"] = layout["mesh"]
        request["batch"] = job.train.batch
        request["accumulate"] = layout["accumulate"]
        request["batch_per_device"] = layout["batch_per_device"]
    return request


def _batch_layout(train: TrainSpec, devices: int) -> BatchLayout:
    mesh = train.mesh.resolve(devices)
    parts = math.prod(mesh[: len(BATCH_AXES)]) * train.accumulate
    sizes = dict(zip(MESH_AXES, mesh, strict=True))
    per_device = train.batch // parts
    return {"mesh": sizes, "accumulate": train.accumulate, "batch_per_device": per_device}


def list_smaller_gangs(job: JobSpec) -> list[SmallerGang]:
    """Return the devices, mesh and batch of the job on each smaller number of hosts."""
    rows = list[SmallerGang]()
    for hosts in reversed([hosts for hosts in job.trainable_host_counts if hosts < job.hosts]):
        devices, train = hosts * job.accelerator.devices_per_host, job.train_on_hosts(hosts)
        row: SmallerGang = {"hosts": hosts, "devices": devices}
        rows.append(row if train is None else {**row, **_batch_layout(train, devices)})
    return rows
