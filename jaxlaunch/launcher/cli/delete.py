"""`launcher delete`: removes a job, its pods and the objects that it owns."""

from __future__ import annotations

import sys

import click

from jaxlaunch.launcher.cli import completions, options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs import dependents, ownership, stop
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import terminal_state
from jaxlaunch.launcher.wording import duration

_MARGIN_S = 120.0  # after the pods' grace period


@click.command("delete")
@click.argument("name", metavar="JOB_NAME", shell_complete=completions.runs)
@options.place()
@click.option("-y", "--yes", is_flag=True, help="Do not ask before deleting a job that has not ended.")
@click.option("--no-wait", is_flag=True, help="Do not wait until its pods are gone.")
def delete_command(name: str, namespace: str | None, context: str | None, yes: bool, no_wait: bool) -> int:
    """Delete job JOB_NAME.

    Its processes save first. What they wrote to volumes and buckets is not deleted.
    """
    cluster = Cluster.connect(context, output.say)
    jobset = ownership.own(cluster, name, namespace or cluster.namespace)
    if not yes and terminal_state(jobset) is None and not stop.is_stopped(cluster, jobset):
        _confirm(name)
    output.show(*dependents.delete_job(cluster, jobset))
    limit_s = stop.grace_s(jobset) + _MARGIN_S
    if no_wait or dependents.gone(cluster, JOBSETS, dict(jobset), limit_s):
        return 0
    namespace = jobset["metadata"]["namespace"]
    late = f"its pods are not gone after {duration(limit_s)}; see `launcher explain -n {namespace} {name}`"
    output.say(late)
    return options.WAITED_TOO_LONG


def _confirm(name: str) -> None:
    """Raises UserError unless a person says yes."""
    if not sys.stdin.isatty():
        raise UserError(f"Job {name} has not ended, and stdin is not a terminal.", "add --yes to delete it.")
    click.confirm(f"Job {name} has not ended. Delete it?", abort=True, err=True)
