"""`launcher render`: print the manifests of a job."""

from __future__ import annotations

from pathlib import Path

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.manifests import security
from jaxlaunch.launcher.manifests.jobset import prepare


@click.command("render")
@options.job_arguments
@click.option("-n", "--namespace", help="The namespace to run in. [default: the job's]")
@options.defaults_option("none")
@options.output_option("yaml", "json")
def render_command(
    job_file: Path,
    overrides: tuple[str, ...],
    namespace: str | None,
    defaults_file: Path | None,
    output_format: str,
) -> None:
    """Print JOB_FILE as Kubernetes manifests.

    The command does not contact a cluster. The same job, code and cluster defaults give the same
    text: `launcher render job.yaml | kubectl apply -f -`.
    """
    overrides = overrides if namespace is None else (*overrides, f"namespace={namespace}")
    cluster_defaults = defaults.load_defaults(defaults_file)
    file = jobs.read_job(job_file, overrides)
    manifests = prepare(file, cluster_defaults).manifests
    if output_format == "json":
        output.show_data({"apiVersion": "v1", "kind": "List", "items": manifests}, "json")
    else:
        output.show_documents(manifests)
    if file.spec.gang_secret:
        output.show_messages(security.secret_instruction(file.spec.name))
