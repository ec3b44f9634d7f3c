"""Kueue holds the job back or evicted it: which queue, which quota, and how much is missing. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxlaunch.launcher.diagnose.explain import unread
from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line, quoted
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS
from jaxlaunch.launcher.jobs.status.job_status import is_stopped_in_queue
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes import queues
from jaxlaunch.launcher.kubernetes.objects import Obj, age, condition, is_true, moment, seconds_since
from jaxlaunch.launcher.wording import count

_UNUSED = re.compile(
    r"insufficient unused quota for (?P<resource>\S+) in flavor (?P<flavor>[^,]+), (?P<more>\S+) more needed"
)
_NEVER = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^,]+), previously considered podsets requests "
    r"\((?P<before>[^)]*)\) \+ current podset request \((?P<requested>[^)]*)\) > maximum capacity \((?P<most>[^)]*)\)"
)
_CLOSED = "namespace doesn't match ClusterQueue selector"
_UNCOVERED = re.compile(r"resource (?P<resource>\S+) unavailable in ClusterQueue")
_SELECTOR = "the cluster administrator to label the namespace as the ClusterQueue's namespaceSelector requires"
_WAIT = SITUATIONS["quota"].next_move
_RESUME = "ask the queue's administrator to resume it."
_QUIET_S = 10.0  # Kueue creates a Workload within a second


def suspended_by_queue(snapshot: Snapshot) -> Answer | None:
    """A JobSet with a queue that is not admitted."""
    if snapshot.queue is None or is_stopped_in_queue(snapshot) or not snapshot.is_suspended:
        return None
    if snapshot.workload is None and "workloads" in snapshot.not_read:
        return unread.workload(snapshot)
    if snapshot.workload is None:
        return _no_workload(snapshot)
    message = condition(snapshot.workload, "QuotaReserved").get("message", "")
    return (
        _ending(snapshot)
        or _inactive(snapshot, message)
        or _backing_off(snapshot)
        or _checks(snapshot, snapshot.workload)
        or _no_quota(snapshot, message)
    )


def _no_workload(snapshot: Snapshot) -> Answer:
    waited_s = seconds_since(snapshot.created, snapshot.now) or 0.0
    headline = f"is suspended, and Kueue has created no Workload for it in queue {snapshot.queue}"
    if waited_s < _QUIET_S:
        return Answer("queued", f"was just submitted to queue {snapshot.queue}: Kueue has not created its Workload yet")
    return Answer("queue-silent", headline, _events(snapshot))


def _inactive(snapshot: Snapshot, message: str) -> Answer | None:
    """The LocalQueue or its ClusterQueue is missing, stopped or inactive."""
    if (match := re.fullmatch(r"(LocalQueue|ClusterQueue) (\S+) doesn't exist", message)) is not None:
        move = "set one of `kubectl get localqueues` as queue: in job.yaml."
        if match[1] == "ClusterQueue":
            move = f"ask the cluster administrator: LocalQueue {snapshot.queue} points to it."
        return Answer("queue-missing", f"waits: {match[1]} {match[2]} does not exist", _conditions(snapshot), move)
    for queue, kind in ((snapshot.cluster_queue, "ClusterQueue"), (snapshot.local_queue, "LocalQueue")):
        if queue is not None and (found := queues.inactive(queue)) is not None:
            return _not_active(snapshot, f"{kind} {queue['metadata']['name']}", found)
    if re.search(r"is (inactive|stopped)$", message):
        return Answer("queue-stopped", f"waits: {message}", _conditions(snapshot), _RESUME)
    return None


def _not_active(snapshot: Snapshot, name: str, found: queues.Inactive) -> Answer:
    if found.stop_policy is not None:
        headline, move = f"{_lead(snapshot)}{name} is stopped (stopPolicy: {found.stop_policy})", _RESUME
    else:
        headline = f"{_lead(snapshot)}{name} is inactive: {found.reason}"
        move = "ask the cluster administrator to fix what the message names."
    states = [f"stopPolicy: {found.stop_policy}"] if found.stop_policy is not None else []
    states += [f"Active=False: {one_line(found.message)}"] if found.message or not states else []
    evidence = (f"{name}: {', '.join(states)}", *_conditions(snapshot))
    return Answer("queue-stopped", headline, evidence, move)


def _ending(snapshot: Snapshot) -> Answer | None:
    """It was evicted, and its pods still save."""
    left = [host for host in snapshot.hosts if not host.has_ended]
    if not left or not is_true(snapshot.workload or {}, "Evicted"):
        return None
    return Answer("preempted", f"{_evicted(snapshot)}; {count(len(left), 'pod')} still saving", _conditions(snapshot))


def _backing_off(snapshot: Snapshot) -> Answer | None:
    """Kueue evicted it because its pods were not ready, and puts it back into the queue after a while."""
    again = (snapshot.workload or {}).get("status", {}).get("requeueState") or {}
    at = moment(again.get("requeueAt"))
    if at is None or at <= snapshot.now or not is_true(snapshot.workload or {}, "Evicted"):
        return None
    times = f", {again['count']} times by now" if again.get("count", 1) > 1 else ""
    left = age((at - snapshot.now).total_seconds())
    headline = f"{_evicted(snapshot)}{times}; Kueue puts it back into queue {snapshot.queue} in {left}"
    return Answer("backing-off", headline, _conditions(snapshot))


def _checks(snapshot: Snapshot, workload: Obj) -> Answer | None:
    """Quota is reserved; an admission check, such as new nodes, has not passed."""
    if not is_true(workload, "QuotaReserved"):
        return None
    checks = workload.get("status", {}).get("admissionChecks") or ()
    waits = [one for one in checks if one.get("state") != "Ready"]
    if not waits:
        return Answer("queued", f"is admitted by queue {snapshot.queue} and about to start", _conditions(snapshot))
    names = ", ".join(one["name"] for one in waits)
    evidence = tuple(f"{one['name']}: {one.get('state')}: {one_line(one.get('message', ''))}" for one in waits)
    why = next((f": {one_line(one['message'])}" for one in waits if one.get("message")), "")
    headline = f"waits: quota is reserved in queue {snapshot.queue}, but admission check {names} has not passed{why}"
    return Answer("admission-check", headline, evidence)


def _no_quota(snapshot: Snapshot, message: str) -> Answer:
    """The quota does not allow it now, or never will."""
    lead = _lead(snapshot)
    behind = queues.cluster_queue_of(snapshot.local_queue)
    where = f"queue {snapshot.queue}" + (f" (ClusterQueue {behind})" if behind else "")
    evidence = (*_conditions(snapshot), *_amounts(snapshot))
    if (match := _NEVER.search(message)) is not None:
        resource, requested, most = match["resource"], match["requested"], match["most"]
        total = f"flavor {match['flavor']} has {most} in total"
        headline = f"{where} can never admit it: it requests {requested} {resource}, {total}"
        return Answer("quota-never", lead + headline, evidence)
    if (match := _UNUSED.search(message)) is not None:
        headline = f"{where} is full: {match['more']} more {match['resource']} is needed in flavor {match['flavor']}"
        headline += _usage(snapshot, match["flavor"], match["resource"])
        return Answer("quota", lead + headline, evidence)
    if _CLOSED in message:
        move = f"set another of `kubectl get localqueues` as queue: in job.yaml, or ask {_SELECTOR}."
        headline = f"{where} is closed to namespace {snapshot.namespace}: its namespaceSelector does not match"
        return Answer("queue-closed", lead + headline, evidence, move)
    if (match := _UNCOVERED.search(message)) is not None:
        headline = f"{where} does not cover {match['resource']}"
        return Answer("quota-uncovered", lead + headline, evidence)
    if message:
        named, situation, to_do = _UNADMITTED.get(_reason(snapshot), ("", "queued", _WAIT))
        return Answer(situation, f"{lead}{f'{where} {named}'.rstrip()}: {one_line(message)}", evidence, to_do)
    return Answer("queued", f"{lead}its turn in {where} has not come", evidence, _WAIT)


# Reasons for which Kueue 0.19 and newer does not reserve quota (KEP 10852, read in November 2026), the situation of
# each, and what to do. Before it, and where its feature gate is off, all are Pending or Inadmissible.
_UNADMITTED: Mapping[str, tuple[str, str, str | None]] = {
    "Misconfigured": (
        "or the job is misconfigured (Misconfigured)",
        "queue-missing",
        "fix what the message names, or ask the cluster administrator.",
    ),
    "ExceedsMaxQuota": ("can never admit it (ExceedsMaxQuota)", "quota-never", None),
    "Suspended": ("is stopped by its administrator (Suspended)", "queue-stopped", _RESUME),
    "AdmissionGated": (
        "does not admit it yet (AdmissionGated)",
        "gated",
        "the owner of the gate must remove it; the JobSet's annotations name it.",
    ),
    "WaitingForPodsReady": ("admits one job after the other (WaitingForPodsReady)", "queued", _WAIT),
    "WaitingForQuota": ("is full (WaitingForQuota)", "quota", _WAIT),
    "TopologyPlacementFailed": (
        "has no room in one topology domain (TopologyPlacementFailed)",
        "quota",
        "wait, request fewer hosts, or a wider level under placement: in job.yaml.",
    ),
    "DRAResourcesUnresolved": (
        "cannot resolve its resource claims (DRAResourcesUnresolved)",
        "quota-uncovered",
        "fix what the message names, or ask the cluster administrator.",
    ),
}


def _lead(snapshot: Snapshot) -> str:
    """How the first line begins: with why it was evicted, if it was."""
    return f"{_evicted(snapshot)} and waits: " if is_true(snapshot.workload or {}, "Evicted") else "waits: "


def _reason(snapshot: Snapshot) -> str:
    return str(condition(snapshot.workload or {}, "QuotaReserved").get("reason", ""))


def _evicted(snapshot: Snapshot) -> str:
    """Why Kueue evicted it."""
    reason = condition(snapshot.workload or {}, "Evicted").get("reason", "")
    if reason == "Preempted":
        by = snapshot.preempted_by
        return f"was preempted by {'another job' if by is None else f'job {by}'}"
    return f"was evicted {_EVICTED.get(reason, f'from the queue ({reason})')}"


_EVICTED: Mapping[str, str] = {
    "PodsReadyTimeout": "because its pods were not ready in time (PodsReadyTimeout)",
    "ClusterQueueStopped": "because the ClusterQueue was stopped (stopPolicy: HoldAndDrain)",
    "LocalQueueStopped": "because the LocalQueue was stopped (stopPolicy: HoldAndDrain)",
    "AdmissionCheck": "because an admission check failed (AdmissionCheck)",
    "NodeFailures": "because nodes failed, and Kueue found no replacement (NodeFailures, TASFailedNodeReplacement)",
    "DeactivatedDueToRequeuingLimitExceeded": "and deactivated: its pods were too often not ready in time",
}


def _conditions(snapshot: Snapshot) -> tuple[str, ...]:
    """The conditions of the Workload that keep it from being admitted."""
    workload = snapshot.workload or {}
    found = [condition(workload, kind) for kind in ("QuotaReserved", "Evicted", "Requeued")]
    return tuple(
        f"Workload {workload['metadata']['name']}: {one['type']}={one['status']}: {one_line(one['message'])}"
        for one in found
        if one.get("message") and (one["type"], one["status"]) not in (("QuotaReserved", "True"), ("Requeued", "True"))
    )


def _events(snapshot: Snapshot) -> tuple[str, ...]:
    return quoted(snapshot.event("CreateWorkloadFailed", "ErrWorkloadCompose", kind="JobSet"))


def _amounts(snapshot: Snapshot) -> tuple[str, ...]:
    """The quota of each resource, how much of it is reserved, and how many jobs wait for it."""
    if snapshot.cluster_queue is None:
        return ()
    lines = [
        f"quota of {each.resource} in flavor {each.flavor}: {each.reserved} used of {each.nominal}"
        for each in queues.quotas(snapshot.cluster_queue)
    ]
    pending = snapshot.cluster_queue.get("status", {}).get("pendingWorkloads")
    if pending is not None:
        name = snapshot.cluster_queue["metadata"]["name"]
        lines.append(f"ClusterQueue {name}: {count(pending, 'job')} pending in it")
    return tuple(lines)


def _usage(snapshot: Snapshot, flavor: str, resource: str) -> str:
    """ "; 900m of 1 is used", where the ClusterQueue could be read."""
    all_quotas = () if snapshot.cluster_queue is None else queues.quotas(snapshot.cluster_queue)
    found = next((each for each in all_quotas if (each.flavor, each.resource) == (flavor, resource)), None)
    return "" if found is None else f"; {found.reserved} of {found.nominal} is used"
