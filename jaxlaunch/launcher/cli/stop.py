"""`launcher stop`: saves a checkpoint and ends a job or a run on this machine, which can be resumed."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime

import click

from jaxlaunch.launcher.cli import completions, options, output, whose
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs import ownership, record, stop
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import terminal_state
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local import stop as stop_here
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.sweep.table import LOCK, Table
from jaxlaunch.launcher.wording import duration
from jaxlaunch.runs.lock import find_holder

_MARGIN_S = 60.0  # after the pods' grace period
_GRACE_S = 60.0  # of a run whose job cannot be read


@click.command("stop")
@click.argument("name", metavar="JOB_NAME", shell_complete=completions.runs)
@options.place()
@options.whose
@click.option("--no-wait", is_flag=True, help="Do not wait until its pods are gone, or the run has ended.")
@click.option("--timeout", metavar="DURATION", help="How long to wait. [default: the job's grace and 1 minute]")
def stop_command(
    name: str, namespace: str | None, context: str | None, where: str | None, no_wait: bool, timeout: str | None
) -> int:
    """Stop job JOB_NAME, or a run here, after it has saved.

    Its processes save at their next step, then its pods end. The JobSet remains, suspended: `launcher submit` of the
    same file resumes it from that checkpoint, `launcher delete` removes it. A run, given by its name below runs/ or by
    its folder, ends as if Ctrl-C had been pressed in its terminal; `launcher run` of the same file resumes it. With the
    name of a sweep, all of its runs are stopped, here or on the cluster.
    """
    limit_s = options.seconds("--timeout", timeout)
    if where is None and (sweep := run_folders.find_sweep(name)) is not None:
        return _stop_sweep(Table(sweep), limit_s, no_wait=no_wait)
    if (run := whose.run_here(name, namespace, context, where)) is not None:
        return _stop_run(run, None if no_wait else limit_s or (run.job.grace if run.job else _GRACE_S) + _MARGIN_S)
    cluster = whose.connect(name, context, where)
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
        namespace = jobset["metadata"]["namespace"]
        late = f"its pods are not gone after {duration(limit_s)}; see `launcher explain -n {namespace} {name}`"
        output.say(late)
        return options.WAITED_TOO_LONG
    output.show(f"{JOBSETS.titled(name)} stopped")
    return 0


def _stop_run(run: Run, limit_s: float | None) -> int:
    """Stops a run of this machine; the exit code. `limit_s` None: does not wait."""
    stop_here.stop(run)
    if limit_s is None:
        output.show(f"run/{run.name} stopping")
        return 0
    if not stop_here.until_ended(run, limit_s):
        output.say(f"it has not ended after {duration(limit_s)}; see `launcher explain {run.name}`")
        return options.WAITED_TOO_LONG
    ended = run_folders.open_run(run.folder)
    if ended.summary is not None and ended.summary.verdict is not None:
        output.say(ended.summary.verdict.message)
    output.show(f"run/{run.name} stopped")
    return 0


def _stop_sweep(sweep: Table, limit_s: float | None, *, no_wait: bool) -> int:
    """Stops all runs of a sweep; the exit code. Who leads it stops them; without one each is asked."""
    name = sweep.folder.name
    if (place := sweep.of.get("cluster")) is not None:
        return _stop_jobs(sweep, Cluster.connect(place["context"], output.say), place["namespace"])
    lead = Run(name, sweep.folder, None, find_holder(sweep.folder, LOCK))
    held = [run for run in run_folders.runs_in(sweep.folder) if run.holder is not None]
    if lead.holder is not None:
        stop_here.stop(lead, LOCK)
    elif not held:
        raise UserError(f"Sweep {name} is not running: there is nothing to stop.", f"see {sweep.folder}.")
    else:
        for run in held:
            stop_here.stop(run)
    if no_wait:
        output.show(f"sweep/{name} stopping")
        return 0
    grace_s = max((run.job.grace if run.job else _GRACE_S for run in held), default=_GRACE_S)
    until = time.monotonic() + (limit_s or grace_s + _MARGIN_S)
    is_over = stop_here.until_ended(lead, until - time.monotonic(), LOCK)
    for run in held:
        is_over = stop_here.until_ended(run, until - time.monotonic()) and is_over
    if not is_over:
        output.say(f"not all have ended; see `launcher list {name}`")
        return options.WAITED_TOO_LONG
    output.show(f"sweep/{name} stopped")
    return 0


def _stop_jobs(sweep: Table, cluster: Cluster, namespace: str | None) -> int:
    """Suspends each job of a sweep that has not ended, without waiting; the exit code."""
    for member in sweep.members:
        jobset = cluster.get(JOBSETS, member, namespace or cluster.namespace)
        if jobset is None or terminal_state(jobset) is not None:
            continue
        ownership.own(cluster, member, namespace or cluster.namespace)
        stop.stop(cluster, jobset)
        output.show(f"{JOBSETS.titled(member)} stopping")
    return 0
