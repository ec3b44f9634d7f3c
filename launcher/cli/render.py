"""`launcher render`: a job as the manifests that run it."""

from __future__ import annotations

from pathlib import Path

import click

from launcher import bundle, emit, jobset, profile
from launcher import job as jobs
from launcher.cli import options
from launcher.refusals import refusals


@click.command()
@options.job
@options.profile("none")
def render(job_file: Path, overrides: tuple[str, ...], profile_file: Path | None) -> None:
    """Print JOB as Kubernetes manifests.

    Asks no cluster. The same job, code and profile give the same text: `launcher render job.yaml | kubectl apply -f -`.
    """
    cluster = profile.load(profile_file)
    job = jobs.load(job_file, overrides, also=lambda job: refusals(job, cluster))
    archive = bundle.of(job, job_file.absolute().parent)
    click.echo(emit.documents(jobset.render(job, cluster, archive)), nl=False)
