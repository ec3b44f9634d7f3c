"""`launcher stop` and `delete`: end a job or a run after it has saved, or delete it."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.client import ending, job_view
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.jobs import dependents, lifecycle
from jaxlaunch.launcher.kubernetes import kubeconfig
from jaxlaunch.launcher.kubernetes.client import Cluster, ignore_forbidden
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import Obj, terminal_state
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.sweep.table import LOCK, SweepTable
from jaxlaunch.launcher.wording import format_duration
from jaxlaunch.runs import layout


def _run_for_each(names: Sequence[str], act: Callable[[str], int]) -> int:
    """Act on each name, whatever becomes of the others, and return the largest exit code."""
    if len(names) == 1:
        return act(names[0])
    codes = []
    for name in dict.fromkeys(names):
        try:
            codes.append(act(name))
        except UserError as error:
            output.show_lines(str(error), is_result=False)
            codes.append(error.exit_code)
    return max(codes)


@click.command("stop")
@options.names_argument
@options.cluster_options()
@options.location_options
@click.option(
    "--no-wait", is_flag=True, help="Do not wait until its pods are gone, or the run has ended."
)
@click.option(
    "--timeout",
    metavar="DURATION",
    help="How long to wait. [default: the job's grace and 1 minute]",
)
def stop_command(
    names: tuple[str, ...],
    namespace: str | None,
    context: str | None,
    location: str | None,
    no_wait: bool,
    timeout: str | None,
) -> int:
    """Stop job JOB_NAME, or a run here, after it has saved.

    Its processes save at their next step, then its pods end. The JobSet remains, suspended:
    `launcher submit` of the same file resumes it from that checkpoint, `launcher delete` removes
    it. A run, given by its name below runs/ or by its folder, ends as if Ctrl-C had been pressed in
    its terminal; `launcher run` of the same file resumes it. With the name of a sweep, all of its
    runs are stopped, here or on the cluster. Several names are stopped one after the other.
    """
    limit_s = options.parse_duration("--timeout", timeout)

    def stop(name: str) -> int:
        return _stop_by_name(name, namespace, context, location, limit_s, no_wait=no_wait)

    return _run_for_each(names, stop)


def _stop_by_name(
    name: str,
    namespace: str | None,
    context: str | None,
    location: str | None,
    limit_s: float | None,
    *,
    no_wait: bool,
) -> int:
    is_anywhere = location is None and namespace is None and context is None
    if is_anywhere and (sweep := run_folders.find_sweep(name)) is not None:
        return _stop_sweep(SweepTable(sweep), limit_s, no_wait=no_wait)
    say = output.show_messages
    if (run := job_view.find_local_run(name, namespace, context, location, say)) is not None:
        if limit_s is None:
            limit_s = ending.stop_limit_s(run)
        return _stop_run(run, None if no_wait else limit_s)
    cluster = job_view.connect_cluster(name, context, location, say)
    namespace = namespace or cluster.namespace
    end = ending.stop_job(cluster, namespace, name, limit_s, should_wait=not no_wait, say=say)
    if no_wait:
        output.show_lines(f"{JOBSETS.qualified_name(name)} stopping")
        return 0
    if end.verdict is not None:
        output.show_messages(end.verdict.message)
    if not end.is_over:
        return _show_timeout(namespace, name, end.limit_s)
    output.show_lines(f"{JOBSETS.qualified_name(name)} stopped")
    return 0


def _show_timeout(namespace: str, name: str, limit_s: float) -> int:
    command = f"launcher explain -n {namespace} {name}"
    output.show_messages(f"its pods are not gone after {format_duration(limit_s)}; see `{command}`")
    return options.EXIT_TIMEOUT


def _stop_run(run: Run, limit_s: float | None) -> int:
    """Stop a run of this machine, wait `limit_s` if given, and return the exit code."""
    run_folders.stop_run(run)
    if limit_s is None:
        output.show_lines(f"run/{run.name} stopping")
        return 0
    if not run_folders.wait_for_end(run, limit_s):
        output.show_messages(
            f"it has not ended after {format_duration(limit_s)}; see `launcher explain {run.name}`"
        )
        return options.EXIT_TIMEOUT
    summary = run_folders.open_run(run.folder).summary
    if summary is not None and summary.verdict is not None:
        output.show_messages(summary.verdict.message)
    output.show_lines(f"run/{run.name} stopped")
    return 0


def _stop_sweep(sweep: SweepTable, limit_s: float | None, *, no_wait: bool) -> int:
    """Stop all runs of a sweep, through its launcher if that runs, and return the exit code."""
    name = sweep.folder.name
    if (target := sweep.settings.get("cluster")) is not None:
        cluster = Cluster.connect(target["context"], output.show_messages)
        return _stop_jobs(sweep, cluster, target["namespace"] or cluster.namespace)
    leader = Run(name, sweep.folder, None, layout.find_holder(sweep.folder, LOCK))
    active_runs = [run for run in run_folders.list_runs(sweep.folder) if run.holder is not None]
    if leader.holder is not None:
        run_folders.stop_run(leader, LOCK)
    elif not active_runs:
        message = f"Sweep {name} is not running: there is nothing to stop."
        raise UserError(message, f"see {sweep.folder}.")
    else:
        for run in active_runs:
            run_folders.stop_run(run)
    if no_wait:
        output.show_lines(f"sweep/{name} stopping")
        return 0
    limits_s = [ending.stop_limit_s(run) for run in (active_runs or [leader])]
    deadline = time.monotonic() + (max(limits_s) if limit_s is None else limit_s)
    is_over = run_folders.wait_for_end(leader, deadline - time.monotonic(), LOCK)
    for run in active_runs:
        is_over = run_folders.wait_for_end(run, deadline - time.monotonic()) and is_over
    if not is_over:
        output.show_messages(f"not all have ended; see `launcher list {name}`")
        return options.EXIT_TIMEOUT
    output.show_lines(f"sweep/{name} stopped")
    return 0


def _stop_jobs(sweep: SweepTable, cluster: Cluster, namespace: str) -> int:
    """Suspend each job of a sweep that has not ended, without waiting, and return the exit code."""
    for member in sweep.members:
        jobset = cluster.get(JOBSETS, member, namespace)
        if jobset is None or terminal_state(jobset) is not None:
            continue
        dependents.get_managed_jobset(cluster, member, namespace)
        lifecycle.stop_job(cluster, jobset)
        output.show_lines(f"{JOBSETS.qualified_name(member)} stopping")
    return 0


def _has_job(name: str) -> bool | None:
    """Return whether the context's namespace has a job with a name, or None if there is no cluster.

    A cluster that does not answer, or whose kubeconfig cannot be used, counts as one without the
    job.
    """
    try:
        cluster = Cluster.connect(None)
    except ClusterError:
        return False if kubeconfig.has_kubeconfig() else None
    cluster.limit_call_time(job_view.NAME_CHECK_TIMEOUT_S)
    try:
        return cluster.get(JOBSETS, name) is not None
    except ClusterError:
        return False


def _is_known_to_be_stopped(cluster: Cluster, jobset: Obj) -> bool:
    # A user who may delete jobs need not be allowed to read Workloads of Kueue.
    with ignore_forbidden():
        return lifecycle.is_stopped(cluster, jobset)
    return False


@click.command("delete")
@options.names_argument
@options.cluster_options()
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    help="Do not ask before deleting a job that has not ended, or a run of this machine.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait until its pods are gone.")
def delete_command(
    names: tuple[str, ...], namespace: str | None, context: str | None, yes: bool, no_wait: bool
) -> int:
    """Delete job JOB_NAME, or a run here with its folder.

    The processes of a job save first. Files on volumes and in buckets are not deleted. A run below
    runs/ is deleted with its checkpoints and logs, after a confirmation, and never while it runs.
    Several names are deleted one after the other.
    """

    def delete(name: str) -> int:
        return _delete_by_name(name, namespace, context, yes=yes, no_wait=no_wait)

    return _run_for_each(names, delete)


def _delete_by_name(
    name: str, namespace: str | None, context: str | None, *, yes: bool, no_wait: bool
) -> int:
    folder = None
    if namespace is None and context is None:
        folder = run_folders.find_run(name) or run_folders.find_sweep(name)
    if folder is not None:
        has_job = False if os.sep in name else _has_job(name)
        if not has_job:
            # A script that deletes a job twice must not delete a run the second time.
            is_ambiguous = has_job is False and os.sep not in name
            return _delete_folder(folder, yes=yes, is_ambiguous=is_ambiguous)
    cluster = Cluster.connect(context, output.show_messages)
    jobset = dependents.get_managed_jobset(cluster, name, namespace or cluster.namespace)
    if not yes and terminal_state(jobset) is None and not _is_known_to_be_stopped(cluster, jobset):
        _confirm_deletion(f"Job {name} has not ended")
    output.show_lines(*dependents.delete_job(cluster, jobset))
    if no_wait or ending.wait_until_deleted(cluster, jobset):
        return 0
    return _show_timeout(jobset["metadata"]["namespace"], name, ending.delete_limit_s(jobset))


def _confirm_deletion(fact: str) -> None:
    """Ask whether to delete what a clause describes. Raises UserError where nobody can answer."""
    if not sys.stdin.isatty():
        raise UserError(f"{fact}, and stdin is not a terminal.", "add --yes to delete it.")
    click.confirm(f"{fact}. Delete it?", abort=True, err=True)


def _delete_folder(folder: Path, *, yes: bool, is_ambiguous: bool) -> int:
    """Delete the folder of a run or of a sweep on this machine, and return the exit code."""
    ending.check_deletable(folder)
    path, kind = shlex.quote(os.path.relpath(folder)), ending.folder_kind(folder)
    if yes and is_ambiguous:
        message = f"{folder.name} is a {kind} on this machine, and no job was found on the cluster."
        raise UserError(message, f"`launcher delete {path} --yes` deletes the {kind}.")
    if not yes:
        _confirm_deletion(f"{path} is a {kind} on this machine, with its checkpoints and logs")
    try:
        ending.delete_folder(folder)
    except KeyboardInterrupt as interrupt:
        output.show_messages(*getattr(interrupt, "__notes__", ()))
        raise
    output.show_lines(f"{kind}/{folder.name} deleted")
    return 0
