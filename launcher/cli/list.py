"""`launcher list`: a table of the jobs, one row each."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from launcher import emit, listing
from launcher.cluster import Cluster
from launcher.objects import age
from launcher.status import JobStatus, fold

_GAP = 3  # as kubectl's
_NODES = 3  # named in a wide row


@click.command("list")
@click.option("-n", "--namespace", help="Where to look. [default: the context's]")
@click.option("-A", "--all-namespaces", is_flag=True, help="Look everywhere.")
@click.option("--context", help="A context of the kubeconfig. [default: its current one]")
@click.option("-o", "--output", type=click.Choice(["json", "yaml", "wide"]), help="Another form, or more columns.")
def list_command(namespace: str | None, all_namespaces: bool, context: str | None, output: str | None) -> None:
    """List the jobs that launcher submitted."""
    cluster = Cluster.connect(context)
    where = None if all_namespaces else namespace or cluster.namespace
    jobs = [fold(seen) for seen in listing.gather(cluster, where)]
    if output == "json":
        return click.echo(json.dumps([job.to_json() for job in jobs], indent=2, ensure_ascii=False))
    if output == "yaml":
        return click.echo(emit.document(json.loads(json.dumps([job.to_json() for job in jobs]))), nl=False)
    if not jobs:
        return click.echo(f"No jobs in {'any namespace' if where is None else f'namespace {where}'}.", err=True)
    for line in table(jobs, all_namespaces, output == "wide"):
        click.echo(line)


def table(jobs: Sequence[JobStatus], with_namespace: bool, is_wide: bool) -> list[str]:
    """The rows under their heads, as kubectl lays them out."""
    heads = ["NAME", "STATE", "HOSTS", "STEP", "RESTARTS", "AGE"]
    rows = [_row(job) for job in jobs]
    if is_wide:
        heads += ["PHASE", "CHECKPOINT", "GOODPUT", "QUEUE", "NODES"]
        rows = [[*row, *_more(job)] for row, job in zip(rows, jobs, strict=True)]
    if with_namespace:
        heads = ["NAMESPACE", *heads]
        rows = [[job.namespace, *row] for row, job in zip(rows, jobs, strict=True)]
    widths = [max(map(len, column)) + _GAP for column in zip(heads, *rows, strict=True)]
    return [
        "".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [heads, *rows]
    ]


def _row(job: JobStatus) -> list[str]:
    of = "" if job.steps is None else f"/{job.steps}"
    step = "-" if job.step is None else f"{job.step}{of}"
    return [job.name, job.state.value, f"{job.ready}/{job.hosts}", step, str(job.restarts.total), age(job.age_s)]


def _more(job: JobStatus) -> list[str]:
    named = ",".join(job.nodes[:_NODES]) + (f" +{len(job.nodes) - _NODES}" if len(job.nodes) > _NODES else "")
    return [
        job.phase or "-",
        "-" if job.committed is None else str(job.committed),
        "-" if job.goodput is None else f"{job.goodput:.1%}",
        job.queue or "-",
        named or "-",
    ]
