"""`launcher stop`: a job's pods save and end; the job stays, to be resumed."""

from __future__ import annotations

import sys

import click

from launcher import duration, stop
from launcher.cluster import Cluster
from launcher.errors import UserError
from launcher.kinds import JOBSETS

WAITED_TOO_LONG = 124
_MARGIN_S = 60.0  # beyond the grace that pods have


@click.command("stop")
@click.argument("name")
@click.option("-n", "--namespace", help="Where the job is. [default: the context's]")
@click.option("--context", help="A context of the kubeconfig. [default: its current one]")
@click.option("--no-wait", is_flag=True, help="Do not wait until its pods are gone.")
@click.option("--timeout", metavar="DURATION", help="How long to wait. [default: the job's grace and a minute]")
def stop_command(name: str, namespace: str | None, context: str | None, no_wait: bool, timeout: str | None) -> int:
    """Save and end job NAME.

    Its pods are told to save at their next step, and go. The job stays: `launcher submit` of the same file resumes it
    from what it saved, `launcher delete` removes it.
    """
    limit_s = _seconds(timeout)
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
        _say(str(gone.verdict["message"]))
        stop.remember(cluster, jobset, str(gone.verdict["message"]))
    if not gone.is_over:
        _say(f"its pods are not gone after {duration.text(limit_s)}; `launcher explain {name}` says why")
        return WAITED_TOO_LONG
    click.echo(f"{JOBSETS.titled(name)} stopped")
    return 0


def _say(text: str) -> None:
    print(f"launcher: {text}", file=sys.stderr, flush=True)


def _seconds(timeout: str | None) -> float | None:
    try:
        return None if timeout is None else duration.seconds(timeout)
    except ValueError:
        raise UserError(f"--timeout {timeout} is not a duration.", "write 90s, 10m, 12h or 3d.") from None
