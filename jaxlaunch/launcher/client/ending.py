"""Stopping and deleting a job of a cluster or a run here, and waiting until it is gone."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs import dependents, lifecycle
from jaxlaunch.launcher.jobs.exec import rank_pod
from jaxlaunch.launcher.jobs.status import collect, hosts, roles
from jaxlaunch.launcher.jobs.status.job_status import State, derive_state, fails_job
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import Obj, terminal_state
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.sweep.table import LOCK, SweepTable
from jaxlaunch.launcher.wording import os_error_reason
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import layout

# How long a stop and a deletion may take after the grace period.
_STOP_MARGIN_S, _DELETE_MARGIN_S = 60.0, 120.0
# The grace period of a run whose job cannot be read.
_GRACE_S = 60.0


class JobEnd(NamedTuple):
    """The end of a job that was stopped.

    Attributes:
        verdict: The verdict on its last attempt, if it is known.
        is_over: Whether all pods have ended.
        limit_s: How long they were waited for.
    """

    verdict: Verdict | None
    is_over: bool
    limit_s: float


def stop_job(
    cluster: Cluster,
    namespace: str,
    name: str,
    limit_s: float | None,
    *,
    should_wait: bool,
    say: Callable[[str], None],
) -> JobEnd:
    """Stop a job, or end its hold, and wait until its pods have saved and ended.

    Args:
        cluster: The cluster.
        namespace: The namespace of the job.
        name: The name of the job.
        limit_s: How long to wait; by default for the grace period and a minute.
        should_wait: Whether to wait at all.
        say: Called with messages.

    Raises:
        UserError: If there is no such job, or it has ended.
    """
    jobset = dependents.get_managed_jobset(cluster, name, namespace)
    if (state := terminal_state(jobset)) is not None:
        raise UserError(f"Job {name} is already {state}: there is nothing to stop.")
    snapshot = collect.read_snapshot(cluster, namespace, name)
    if not isinstance(snapshot, Snapshot):
        raise lifecycle.deleted_error(cluster, jobset["metadata"])
    held_part = _find_held_part(snapshot)
    snapshot = roles.lead_part(snapshot)
    stopping_pods = lifecycle.StoppingPods(cluster, jobset)
    final_records = lifecycle.FinalRecords(cluster, snapshot)
    when = "ended"
    if held_part is None or not _end_hold(cluster, held_part):
        when = "stopped"
        lifecycle.stop_job(cluster, jobset)
    if not should_wait:
        lifecycle.write_progress(cluster, snapshot, when, say)
        return JobEnd(None, is_over=False, limit_s=0.0)
    if limit_s is None:
        limit_s = lifecycle.grace_period_s(jobset) + _STOP_MARGIN_S
    wait_result, now = stopping_pods.wait_until_gone(limit_s), datetime.now(UTC)
    snapshot = dataclasses.replace(
        snapshot,
        now=now,
        pods=wait_result.pods or snapshot.pods,
        records=final_records.read_records(),
    )
    lifecycle.write_progress(cluster, snapshot, when, say)
    attempt_end = snapshot.report.attempt_end
    if held_part is not None:
        attempt_end = held_part.report.last_end
    verdict = None if attempt_end is None else attempt_end.verdict
    return JobEnd(verdict, wait_result.is_over, limit_s)


def _find_held_part(snapshot: Snapshot) -> Snapshot | None:
    """Return the part of a job, itself without roles, that is held and will fail it, or None."""
    for part in roles.held_parts(snapshot):
        last_end, may_fail = part.report.last_end, hosts.read_agent_job(part.jobset).may_fail
        if derive_state(part) is State.HELD and last_end is not None and not may_fail:
            return part if fails_job(part, last_end.verdict) else None
    return None


def _end_hold(cluster: Cluster, held_part: Snapshot) -> bool:
    """Let a held job end as failed, and return whether its agents were told to."""
    try:
        return rank_pod.select_pod(cluster, held_part, None, None).end_hold()
    except UserError:
        # The user may have no right to run commands in pods.
        return False


def stop_limit_s(run: Run) -> float:
    """Return how long a run on this machine may take to stop."""
    return (run.job.grace if run.job else _GRACE_S) + _STOP_MARGIN_S


def delete_limit_s(jobset: Obj) -> float:
    """Return how long the deletion of a job may take."""
    return lifecycle.grace_period_s(jobset) + _DELETE_MARGIN_S


def wait_until_deleted(cluster: Cluster, jobset: Obj) -> bool:
    """Wait until a deleted job is gone. Return False if that takes too long."""
    return dependents.wait_until_gone(cluster, JOBSETS, dict(jobset), delete_limit_s(jobset))


def folder_kind(folder: Path) -> str:
    """Return whether a folder is that of a `run` or of a `sweep`."""
    return "sweep" if layout.is_sweep(folder) else "run"


def check_deletable(folder: Path) -> None:
    """Raise UserError if the folder of a run or of a sweep must not be deleted."""
    path, name = shlex.quote(os.path.relpath(folder)), shlex.quote(folder.name)
    kind = folder_kind(folder)
    if run_folders.RUNS_FOLDER.resolve() not in folder.resolve().parents:
        # A folder that --run-dir named may hold other files, such as those of a project.
        message = f"{folder} is a {kind} outside of {run_folders.RUNS_FOLDER}/."
        raise UserError(message, f"`rm -r {path}` deletes the folder, with everything in it.")
    if kind == "sweep" and SweepTable(folder).settings.get("cluster") is not None:
        hint = f"`launcher delete` takes their names, which `launcher list {name}` shows; `rm -r "
        message = f"The runs of sweep {folder.name} are jobs on a cluster."
        raise UserError(message, f"{hint}{path}` deletes its table.")
    lock_name = LOCK if kind == "sweep" else layout.LOCK
    if layout.find_holder(folder, lock_name) is not None:
        raise _running_error(folder)
    _require_ended_members(folder)


def _require_ended_members(folder: Path) -> None:
    """Raise UserError if a run below the folder of a run or of a sweep is running."""
    if any(run.holder is not None for run in run_folders.list_runs(folder)):
        raise _running_error(folder)


def _running_error(folder: Path) -> UserError:
    message = f"{folder_kind(folder).capitalize()} {folder.name} is running."
    return UserError(message, f"`launcher stop {shlex.quote(folder.name)}` first.")


def delete_folder(folder: Path) -> None:
    """Delete the folder of a run or of a sweep.

    It first gets another name: a run that starts meanwhile makes a new folder, and what remains of
    a deletion that is interrupted is not a run.
    """
    if folder.is_symlink():
        raise UserError(f"{folder} is a link.", "delete the folder to which it leads.")
    remains = folder
    try:
        with run_folders.hold_lock(folder, LOCK if layout.is_sweep(folder) else layout.LOCK):
            _require_ended_members(folder)
            prefix = f"{layout.DELETED_PREFIX}{folder.name}-"
            target = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
            try:
                folder.rename(target)
            except OSError:
                target.rmdir()
                raise
            remains = target
            shutil.rmtree(target)
    except OSError as error:
        message = f"{remains} cannot be deleted: {os_error_reason(error)}."
        hint = f"`rm -r {shlex.quote(os.path.relpath(remains))}` deletes the rest of {folder.name}."
        raise UserError(message, None if remains == folder else hint) from None
    except KeyboardInterrupt as interrupt:
        if remains != folder:
            command = f"`rm -r {shlex.quote(os.path.relpath(remains))}`"
            interrupt.add_note(f"{command} deletes the rest of {folder.name}")
        raise
