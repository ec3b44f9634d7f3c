"""Whether a name is that of a run on this machine, or of a job on a cluster."""

from __future__ import annotations

import os

from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.cli.job_view import ClusterView, JobView, RunView
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run_folders import Run

LOOK_S = 3.0  # for which a cluster is asked whether it has a job of the name of a run here


def run_here(name: str, namespace: str | None, context: str | None, where: str | None) -> Run | None:
    """The run on this machine that is meant; None where it is a job of a cluster.

    Raises UserError where there is both, and neither an option nor a path says which.
    """
    asks_cluster = where == "cluster" or namespace is not None or context is not None
    if asks_cluster and where == "local":
        raise UserError("--local selects this machine; -n and --context select a cluster.", "give one of them.")
    if asks_cluster:
        return None
    folder = run_folders.find(name)
    if folder is None and (where == "local" or os.sep in name):
        raise UserError(f"There is no run {name}: {run_folders.looked_for(name)}.", "`launcher list` shows them.")
    if folder is not None and where is None and os.sep not in name:
        _require_one(name)
    return None if folder is None else run_folders.open_run(folder)


def find_view(name: str, namespace: str | None, context: str | None, where: str | None) -> JobView:
    """Return the run or the job that is meant. Raises as `run_here` and `connect` do."""
    if (run := run_here(name, namespace, context, where)) is not None:
        return RunView(run)
    cluster = connect(name, context, where)
    return ClusterView(collect.snapshot(cluster, namespace or cluster.namespace, name), cluster)


def connect(name: str, context: str | None, where: str | None) -> Cluster:
    """The cluster whose job is meant. Raises ClusterError; without a cluster it also says that there is no such run."""
    try:
        return Cluster.connect(context, output.say)
    except ClusterError as error:
        if context is not None or where is not None:
            raise
        message = f"There is no run {name} here ({run_folders.looked_for(name)}). {error.message}"
        raise ClusterError(message, error.hint) from None


def _require_one(name: str) -> None:
    """Raises UserError where the cluster of the current context has a job of that name, too."""
    try:
        cluster = Cluster.connect(None)
    except ClusterError:
        return  # there is none
    cluster.hurry(LOOK_S)
    try:
        is_both = cluster.get(JOBSETS, name) is not None
    except ClusterError as error:
        return output.say(f"{name} is the run here; whether the cluster has a job of that name is unknown: {error}")
    if is_both:
        where = f"a run on this machine and a job in namespace {cluster.namespace}"
        raise UserError(
            f"{name} is both {where}.",
            f"say which: --local or --cluster; a path, such as runs/{name}, is of this machine, too.",
        )
