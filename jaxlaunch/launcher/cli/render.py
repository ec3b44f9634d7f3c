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
@click.option("--slurm", is_flag=True, help="Print a batch script for Slurm instead.")
@options.folder_options
def render_command(
    job_file: Path,
    overrides: tuple[str, ...],
    namespace: str | None,
    defaults_file: Path | None,
    output_format: str,
    slurm: bool,
    run_dir: Path | None,
    volumes: tuple[str, ...],
) -> None:
    """Print JOB_FILE as Kubernetes manifests, or as a batch script for Slurm.

    The command does not contact a cluster. The same job, code and cluster defaults give the same
    text: `launcher render job.yaml | kubectl apply -f -`.

    With --slurm, the job uses the folder and the Python of this command: `launcher render --slurm
    job.yaml | sbatch`. All nodes must see both at the same paths.
    """
    if slurm:
        _render_slurm(job_file, overrides, run_dir, volumes)
        return
    if run_dir is not None or volumes:
        raise click.UsageError("--run-dir and --volume need --slurm.")
    overrides = overrides if namespace is None else (*overrides, f"namespace={namespace}")
    cluster_defaults = defaults.load_defaults(defaults_file)
    file = jobs.read_job(job_file, overrides, may_have_roles=True)
    manifests = prepare(file, cluster_defaults).manifests
    if output_format == "json":
        output.show_data({"apiVersion": "v1", "kind": "List", "items": manifests}, "json")
    else:
        output.show_documents(manifests)
    if file.spec.gang_secret:
        output.show_messages(security.secret_instruction(file.name))


def _render_slurm(
    job_file: Path, overrides: tuple[str, ...], run_dir: Path | None, volumes: tuple[str, ...]
) -> None:
    # Imported here, because the manifests of Kubernetes need none of it.
    from jaxlaunch.launcher.local import run_folders, slurm
    from jaxlaunch.launcher.local.run import LocalRun, check_run_folder, refuse_own_folder

    job = jobs.load_job(job_file, overrides)
    folder = (run_dir or run_folders.RUNS_FOLDER / job.name).absolute()
    refuse_own_folder(job_file, folder)
    check_run_folder(job, folder, output.show_messages)
    words = options.folder_words(job_file, overrides, run_dir, volumes)
    mounts = options.parse_volumes(volumes)
    local = LocalRun(folder, job_file.absolute().parent, mounts, words=words)
    output.show_lines(*slurm.render_script(job, local).split("\n"))
