"""`launcher stop`: saves a checkpoint and ends the pods of a job, which can be resumed."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cluster.client import Cluster
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.kube.kinds import JOBSETS
from jaxlaunch.launcher.kube.objects import terminal_state
from jaxlaunch.launcher.lifecycle import ownership, record, stop
from jaxlaunch.launcher.status import collect
from jaxlaunch.launcher.status.snapshot import Snapshot
from jaxlaunch.launcher.wording import duration, placed

_MARGIN_S = 60.0  # after the pods' grace period


@click.command("stop")
@click.argument("name", metavar="JOB_NAME")
@options.place()
@click.option("--no-wait", is_flag=True, help="Do not wait until its pods are gone.")
@click.option("--timeout", metavar="DURATION", help="How long to wait. [default: the job's grace and 1 minute]")
def stop_command(name: str, namespace: str | None, context: str | None, no_wait: bool, timeout: str | None) -> int:
    """Stop job JOB_NAME after it has saved.

    Its processes save at their next step, then its pods end. The JobSet remains, suspended: `launcher submit` of the
    same file resumes it from that checkpoint, `launcher delete` removes it.
    """
    limit_s = options.seconds("--timeout", timeout)
    cluster = Cluster.connect(context, output.say)
    jobset = ownership.own(cluster, name, namespace or cluster.namespace)
    if (ended := terminal_state(jobset)) is not None:
        raise UserError(f"Job {name} is already {ended}: there is nothing to stop.")
    seen = collect.snapshot(cluster, jobset["metadata"]["namespace"], name)
    assert isinstance(seen, Snapshot), "it was just read"
    leaving, words = stop.Leaving(cluster, jobset), record.LastWords(cluster, seen)
    stop.stop(cluster, jobset)
    if no_wait:
        record.write(cluster, seen, "stopped", output.say)
        output.show(f"{JOBSETS.titled(name)} stopping")
        return 0
    if limit_s is None:
        limit_s = stop.grace_s(jobset) + _MARGIN_S
    gone = leaving.until_gone(limit_s)
    seen = dataclasses.replace(seen, now=datetime.now(UTC), pods=gone.pods or seen.pods, records=words.heard())
    record.write(cluster, seen, "stopped", output.say)
    if seen.report.verdict is not None:
        output.say(seen.report.verdict.verdict.message)
    if not gone.is_over:
        late = f"its pods are not gone after {duration(limit_s)}; see `launcher explain {name}`"
        output.say(placed(late, jobset["metadata"]["namespace"]))
        return options.WAITED_TOO_LONG
    output.show(f"{JOBSETS.titled(name)} stopped")
    return 0
