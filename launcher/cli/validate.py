"""`launcher validate`: everything that is wrong with a job, or what it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import yaml

from launcher import job as jobs
from launcher import layout
from launcher.cli import options
from launcher.job import JobSpec
from launcher.wording import count
from trainer.contract import MESH_AXES


@click.command()
@options.job
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text", help="[default: text]")
def validate(job_file: Path, overrides: tuple[str, ...], output: str) -> None:
    """Check JOB, and say what it asks for.

    Needs no cluster and no accelerator. KEY=VALUE sets a key, as in train.steps=100. Everything that is wrong is said
    at once, with its line; the exit code is then 2.
    """
    job = jobs.load(job_file, overrides)
    summary = summarize(job)
    if output == "json":
        click.echo(json.dumps(summary, indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump(summary, sort_keys=False), nl=False)
    else:
        click.echo(f"{job_file}: ok")
        for line in lines(job):
            click.echo(line)


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
    if job.train is not None:
        dp, fsdp, mp = job.train.mesh.resolve(job.devices)
        summary["mesh"] = dict(zip(MESH_AXES, (dp, fsdp, mp), strict=True))
        summary["batch"] = job.train.batch
        summary["accumulate"] = job.train.accumulate
        summary["batch_per_device"] = job.train.batch // (dp * fsdp * job.train.accumulate)
    return summary


def lines(job: JobSpec) -> list[str]:
    """What a job asks for, for a reader."""
    asked = summarize(job)
    each = f"{count(job.processes, 'process')} of {count(job.devices_per_process, 'device')}"
    told = [f"{job.name}: {layout.devices(job)} of type {job.accelerator.type}, {each}"]
    if job.train is None:
        return [*told, f"command: {job.command[0] if job.command else ''}"]
    mesh = " × ".join(f"{axis} {size}" for axis, size in asked["mesh"].items())
    micro = f", in {asked['accumulate']} micro-batches" if job.train.accumulate > 1 else ""
    return [
        *told,
        f"mesh: {mesh}",
        f"batch: {asked['batch']} examples a step{micro}, {asked['batch_per_device']} per device",
    ]
