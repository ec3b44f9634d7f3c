"""`launcher stop`: a job's pods save and end; the job stays, to be resumed."""

from __future__ import annotations

import click

from launcher import duration, stop
from launcher.cli import options
from launcher.cluster import Cluster
from launcher.errors import UserError
from launcher.kinds import JOBSETS

_MARGIN_S = 60.0  # beyond the grace that pods have


@click.command("stop")
@click.argument("name")
@options.place()
@click.option("--no-wait", is_flag=True, help="Do not wait until its pods are gone.")
@click.option("--timeout", metavar="DURATION", help="How long to wait. [default: the job's grace and a minute]")
def stop_command(name: str, namespace: str | None, context: str | None, no_wait: bool, timeout: str | None) -> int:
    """Save and end job NAME.

    Its pods are told to save at their next step, and go. The job stays: `launcher submit` of the same file resumes it
    from what it saved, `launcher delete` removes it.
    """
    limit_s = options.seconds("--timeout", timeout)
    cluster = Cluster.connect(context)
    jobset = stop.own(cluster, name, namespace or cluster.namespace)
    if (ended := stop.has_finished(jobset)) is not None:
        raise UserError(f"Job {name} is {ended} already: there is nothing to stop.")
    leaving = stop.Leaving(cluster, jobset)
    stop.stop(cluster, jobset)
    if no_wait:
        click.echo(f"{JOBSETS.titled(name)} stopping")
        return 0
    if limit_s is None:
        limit_s = stop.grace_s(jobset) + _MARGIN_S
    gone = leaving.until_gone(limit_s)
    if gone.verdict is not None:
        options.say(str(gone.verdict["message"]))
        stop.remember(cluster, jobset, str(gone.verdict["message"]))
    if not gone.is_over:
        options.say(f"its pods are not gone after {duration.text(limit_s)}; `launcher explain {name}` says why")
        return options.WAITED_TOO_LONG
    click.echo(f"{JOBSETS.titled(name)} stopped")
    return 0
