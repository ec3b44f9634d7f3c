"""`launcher list`: a table of the runs of this machine and of the jobs of a cluster, one row each; a sweep has one."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from pathlib import Path

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cli.job_view import ClusterView, RunView
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus
from jaxlaunch.launcher.kubernetes import kubeconfig
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.objects import format_age
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.sweep.table import Table

HERE = "(here)"  # no namespace has such a name
_NODES = 3  # shown in a wide row

Rows = Sequence[tuple[str, Sequence[JobStatus]]]  # what each row is called, and what it is of


@click.command("list")
@click.argument("folder", metavar="[FOLDER]", default=run_folders.HOME, type=click.Path(path_type=Path))
@options.place("The namespace to list. [default: the context's]")
@click.option("-A", "--all-namespaces", is_flag=True, help="List all namespaces.")
@options.whose
@options.screen_form("The form of the output; wide has more columns.")
def list_command(
    folder: Path, namespace: str | None, all_namespaces: bool, context: str | None, where: str | None, form: str | None
) -> None:
    """List the runs here, and the jobs that launcher submitted.

    The runs are those below FOLDER, by default runs/, or those of the sweep with that name. A sweep below FOLDER has
    one row, with the number of its runs in each state; -o json and -o yaml have its runs one by one. With -n, -A,
    --context or --cluster, only the cluster's jobs are listed; with FOLDER or --local, only the runs.
    """
    if (sweep := run_folders.find_sweep(str(folder))) is not None and Table(sweep).of.get("cluster") is not None:
        return _show_sweep(Table(sweep), form)
    folder, is_given = sweep or folder, folder != run_folders.HOME
    asks_cluster = where == "cluster" or all_namespaces or namespace is not None or context is not None
    if asks_cluster and (where == "local" or is_given):
        raise UserError("A folder and --local select this machine; -n, -A, --context and --cluster select a cluster.")
    runs = [] if asks_cluster else run_folders.runs_in(folder)
    here = [RunView(run).status for run in runs]
    jobs, nothing, failed = (
        _cluster_jobs(namespace, all_namespaces, context, is_required=asks_cluster)
        if where != "local" and not is_given
        else ([], "", None)
    )
    listed = [*here, *jobs]
    if failed is not None and not listed:
        raise failed
    if listed or form in ("json", "yaml"):
        _show(listed, form, with_namespace=all_namespaces or bool(here and jobs), home=folder)
    else:
        here_too = "" if asks_cluster else f"There are no runs in the folder {folder}. "
        output.say(f"{here_too}{nothing}".rstrip())
    if failed is not None:
        raise failed


def _show(
    listed: Sequence[JobStatus], form: str | None, *, with_namespace: bool = False, home: Path | None = None
) -> None:
    if form in ("json", "yaml"):
        output.data([job.to_json() for job in listed], form)
    else:
        output.show(*table(_rows(listed, home), with_namespace, form == "wide"))


def _show_sweep(sweep: Table, form: str | None) -> None:
    """Shows the jobs of a sweep that are on its cluster."""
    found, _, _ = _cluster_jobs(
        sweep.of["cluster"]["namespace"], False, sweep.of["cluster"]["context"], is_required=True
    )
    _show([job for job in found if job.name in sweep.members], form)


def _cluster_jobs(
    namespace: str | None, all_namespaces: bool, context: str | None, *, is_required: bool
) -> tuple[list[JobStatus], str, ClusterError | None]:
    """The cluster's jobs, what to say where there are none, and why they could not be read.

    Raises ClusterError where the cluster was asked for.
    """
    try:
        cluster = Cluster.connect(context, output.say)
    except ClusterError as error:
        if is_required:
            raise
        return ([], "", error) if kubeconfig.has_kubeconfig() else ([], str(error), None)
    place = None if all_namespaces else namespace or cluster.namespace
    try:
        seen = collect.snapshots(cluster, place)
    except ClusterError as error:
        if is_required:
            raise
        return [], "", error
    for why in dict.fromkeys(why for one in seen for why in one.unread):
        output.say(why)
    return (
        [ClusterView(one).status for one in seen],
        f"There are no jobs in {f'namespace {place}' if place else 'any namespace'}.",
        None,
    )


def _rows(listed: Sequence[JobStatus], home: Path | None) -> Rows:
    """A row for each job, for each run in the folder `home`, and for all runs of a sweep in it together."""
    found = dict[tuple[str, str, str | None], list[JobStatus]]()
    top = None if home is None else os.path.abspath(home)
    for job in listed:
        key: tuple[str, str, str | None] = (job.namespace, job.name, None)
        above = top if job.folder is None else os.path.dirname(os.path.abspath(job.folder))
        if top is not None and above is not None and above != top:
            key = ("", os.path.basename(above), above)
        found.setdefault(key, []).append(job)
    return [(name, jobs) for (_, name, _), jobs in found.items()]


def table(rows: Rows, with_namespace: bool, is_wide: bool) -> list[str]:
    """The rows under their headings; the namespace of a run is this machine."""
    heads = ["NAME", "STATE", "HOSTS", "STEP", "RESTARTS", "AGE"]
    texts = [_row(name, jobs) for name, jobs in rows]
    if is_wide:
        heads += ["PHASE", "CHECKPOINT", "GOODPUT", "QUEUE", "NODES"]
        more = [_more(jobs[0]) if len(jobs) == 1 else ["-"] * 5 for _, jobs in rows]
        texts = [[*row, *rest] for row, rest in zip(texts, more, strict=True)]
    if with_namespace:
        heads = ["NAMESPACE", *heads]
        texts = [[jobs[0].namespace or HERE, *row] for row, (_, jobs) in zip(texts, rows, strict=True)]
    return output.columns([heads, *texts])


def _row(name: str, jobs: Sequence[JobStatus]) -> list[str]:
    """What the jobs of a row are together: their hosts, steps and restarts are summed, and the oldest has the age."""
    states = collections.Counter(job.state for job in jobs)
    state = ",".join(f"{one.value}:{count}" for one, count in states.items())
    live = [job for job in jobs if job.state not in OVER]  # of those that are over no host is needed any more
    ready = "?" if any(job.ready is None for job in live) else str(sum(job.ready or 0 for job in live))
    hosts = f"{ready}/{sum(job.hosts for job in live)}" if live else str(max(job.hosts for job in jobs))
    steps = "" if any(job.steps is None for job in jobs) else f"/{sum(job.steps or 0 for job in jobs)}"
    step = "-" if all(job.step is None for job in jobs) else f"{sum(job.step or 0 for job in jobs)}{steps}"
    restarts = str(sum(job.restarts.total for job in jobs))
    shown = jobs[0].state.value if len(jobs) == 1 else state
    return [name, shown, hosts, step, restarts, format_age(max(job.age_s for job in jobs))]


def _more(job: JobStatus) -> list[str]:
    named = ",".join(job.nodes[:_NODES]) + (f" +{len(job.nodes) - _NODES}" if len(job.nodes) > _NODES else "")
    return [
        job.phase or "-",
        "-" if job.committed is None else str(job.committed),
        "-" if job.goodput is None else f"{job.goodput:.1%}",
        job.queue or "-",
        named or "-",
    ]
