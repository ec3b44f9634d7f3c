"""`launcher list`: a table of the jobs, one row each."""

from __future__ import annotations

from collections.abc import Sequence

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cluster.client import Cluster
from jaxlaunch.launcher.kube.objects import age
from jaxlaunch.launcher.status import collect
from jaxlaunch.launcher.status.job_status import OVER, JobStatus, status_of

_NODES = 3  # shown in a wide row


@click.command("list")
@options.place("The namespace to list. [default: the context's]")
@click.option("-A", "--all-namespaces", is_flag=True, help="List all namespaces.")
@options.screen_form("The form of the output; wide has more columns.")
def list_command(namespace: str | None, all_namespaces: bool, context: str | None, form: str | None) -> None:
    """List the jobs that launcher submitted."""
    cluster = Cluster.connect(context, output.say)
    where = None if all_namespaces else namespace or cluster.namespace
    found = collect.snapshots(cluster, where)
    for why in dict.fromkeys(why for seen in found for why in seen.unread):
        output.say(why)
    jobs = [status_of(seen) for seen in found]
    if form in ("json", "yaml"):
        return output.data([job.to_json() for job in jobs], form)
    if not jobs:
        return output.say(f"no jobs in {'any namespace' if where is None else f'namespace {where}'}")
    output.show(*table(jobs, all_namespaces, form == "wide"))


def table(jobs: Sequence[JobStatus], with_namespace: bool, is_wide: bool) -> list[str]:
    """The rows under their headings."""
    heads = ["NAME", "STATE", "HOSTS", "STEP", "RESTARTS", "AGE"]
    rows = [_row(job) for job in jobs]
    if is_wide:
        heads += ["PHASE", "CHECKPOINT", "GOODPUT", "QUEUE", "NODES"]
        rows = [[*row, *_more(job)] for row, job in zip(rows, jobs, strict=True)]
    if with_namespace:
        heads = ["NAMESPACE", *heads]
        rows = [[job.namespace, *row] for row, job in zip(rows, jobs, strict=True)]
    return output.columns([heads, *rows])


def _row(job: JobStatus) -> list[str]:
    of = "" if job.steps is None else f"/{job.steps}"
    step = "-" if job.step is None else f"{job.step}{of}"
    ready = "" if job.state in OVER else f"{'?' if job.ready is None else job.ready}/"  # none is needed any more
    return [job.name, job.state.value, f"{ready}{job.hosts}", step, str(job.restarts.total), age(job.age_s)]


def _more(job: JobStatus) -> list[str]:
    named = ",".join(job.nodes[:_NODES]) + (f" +{len(job.nodes) - _NODES}" if len(job.nodes) > _NODES else "")
    return [
        job.phase or "-",
        "-" if job.committed is None else str(job.committed),
        "-" if job.goodput is None else f"{job.goodput:.1%}",
        job.queue or "-",
        named or "-",
    ]
