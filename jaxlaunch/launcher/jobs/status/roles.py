"""The roles of a job in a cluster, each as the snapshot of a job of its own. Pure functions."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import (
    find_condition,
    is_condition_true,
    lead_name,
    terminal_state,
)

# JobSet's message about a JobSet that has failed.
_FIRST_FAILED_JOB = re.compile(r"\(first failed job: ([^)]+)\)")


def split_roles(snapshot: Snapshot) -> dict[str, Snapshot]:
    """Return each role as a job of its own, empty for a job without roles."""
    return {name: _select_role(snapshot, name) for name in hosts.list_roles(snapshot.jobset)}


def find_decisive_role(snapshot: Snapshot) -> str | None:
    """Return the role that decides on the state of the job; None without roles.

    It is the role whose failure ended the job. While the job continues, it is the first of those
    that end it and is not done; otherwise the lead.
    """
    names = hosts.list_roles(snapshot.jobset)
    failed_jobs = [
        (condition.get("lastTransitionTime", ""), job["metadata"]["name"])
        for job in snapshot.jobs
        if (condition := find_condition(job, "Failed")).get("status") == "True"
    ]
    message = find_condition(snapshot.jobset, "Failed").get("message", "")
    # `launcher list` does not read the Jobs.
    match = _FIRST_FAILED_JOB.search(message)
    failed_job = match[1] if match else min(failed_jobs, default=("", ""))[1]
    failed_role, _, _ = failed_job.removeprefix(f"{snapshot.name}-").rpartition("-")
    if failed_role in names:
        return str(failed_role)
    if names and snapshot.jobs and terminal_state(snapshot.jobset) is None:
        for name in snapshot.jobset["spec"]["successPolicy"]["targetReplicatedJobs"]:
            jobs = [job for job in snapshot.jobs if hosts.is_of_role(job, name)]
            if not (jobs and all(is_condition_true(job, "Complete") for job in jobs)):
                return str(name)
    return lead_name(snapshot.jobset) if names else None


def has_ended_alone(part: Snapshot) -> bool:
    """Return whether the Jobs of a role have ended, and were not stopped with the JobSet."""
    return bool(part.jobs) and all(
        is_condition_true(job, "Complete") or is_condition_true(job, "Failed") for job in part.jobs
    )


def decisive_part(snapshot: Snapshot) -> Snapshot:
    """Return the decisive role as a job of its own, or a job without roles itself."""
    role = find_decisive_role(snapshot)
    return snapshot if role is None else _select_role(snapshot, role)


def lead_part(snapshot: Snapshot) -> Snapshot:
    """Return the lead as a job of its own, or a job without roles itself."""
    return split_roles(snapshot).get(lead_name(snapshot.jobset) or "", snapshot)


def held_parts(snapshot: Snapshot) -> list[Snapshot]:
    """Return each role whose pods stay for a look as a job of its own, or a job without roles."""
    parts = (split_roles(snapshot) or {"": snapshot}).values()
    return [part for part in parts if part.report.stage == "hold"]


def _select_role(snapshot: Snapshot, role: str) -> Snapshot:
    jobset: dict[str, Any] = {**hosts.select_role(snapshot.jobset, role)}
    if role != lead_name(snapshot.jobset):
        # The progress that is recorded on the JobSet is that of the lead.
        metadata = jobset["metadata"]
        annotations = {**metadata.get("annotations", {})}
        annotations.pop(ANNOTATION, None)
        jobset["metadata"] = {**metadata, "annotations": annotations}
    jobs = [job for job in snapshot.jobs if hosts.is_of_role(job, role)]
    pods = [pod for pod in snapshot.pods if hosts.is_of_role(pod, role)]
    if jobs and all(is_condition_true(job, "Complete") for job in jobs):
        # The Jobs of a role that may fail complete even if it has failed.
        reports = [host.termination_report for host in hosts.newest_hosts(jobset, pods)]
        has_failed = any(report and report.verdict.code for report in reports)
        state = "Failed" if has_failed else "Completed"
        jobset["status"] = {**jobset.get("status", {}), "terminalState": state}
    return dataclasses.replace(
        snapshot,
        jobset=jobset,
        jobs=tuple(jobs),
        pods=tuple(pods),
        records=snapshot.role_records.get(role, ()),
    )
