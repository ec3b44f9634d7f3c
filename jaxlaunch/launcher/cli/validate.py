"""`launcher validate`: everything that is wrong with a job, or what it asks for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from jaxlaunch.contract import BATCH_AXES, MESH_AXES
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.job import checks
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import data_files, named_modules
from jaxlaunch.launcher.wording import count
from jaxlaunch.trainer.spec import said


@click.command("validate")
@options.job
@options.form("text", "json", "yaml")
def validate_command(job_file: Path, overrides: tuple[str, ...], form: str) -> None:
    """Check JOB_FILE, and show what it requests.

    The command needs no cluster and no accelerator. KEY=VALUE sets a key, as in train.steps=100. All errors are
    reported at once, each with its line; the exit code is then 2.
    """
    job = jobs.load(job_file, overrides)
    summary = summarize(job)
    if form in ("json", "yaml"):
        output.data(summary, form)
    else:
        folder = job_file.absolute().parent
        data = (f"data: {note}" for note in data_files.notes(job, folder))
        missing = (f"note: {note}" for note in named_modules.notes(job, folder))
        output.show(f"{job_file}: ok", *lines(job), *data, *missing)


def summarize(job: JobSpec) -> dict[str, Any]:
    """What a job asks for, as plain data."""
    summary: dict[str, Any] = {
        "name": job.name,
        "slices": job.slices,
        "hosts": job.hosts,
        "devices": job.devices,
        "processes": job.processes,
        "devices_per_process": job.devices_per_process,
        "accelerator": job.accelerator.type,
    }
    if job.spares or job.is_elastic:
        summary["spares"] = job.spares
        summary["fewer_hosts"] = [_on(job, hosts) for hosts in reversed(job.sizes) if hosts < job.hosts]
    if job.train is not None:
        sizes = dict(zip(MESH_AXES, job.train.mesh.resolve(job.devices), strict=True))
        summary["mesh"] = sizes
        summary["batch"] = job.train.batch
        summary["accumulate"] = job.train.accumulate
        summary["batch_per_device"] = job.train.batch // (
            math.prod(sizes[axis] for axis in BATCH_AXES) * job.train.accumulate
        )
    return summary


def _on(job: JobSpec, hosts: int) -> dict[str, Any]:
    """What a job that lost hosts has on fewer; where its task brings the batch, its mesh is all that is known."""
    devices, train = hosts * job.accelerator.devices_per_host, job.on_hosts(hosts)
    if train is None:
        return {"hosts": hosts, "devices": devices}
    mesh = train.mesh.resolve(devices)
    part = train.batch // (math.prod(mesh[: len(BATCH_AXES)]) * train.accumulate)
    of = {"accumulate": train.accumulate, "batch_per_device": part}
    return {"hosts": hosts, "devices": devices, "mesh": dict(zip(MESH_AXES, mesh, strict=True)), **of}


def _of_a_lost_host(job: JobSpec) -> list[str]:
    """What becomes of the job when it loses a host, of several."""
    if job.host_count == 1:
        return []
    if not job.replaces_hosts:
        why = ": a TPU slice is lost as a whole" if job.accelerator.platform == "tpu" else ""
        return [f"a lost host: all pods are replaced{why}"]
    spare = (
        f"{count(job.spares, 'spare')} {'takes' if job.spares == 1 else 'take'} its ranks, and " if job.spares else ""
    )
    first = f"a lost host: {spare}its pod alone is made again"
    sizes = [_on(job, hosts) for hosts in reversed(job.sizes) if hosts < job.hosts]
    if not sizes:
        return [first]
    rows = []
    for one in sizes:
        batch = f", {one['batch_per_device']} per device, accumulate {one['accumulate']}" if "mesh" in one else ""
        rows.append(f"  {count(one['hosts'], 'host')}: {said(one['mesh']) if 'mesh' in one else ''}{batch}")
    return [f"{first}; after timeouts.replace it continues with fewer:", *rows]


def lines(job: JobSpec) -> list[str]:
    """What a job asks for, for a reader."""
    asked = summarize(job)
    each = f"{count(job.processes, 'process')} of {count(job.devices_per_process, 'device')}"
    summary = [f"{job.name}: {checks.describe_devices(job)} of type {job.accelerator.type}, {each}"]
    if job.train is None:
        return [*summary, f"command: {job.command[0] if job.command else ''}", *_of_a_lost_host(job)]
    micro = f", in {asked['accumulate']} micro-batches" if job.train.accumulate > 1 else ""
    return [
        *summary,
        f"mesh: {said(asked['mesh'])}",
        f"batch: {asked['batch']} examples a step{micro}, {asked['batch_per_device']} per device",
        *_of_a_lost_host(job),
    ]
