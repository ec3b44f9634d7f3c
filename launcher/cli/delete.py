"""`launcher delete`: a job, its pods and all it owns."""

from __future__ import annotations

import sys

import click

from launcher import delete, duration, stop, submit
from launcher.cli import options
from launcher.cluster import Cluster
from launcher.errors import UserError
from launcher.kinds import JOBSETS

_MARGIN_S = 120.0  # beyond the grace that pods have


@click.command("delete")
@click.argument("name")
@options.place()
@click.option("-y", "--yes", is_flag=True, help="Do not ask before a job is deleted that is not over.")
@click.option("--no-wait", is_flag=True, help="Do not wait until its pods are gone.")
def delete_command(name: str, namespace: str | None, context: str | None, yes: bool, no_wait: bool) -> int:
    """Delete job NAME.

    Its pods save and end first. What it wrote to volumes and buckets stays.
    """
    cluster = Cluster.connect(context)
    jobset = stop.own(cluster, name, namespace or cluster.namespace)
    if not yes and stop.has_finished(jobset) is None and not stop.is_stopped(cluster, jobset):
        _ask(name)
    for line in delete.delete(cluster, jobset):
        click.echo(line)
    limit_s = stop.grace_s(jobset) + _MARGIN_S
    if no_wait or submit.gone(cluster, JOBSETS, dict(jobset), limit_s):
        return 0
    text = f"its pods are not gone after {duration.text(limit_s)}; `launcher explain {name}` says why"
    options.say(text)
    return options.WAITED_TOO_LONG


def _ask(name: str) -> None:
    """Raises UserError unless a person says yes."""
    if not sys.stdin.isatty():
        raise UserError(f"Job {name} is not over, and nobody is here to be asked.", "--yes deletes it all the same.")
    click.confirm(f"Job {name} is not over. Delete it?", abort=True, err=True)
