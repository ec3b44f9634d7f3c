"""Causes of a job that is done, stopped or being deleted, and of blocked deletions. Pure functions.

An object with a finalizer, or a pod on a node that does not answer, stays after its deletion. Such
an object is stuck, and so are the objects that wait for its deletion.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from jaxlaunch.launcher.diagnose.explain.answer import Answer, Evidence
from jaxlaunch.launcher.diagnose.text import (
    EMPTY_TEXT,
    JOB_NAME,
    SUBMIT,
    NextStep,
    Text,
    advise_ask,
    advise_resubmit,
    advise_run,
    advise_wait,
    kubectl_command,
    launcher_command,
    quote_message,
)
from jaxlaunch.launcher.jobs.status.job_status import State, derive_status, is_stopped_in_queue
from jaxlaunch.launcher.jobs.status.snapshot import DeletedNode, Snapshot
from jaxlaunch.launcher.kubernetes.labels import JOB_TRACKING
from jaxlaunch.launcher.kubernetes.objects import Obj, find_condition, parse_time, seconds_since
from jaxlaunch.records.run_numbers import format_metrics

# An object that still exists this long after its deletion is stuck. Controllers remove their
# finalizers within seconds.
_STUCK_AFTER_S = 30.0
# The garbage collector begins to delete the Jobs of a deleted JobSet within this time.
_UNCOLLECTED_AFTER_S = 60.0
# A Job in a namespace that is being deleted is usually deleted within this time after its pods.
_KEPT_AFTER_S = 5.0
# Finalizers with which Kubernetes itself waits for the objects that an object owns.
_KUBERNETES_FINALIZERS = ("foregroundDeletion", "orphan")
ASK_ABOUT_CONTROLLERS = advise_ask(
    "ask the cluster administrator whether kube-controller-manager, which has the Job controller, "
    "runs, and what its log says of the Job."
)
# Reasons for which Kueue deactivates a Workload.
_DEACTIVATION_REASONS = {
    "DeactivatedDueToRequeuingLimitExceeded": Text("its pods were repeatedly not ready in time"),
    "DeactivatedDueToMaximumExecutionTimeExceeded": Text("its maximum execution time was exceeded"),
    "DeactivatedDueToAdmissionCheck": Text("an admission check rejected it"),
}


def explain_finished(snapshot: Snapshot) -> Answer | None:
    """Explain a job that is done, stopped or being deleted."""
    status = derive_status(snapshot)
    if status.state is State.DELETING:
        return _explain_deleting(snapshot)
    if status.state is State.DONE:
        return _explain_done(snapshot)
    if status.state in (State.STOPPING, State.STOPPED):
        return _explain_stopped(snapshot, status.state)
    if (
        status.state is State.SUSPENDED
        and (reason := snapshot.unread_reasons.get("pods")) is not None
    ):
        return Answer(
            "unread", Text("is stopped; whether its pods have ended is unknown: {why}", why=reason)
        )
    return None


def _explain_done(snapshot: Snapshot) -> Answer:
    status = derive_status(snapshot)
    template = "is done: all of {hosts:host}" if status.hosts > 1 else "is done"
    parts = [Text(template, hosts=status.hosts)]
    if status.step is not None:
        parts.append(Text("step {step}", step=status.step))
    if status.lasted_s is not None:
        parts.append(Text("in {lasted:age}", lasted=status.lasted_s))
    metrics = format_metrics(status.metrics)
    return Answer("done", Text("{parts}", parts=parts), (metrics,) if metrics else ())


def _explain_stopped(snapshot: Snapshot, state: State) -> Answer:
    """Explain a job that is stopping or stopped, until it is submitted again."""
    attempt_end = snapshot.report.attempt_end
    evidence: Evidence = () if attempt_end is None else (attempt_end.description,)
    if state is State.STOPPING:
        headline = Text("is stopping: {pods}", pods=_count_pods_left(snapshot, "still saving"))
        return Answer("stopping", headline, evidence)
    eviction = find_condition(snapshot.workload or {}, "Evicted")
    reason = _DEACTIVATION_REASONS.get(eviction.get("reason", ""))
    if is_stopped_in_queue(snapshot) and reason is not None:
        evidence = (*evidence, Text("Workload: {message}", message=eviction.get("message", "")))
        return Answer("given-up", Text("was deactivated by Kueue: {why}", why=reason), evidence)
    headline = Text("is stopped")
    if snapshot.report.committed_step is not None:
        headline += Text("; step {step} is saved", step=snapshot.report.committed_step)
    elif attempt_end is not None:
        headline += Text("; {message}", message=attempt_end.verdict.message)
    next_step = None
    if snapshot.report.heartbeat is not None and snapshot.report.committed_step is None:
        template = "`{submit}` starts it again: it reported no saved step"
        next_step = advise_resubmit(template, submit=SUBMIT)
    return Answer("stopped", headline, evidence, next_step)


def _count_pods_left(snapshot: Snapshot, activity: str) -> Text:
    if (reason := snapshot.unread_reasons.get("pods")) is not None:
        return quote_message(reason)
    remaining = [host for host in snapshot.hosts if not host.has_ended]
    return Text("{pods:pod} " + activity, pods=len(remaining))


def _explain_deleting(snapshot: Snapshot) -> Answer:
    evidence = describe_terminating_namespace(snapshot.ending_namespace)
    metadata = snapshot.jobset["metadata"]
    if "deletionTimestamp" in metadata and (finalizers := metadata.get("finalizers")):
        evidence = (Text("finalizers: {finalizers}", finalizers=list(finalizers)), *evidence)
    headline = Text("is being deleted")
    if snapshot.ending_namespace is not None:
        headline += Text(" with its namespace {namespace}", namespace=snapshot.namespace)
    if (stuck_object := _find_kept_pods(snapshot) or find_stuck_object(snapshot)) is not None:
        headline += Text(", but is blocked: {what}", what=stuck_object.description)
        return Answer("stuck", headline, evidence, stuck_object.next_step)
    pods = _count_pods_left(snapshot, "still terminating")
    if "pods" not in snapshot.unread_reasons and all(host.has_ended for host in snapshot.hosts):
        pods = Text("its pods have ended")
    headline += Text(": {pods}", pods=pods)
    if snapshot.ending_namespace is None:
        return Answer("deleting", headline, evidence)
    step = advise_wait("wait, and submit it to another namespace: -n NAMESPACE.")
    return Answer("namespace-terminating", headline, evidence, step)


def _find_kept_pods(snapshot: Snapshot) -> StuckObject | None:
    """Return the ended pods that a Job keeps in a namespace that is being deleted.

    Kubernetes deletes the pods of such a namespace before its Jobs. A Job keeps ended pods until it
    has created their replacements, which the namespace does not allow.
    """
    ended_hosts = [host for host in snapshot.hosts if host.is_leaving and host.has_ended]
    is_deleted = "deletionTimestamp" in snapshot.jobset["metadata"]
    if snapshot.ending_namespace is None or is_deleted or len(ended_hosts) < len(snapshot.hosts):
        return None
    ages_s = [seconds_since(host.ends_at, snapshot.now) or 0.0 for host in ended_hosts]
    if min(ages_s, default=0.0) < _KEPT_AFTER_S:
        return None
    template = "its Job keeps {pods:pod} that ended, since it cannot make them again there"
    delete = launcher_command("delete", JOB_NAME, "--yes")
    step = advise_run("{delete}; the rest of the namespace goes then.", delete=delete)
    return StuckObject(Text(template, pods=len(ended_hosts)), step)


def describe_terminating_namespace(namespace: Obj | None) -> Evidence:
    """Return the reasons why a namespace that is being deleted still exists, from its status."""
    if namespace is None:
        return ()
    reasons: list[str | Text] = [
        condition["message"]
        for condition in namespace.get("status", {}).get("conditions", ())
        if condition.get("status") == "True" and condition.get("message")
    ] or [Text("its status names nothing that is left")]
    template, name = "Namespace {name} is Terminating: {why}", namespace["metadata"]["name"]
    return tuple(Text(template, name=name, why=reason) for reason in reasons)


# --- blocked deletions ----------------------------------------------------------------------------


class StuckObject(NamedTuple):
    """An object whose deletion is blocked, and what to do about it."""

    description: Text
    next_step: NextStep


def find_stuck_object(snapshot: Snapshot) -> StuckObject | None:
    """Return the job's first object whose deletion is blocked."""
    objects = [
        *(("pod", pod) for pod in snapshot.pods),
        *(("Job", job) for job in snapshot.jobs),
        ("JobSet", snapshot.jobset),
    ]
    stuck_object = first_stuck_object(
        objects, snapshot.now, snapshot.silent_node, snapshot.deleted_node
    )
    return stuck_object or _find_uncollected(snapshot)


def first_stuck_object(
    objects: Sequence[tuple[str, Obj]],
    now: datetime,
    silent_node: Obj | None = None,
    deleted_node: DeletedNode | None = None,
) -> StuckObject | None:
    """Return the first of these objects whose deletion is blocked.

    Args:
        objects: Kind and object, the kind as a word for messages.
        now: The current time.
        silent_node: A node that is not Ready, if one of the pods is on it.
        deleted_node: A node that no longer exists, if one of the pods is on it.
    """
    for kind, obj in objects:
        metadata = obj["metadata"]
        # The deletionTimestamp of a pod is the end of its grace period.
        late_s = seconds_since(metadata.get("deletionTimestamp"), now) or 0.0
        if late_s < _STUCK_AFTER_S:
            continue
        name, finalizers = metadata["name"], metadata.get("finalizers") or ()
        is_running_pod = kind == "pod" and obj["status"].get("phase") not in ("Succeeded", "Failed")
        node = obj["spec"].get("nodeName") if is_running_pod else None
        if node is not None and silent_node is not None and silent_node["metadata"]["name"] == node:
            return _pod_stuck_on_node(name, node, late_s, describe_silence(silent_node, now))
        if node is not None and deleted_node is not None and deleted_node.name == node:
            reason = describe_deletion(deleted_node, now)
            return StuckObject(
                _describe_late_pod(name, late_s, reason), advise_waiting_for_collection(name)
            )
        foreign_finalizers = [
            text for text in finalizers if text not in (*_KUBERNETES_FINALIZERS, JOB_TRACKING)
        ]
        if foreign_finalizers:
            template = "finalizer {finalizers} has kept {kind} {name} for {late:age}"
            description = Text(
                template, finalizers=foreign_finalizers, kind=kind, name=name, late=late_s
            )
            describe = kubectl_command("describe", kind.lower(), name)
            step = advise_ask("its owner must remove it: {describe}", describe=describe)
            return StuckObject(description, step)
        if node is not None:
            reason = Text("node {node} does not report that it has", node=node)
            return _pod_stuck_on_node(name, node, late_s, reason)
        if JOB_TRACKING in finalizers:
            template = (
                "pod {name} has ended, and the Job controller has not counted it for {late:age}"
            )
            return StuckObject(Text(template, name=name, late=late_s), ASK_ABOUT_CONTROLLERS)
    return None


def _describe_late_pod(pod: str, late_s: float, reason: Text) -> Text:
    template = "pod {pod} should have ended {late:age} ago, and {why}"
    return Text(template, pod=pod, late=late_s, why=reason)


def _pod_stuck_on_node(pod: str, node: str, late_s: float, reason: Text) -> StuckObject:
    # A pod is removed only after the kubelet of its node has reported that it has ended.
    step = advise_run(
        "if node {node} is gone for good: {delete_node}, or {delete_pod}; then its pods are made "
        "again on other nodes. If it comes back, it ends the pod itself.",
        node=node,
        delete_node=kubectl_command("delete", "node", node, is_namespaced=False),
        delete_pod=kubectl_command("delete", "pod", pod, "--force"),
    )
    return StuckObject(_describe_late_pod(pod, late_s, reason), step)


def describe_silence(node: Obj, now: datetime) -> Text:
    """Return "node a-1 has not answered since 12:03:11 UTC (2m ago): Kubelet stopped posting …"."""
    ready, template = find_condition(node, "Ready"), "node {name} has been NotReady{since}"
    if ready.get("status") == "Unknown":
        template = "node {name} has not answered{since}"
    since = _describe_time("since", ready.get("lastTransitionTime"), now)
    text = Text(template, name=node["metadata"]["name"], since=since)
    reason = (ready.get("message") or ready.get("reason") or "").rstrip(". \n")
    return text + (Text(": {why}", why=reason) if reason else EMPTY_TEXT)


def describe_deletion(node: DeletedNode, now: datetime) -> Text:
    """Return "node a-1 no longer exists: its object was deleted at 12:03:11 UTC (2m ago)"."""
    template = "node {name} no longer exists: its object was deleted{when}"
    return Text(template, name=node.name, when=_describe_time("at", node.since, now))


def _describe_time(preposition: str, timestamp: str | None, now: datetime) -> Text:
    if (time := parse_time(timestamp)) is None:
        return EMPTY_TEXT
    template = f" {preposition} {{at:%H:%M:%S}} UTC ({{ago:age}} ago)"
    return Text(template, at=time, ago=seconds_since(timestamp, now) or 0.0)


def advise_waiting_for_collection(pod: str) -> NextStep:
    """Return the advice to wait for the garbage collection of a pod on a deleted node.

    The pod garbage collector looks every 20 s for nodes that have been missing for 40 s (podgc of
    Kubernetes 1.35).
    """
    return advise_wait(
        "wait: Kubernetes' pod garbage collector deletes the pods of a node that does not exist "
        "within about a minute, and they are created again on other nodes; sooner: {delete}",
        delete=kubectl_command("delete", "pod", pod, "--force"),
    )


def _find_uncollected(snapshot: Snapshot) -> StuckObject | None:
    """Return the deleted JobSet if the garbage collector has not begun to delete its Jobs."""
    deleted_at = snapshot.jobset["metadata"].get("deletionTimestamp")
    late_s = seconds_since(deleted_at, snapshot.now) or 0.0
    jobs = [job["metadata"] for job in snapshot.jobs]
    remaining_names = [metadata["name"] for metadata in jobs if "deletionTimestamp" not in metadata]
    if late_s < _UNCOLLECTED_AFTER_S or not remaining_names or "pods" in snapshot.unread_reasons:
        return None
    template = "the garbage collector has not deleted its Job {name} in {late:age}"
    return StuckObject(Text(template, name=remaining_names[0], late=late_s), ASK_ABOUT_CONTROLLERS)
