"""Causes of a job that Kueue has not admitted or has evicted. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxlaunch.launcher.diagnose.explain.answer import Answer, Evidence
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS
from jaxlaunch.launcher.diagnose.text import (
    EMPTY_TEXT,
    NextStep,
    Text,
    advise_ask,
    advise_change,
    advise_wait,
    describe_event,
    kubectl_command,
)
from jaxlaunch.launcher.jobs.status.job_status import is_stopped_in_queue
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes import objects
from jaxlaunch.launcher.kubernetes.objects import (
    Obj,
    find_condition,
    is_condition_true,
    parse_time,
    seconds_since,
)

_QUOTA_IN_USE = re.compile(
    r"insufficient unused quota for (?P<resource>\S+) in flavor (?P<flavor>[^,]+), (?P<more>\S+) "
    r"more needed"
)
_QUOTA_TOO_SMALL = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^,]+), previously considered "
    r"podsets requests \((?P<before>[^)]*)\) \+ current podset request \((?P<requested>[^)]*)\) > "
    r"maximum capacity \((?P<most>[^)]*)\)"
)
_NAMESPACE_MISMATCH = "namespace doesn't match ClusterQueue selector"
_UNCOVERED_RESOURCE = re.compile(r"resource (?P<resource>\S+) unavailable in ClusterQueue")
_QUOTA_STEP = SITUATIONS["quota"].next_step
_RESUME_STEP = advise_ask("ask the queue's administrator to resume it.")
_LIST_QUEUES = kubectl_command("get", "localqueues")
# Kueue creates the Workload of a JobSet within a second.
_WORKLOAD_DELAY_S = 10.0


def explain_queue(snapshot: Snapshot) -> Answer | None:
    """Explain a JobSet with a queue that is not admitted."""
    if snapshot.queue is None or is_stopped_in_queue(snapshot) or not snapshot.is_suspended:
        return None
    if (workload := snapshot.workload) is None:
        return _explain_missing_workload(snapshot)
    message = find_condition(workload, "QuotaReserved").get("message", "")
    is_evicted = is_condition_true(workload, "Evicted")
    return (
        (_explain_saving(snapshot) if is_evicted else None)
        or _explain_inactive(snapshot, message)
        or (_explain_backoff(snapshot, workload) if is_evicted else None)
        or _explain_admission_checks(snapshot, workload)
        or _explain_quota(snapshot, message)
    )


def _explain_saving(snapshot: Snapshot) -> Answer | None:
    """Explain an evicted job whose pods still save."""
    remaining = [host for host in snapshot.hosts if not host.has_ended]
    if not remaining:
        return None
    headline = _describe_eviction(snapshot) + Text("; {pods:pod} still saving", pods=len(remaining))
    return Answer("preempted", headline, _describe_conditions(snapshot))


def _explain_backoff(snapshot: Snapshot, workload: Obj) -> Answer | None:
    """Explain a job that Kueue evicted because its pods were not ready, and will queue again."""
    requeue = workload.get("status", {}).get("requeueState") or {}
    requeue_at = parse_time(requeue.get("requeueAt"))
    if requeue_at is None or requeue_at <= snapshot.now:
        return None
    headline = _describe_eviction(snapshot)
    if requeue.get("count", 1) > 1:
        headline += Text(", {count} times by now", count=requeue["count"])
    left_s = (requeue_at - snapshot.now).total_seconds()
    template = "; Kueue puts it back into queue {queue} in {left:age}"
    headline += Text(template, queue=snapshot.queue, left=left_s)
    return Answer("backing-off", headline, _describe_conditions(snapshot))


def _explain_missing_workload(snapshot: Snapshot) -> Answer:
    queue = snapshot.queue
    if (reason := snapshot.unread_reasons.get("workloads")) is not None:
        template = "is suspended, by queue {queue} or by `launcher stop`: {why}"
        return Answer("unread", Text(template, queue=queue, why=reason))
    if (seconds_since(snapshot.created_at, snapshot.now) or 0.0) < _WORKLOAD_DELAY_S:
        template = "was just submitted to queue {queue}: Kueue has not created its Workload yet"
        return Answer("queued", Text(template, queue=queue))
    template = "is suspended, and Kueue has created no Workload for it in queue {queue}"
    event = snapshot.find_event("CreateWorkloadFailed", "ErrWorkloadCompose", kind="JobSet")
    return Answer("queue-silent", Text(template, queue=queue), describe_event(event))


def _explain_inactive(snapshot: Snapshot, message: str) -> Answer | None:
    """Explain a LocalQueue or a ClusterQueue that is missing, stopped or inactive."""
    evidence = _describe_conditions(snapshot)
    if match := re.fullmatch(r"(LocalQueue|ClusterQueue) (\S+) doesn't exist", message):
        step = advise_change("set one of `{queues}` as queue: in job.yaml.", queues=_LIST_QUEUES)
        if match[1] == "ClusterQueue":
            template = "ask the cluster administrator: LocalQueue {queue} points to it."
            step = advise_ask(template, queue=snapshot.queue)
        headline = Text("waits: {kind} {queue} does not exist", kind=match[1], queue=match[2])
        return Answer("queue-missing", headline, evidence, step)
    for queue, kind in (
        (snapshot.cluster_queue, "ClusterQueue"),
        (snapshot.local_queue, "LocalQueue"),
    ):
        if queue is not None and (state := objects.inactive_state(queue)) is not None:
            return _inactive_answer(snapshot, f"{kind} {queue['metadata']['name']}", state)
    if re.search(r"is (inactive|stopped)$", message):
        headline = Text("waits: {message}", message=message)
        return Answer("queue-stopped", headline, evidence, _RESUME_STEP)
    return None


def _inactive_answer(snapshot: Snapshot, queue: str, state: objects.InactiveQueue) -> Answer:
    fields = {"queue": queue, "policy": state.stop_policy, "reason": state.reason}
    active = Text("Active=False: {message}", message=state.message)
    if state.stop_policy is None:
        template, details = "{queue} is inactive: {reason}", [active]
        step = advise_ask("ask the cluster administrator to fix what the message names.")
    else:
        template, step = "{queue} is stopped (stopPolicy: {policy})", _RESUME_STEP
        policy = Text("stopPolicy: {policy}", policy=state.stop_policy)
        details = [policy, active] if state.message else [policy]
    headline = _begin_headline(snapshot) + Text(template, **fields)
    evidence = Text("{queue}: {states}", queue=queue, states=details)
    return Answer("queue-stopped", headline, (evidence, *_describe_conditions(snapshot)), step)


def _explain_admission_checks(snapshot: Snapshot, workload: Obj) -> Answer | None:
    """Explain a job with reserved quota that waits for admission checks, for example new nodes."""
    if not is_condition_true(workload, "QuotaReserved"):
        return None
    checks = workload.get("status", {}).get("admissionChecks") or ()
    pending_checks = [check for check in checks if check.get("state") != "Ready"]
    if not pending_checks:
        headline = Text("is admitted by queue {queue} and about to start", queue=snapshot.queue)
        return Answer("queued", headline, _describe_conditions(snapshot))
    template = "{name}: {state}: {message}"
    evidence = tuple(
        Text(template, **{"state": None, "message": ""} | check) for check in pending_checks
    )
    headline = Text(
        "waits: quota is reserved in queue {queue}, but admission check {checks} has not passed",
        queue=snapshot.queue,
        checks=[check["name"] for check in pending_checks],
    )
    if messages := [check["message"] for check in pending_checks if check.get("message")]:
        headline += Text(": {message}", message=messages[0])
    return Answer("admission-check", headline, evidence)


def _explain_quota(snapshot: Snapshot, message: str) -> Answer:
    """Explain a job that the quota does not allow now, or never will."""
    evidence = (*_describe_conditions(snapshot), *_describe_quotas(snapshot))
    situation, headline, step = _explain_reservation(snapshot, message)
    return Answer(situation, _begin_headline(snapshot) + headline, evidence, step)


def _explain_reservation(snapshot: Snapshot, message: str) -> tuple[str, Text, NextStep | None]:
    """Return the situation, the reason why quota is not reserved, and the next step."""
    cluster_queue = objects.cluster_queue_name(snapshot.local_queue)
    template = "queue {queue} (ClusterQueue {behind})" if cluster_queue else "queue {queue}"
    queue = Text(template, queue=snapshot.queue, behind=cluster_queue)
    if match := _QUOTA_TOO_SMALL.search(message):
        template = (
            "{queue} can never admit it: it requests {requested} {resource}, flavor {flavor} has "
            "{most} in total"
        )
        return "quota-never", Text(template, queue=queue, **match.groupdict()), None
    if match := _QUOTA_IN_USE.search(message):
        template = "{queue} is full: {more} more {resource} is needed in flavor {flavor}"
        headline = Text(template, queue=queue, **match.groupdict())
        return "quota", headline + _describe_usage(snapshot, **match.groupdict()), None
    if _NAMESPACE_MISMATCH in message:
        step = advise_change(
            "set another of `{queues}` as queue: in job.yaml, or ask the cluster administrator to "
            "label the namespace as the ClusterQueue's namespaceSelector requires.",
            queues=_LIST_QUEUES,
        )
        template = (
            "{queue} is closed to namespace {namespace}: its namespaceSelector does not match"
        )
        return "queue-closed", Text(template, queue=queue, namespace=snapshot.namespace), step
    if match := _UNCOVERED_RESOURCE.search(message):
        headline = Text(
            "{queue} does not cover {resource}", queue=queue, resource=match["resource"]
        )
        return "quota-uncovered", headline, None
    if message:
        reason = str(find_condition(snapshot.workload or {}, "QuotaReserved").get("reason", ""))
        template, situation, next_step = "{queue}", "queued", _QUOTA_STEP
        if reason in _UNADMITTED_REASONS:
            template, situation, next_step = _UNADMITTED_REASONS[reason]
            template += " ({reason})"
        template += ": {message}"
        headline = Text(template, queue=queue, reason=reason, message=message)
        return situation, headline, next_step
    return "queued", Text("its turn in {queue} has not come", queue=queue), _QUOTA_STEP


_FIX_OR_ASK = advise_change("fix what the message names, or ask the cluster administrator.")
# Reasons for which Kueue does not reserve quota: the beginning of the headline, the situation, and
# the next step. They exist since Kueue 0.19 (KEP 10852, read in November 2026). In older versions,
# or if the feature gate is off, the reason is always Pending or Inadmissible.
_UNADMITTED_REASONS: Mapping[str, tuple[str, str, NextStep | None]] = {
    "Misconfigured": ("{queue} or the job is misconfigured", "queue-missing", _FIX_OR_ASK),
    "ExceedsMaxQuota": ("{queue} can never admit it", "quota-never", None),
    "Suspended": ("{queue} is stopped by its administrator", "queue-stopped", _RESUME_STEP),
    "AdmissionGated": (
        "{queue} does not admit it yet",
        "gated",
        advise_ask("the owner of the gate must remove it; the JobSet's annotations name it."),
    ),
    "WaitingForPodsReady": ("{queue} admits one job after the other", "queued", _QUOTA_STEP),
    "WaitingForQuota": ("{queue} is full", "quota", _QUOTA_STEP),
    "TopologyPlacementFailed": (
        "{queue} has no room in one topology domain",
        "quota",
        advise_wait("wait, request fewer hosts, or a wider level under placement: in job.yaml."),
    ),
    "DRAResourcesUnresolved": (
        "{queue} cannot resolve its resource claims",
        "quota-uncovered",
        _FIX_OR_ASK,
    ),
}


def _begin_headline(snapshot: Snapshot) -> Text:
    """Return the beginning of a headline, which says why the job was evicted if it was."""
    if is_condition_true(snapshot.workload or {}, "Evicted"):
        return _describe_eviction(snapshot) + Text(" and waits: ")
    return Text("waits: ")


def _describe_eviction(snapshot: Snapshot) -> Text:
    reason = find_condition(snapshot.workload or {}, "Evicted").get("reason", "")
    template = _EVICTION_TEXTS.get(reason, "was evicted from the queue ({reason})")
    if reason == "Preempted" and snapshot.preempted_by is not None:
        template = "was preempted by job {preemptor}"
    return Text(template, reason=reason, preemptor=snapshot.preempted_by)


_HOLD_AND_DRAIN = "stopPolicy: HoldAndDrain"
_EVICTION_TEXTS: Mapping[str, str] = {
    "Preempted": "was preempted by another job",
    "PodsReadyTimeout": "was evicted because its pods were not ready in time ({reason})",
    "ClusterQueueStopped": f"was evicted because the ClusterQueue was stopped ({_HOLD_AND_DRAIN})",
    "LocalQueueStopped": f"was evicted because the LocalQueue was stopped ({_HOLD_AND_DRAIN})",
    "AdmissionCheck": "was evicted because an admission check failed ({reason})",
    "NodeFailures": "was evicted because nodes failed, and Kueue found no replacement ({reason}, "
    "TASFailedNodeReplacement)",
    "DeactivatedDueToRequeuingLimitExceeded": "was evicted and deactivated: its pods were too "
    "often not ready in time",
}


def _describe_conditions(snapshot: Snapshot) -> Evidence:
    """Return the conditions of the Workload that show why it is not admitted."""
    workload = snapshot.workload or {}
    conditions = [
        find_condition(workload, kind) for kind in ("QuotaReserved", "Evicted", "Requeued")
    ]
    template = "Workload {workload}: {type}={status}: {message}"
    return tuple(
        Text(template, workload=workload["metadata"]["name"], **condition)
        for condition in conditions
        if condition.get("message")
        and (condition["type"] == "Evicted" or condition["status"] != "True")
    )


def _describe_quotas(snapshot: Snapshot) -> Evidence:
    """Return a line for each quota of the ClusterQueue, and the number of pending jobs."""
    if (queue := snapshot.cluster_queue) is None:
        return ()
    template = "quota of {resource} in flavor {flavor}: {reserved} used of {nominal}"
    lines = [Text(template, **quota._asdict()) for quota in objects.queue_quotas(queue)]
    if (pending_count := queue.get("status", {}).get("pendingWorkloads")) is not None:
        template = "ClusterQueue {name}: {jobs:job} pending in it"
        lines.append(Text(template, name=queue["metadata"]["name"], jobs=pending_count))
    return tuple(lines)


def _describe_usage(snapshot: Snapshot, flavor: str, resource: str, **_: str) -> Text:
    """Return "; 900m of 1 is used", if the ClusterQueue could be read."""
    for quota in objects.queue_quotas(snapshot.cluster_queue or {}):
        if (quota.flavor, quota.resource) == (flavor, resource):
            return Text("; {reserved} of {nominal} is used", **quota._asdict())
    return EMPTY_TEXT
