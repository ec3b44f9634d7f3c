"""A job that is done, stopped or being deleted. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from jaxlaunch.launcher.diagnose.explain import unread
from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line
from jaxlaunch.launcher.jobs.status.job_status import State, is_stopped_in_queue, status_of
from jaxlaunch.launcher.jobs.status.snapshot import DeletedNode, Snapshot
from jaxlaunch.launcher.kubernetes.labels import TRACKED
from jaxlaunch.launcher.kubernetes.objects import Obj, age, condition, moment, seconds_since
from jaxlaunch.launcher.wording import count


def over(snapshot: Snapshot) -> Answer | None:
    """Done, deleted or stopped."""
    status = status_of(snapshot)
    if status.state is State.DELETING:
        return _deleting(snapshot)
    if status.state is State.DONE:
        return _done(snapshot)
    if status.state in (State.STOPPING, State.STOPPED):
        return _stopped(snapshot, status.state)
    if status.state is State.SUSPENDED and "pods" in snapshot.not_read:
        return unread.stopped(snapshot)
    return None


def _deleting(snapshot: Snapshot) -> Answer:
    left = [host for host in snapshot.hosts if not host.has_ended]
    pods = f"{count(len(left), 'pod')} still terminating" if left else "its pods have ended"
    pods = unread.why(snapshot, "pods") or pods
    finalizers = snapshot.jobset["metadata"].get("finalizers") or ()
    own = (f"finalizers: {', '.join(finalizers)}",) if finalizers else ()
    evidence = (*own, *terminating(snapshot.ending_namespace))
    whole = "" if snapshot.ending_namespace is None else f" with its namespace {snapshot.namespace}"
    if (held := stuck(snapshot)) is not None:
        return Answer("stuck", f"is being deleted{whole}, but is blocked: {held.what}", evidence, held.move)
    if not whole:
        return Answer("deleting", f"is being deleted: {pods}", evidence)
    move = "wait, and submit it to another namespace: -n NAMESPACE."
    return Answer("namespace-terminating", f"is being deleted{whole}: {pods}", evidence, move)


def kept_in_namespace(snapshot: Snapshot) -> Answer | None:
    """Its namespace is being deleted, pods before Jobs, and its Job keeps pods that ended until it has made them again,
    which it cannot there."""
    left = [host for host in snapshot.hosts if host.is_leaving and host.has_ended]
    if snapshot.ending_namespace is None or not left:
        return None
    where, pods = snapshot.namespace, count(len(left), "pod")
    headline = (
        f"is being deleted with its namespace {where}, but is blocked: its Job keeps {pods} that ended, since it "
    )
    headline += "cannot make them again there"
    move = f"launcher delete {snapshot.name}; the rest of the namespace goes then."
    return Answer("stuck", headline, terminating(snapshot.ending_namespace), move)


def terminating(namespace: Obj | None) -> tuple[str, ...]:
    """What still keeps a namespace that is being deleted, as its own status says it."""
    if namespace is None:
        return ()
    found = namespace.get("status", {}).get("conditions", ())
    left = [one_line(one["message"]) for one in found if one.get("status") == "True" and one.get("message")]
    name = namespace["metadata"]["name"]
    return tuple(f"Namespace {name} is Terminating: {why}" for why in left or ["its status names nothing that is left"])


class Stuck(NamedTuple):
    """What does not go although its time is over, and what to do about it."""

    what: str
    move: str


def stuck(snapshot: Snapshot) -> Stuck | None:
    """The first object of the job that is deleted and kept: by a finalizer, or because its node does not answer."""
    own = (
        [("pod", one) for one in snapshot.pods],
        [("Job", one) for one in snapshot.jobs],
        [("JobSet", snapshot.jobset)],
    )
    objects = tuple(itertools.chain(*own))
    return kept(objects, snapshot.now, snapshot.silent_node, snapshot.deleted_node) or _uncollected(snapshot)


def kept(
    objects: Sequence[tuple[str, Obj]],
    now: datetime,
    silent_node: Obj | None = None,
    deleted_node: DeletedNode | None = None,
) -> Stuck | None:
    """The first of these objects, each with its kind, that is deleted and kept."""
    for kind, one in objects:
        metadata = one["metadata"]
        late_s = seconds_since(metadata.get("deletionTimestamp"), now) or 0.0  # of a pod, after its grace
        if late_s < _STUCK_S:
            continue
        name, finalizers = metadata["name"], metadata.get("finalizers") or ()
        node = None if kind != "pod" or _has_ended(one) else one["spec"].get("nodeName")
        if node is not None and silent_node is not None and silent_node["metadata"]["name"] == node:
            return _on_its_node(name, node, late_s, silence(silent_node, now))
        if node is not None and deleted_node is not None and deleted_node.name == node:
            what = f"pod {name} should have ended {age(late_s)} ago, and {deletion(deleted_node, now)}"
            return Stuck(what, collection(name))
        if keeps := [text for text in finalizers if text not in (*_WAITS, TRACKED)]:
            what = f"finalizer {', '.join(keeps)} has kept {kind} {name} for {age(late_s)}"
            return Stuck(what, f"its owner must remove it: kubectl describe {kind.lower()} {name}")
        if node is not None:
            return _on_its_node(name, node, late_s, f"node {node} does not report that it has")
        if TRACKED in finalizers:
            what = f"pod {name} has ended, and the Job controller has not counted it for {age(late_s)}"
            return Stuck(what, KUBE_CONTROLLERS)
    return None


def _has_ended(pod: Obj) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _on_its_node(name: str, node: str, late_s: float, why: str) -> Stuck:
    """Only the kubelet of its node says that a pod has ended; nothing else takes the pod away."""
    what = f"pod {name} should have ended {age(late_s)} ago, and {why}"
    move = (
        f"if node {node} is gone for good: kubectl delete node {node}, or kubectl delete pod {name} --force; then its "
        "pods are made again on other nodes. If it comes back, it ends the pod itself."
    )
    return Stuck(what, move)


def silence(node: Obj, now: datetime) -> str:
    """ "node a-1 has not answered since 12:03:11 UTC (2m ago): Kubelet stopped posting node status."."""
    found = condition(node, "Ready")
    verb = "has not answered" if found.get("status") == "Unknown" else "has been NotReady"
    at = moment(found.get("lastTransitionTime"))
    since = "" if at is None else f" since {at:%H:%M:%S} UTC ({age(seconds_since(at.isoformat(), now) or 0.0)} ago)"
    why = one_line(found.get("message") or found.get("reason") or "")
    return f"node {node['metadata']['name']} {verb}{since}" + (f": {why.rstrip('.')}" if why else "")


def deletion(node: DeletedNode, now: datetime) -> str:
    """ "node a-1 no longer exists: its object was deleted at 12:03:11 UTC (2m ago)"."""
    at = moment(node.since)
    when = "" if at is None else f" at {at:%H:%M:%S} UTC ({age(seconds_since(node.since, now) or 0.0)} ago)"
    return f"node {node.name} no longer exists: its object was deleted{when}"


def collection(pod: str) -> str:
    """What becomes of a pod whose node is deleted.

    The pod garbage collector looks every 20 s for nodes that have been missing for 40 s (podgc of 1.35).
    """
    return (
        "wait: Kubernetes' pod garbage collector deletes the pods of a node that does not exist within about a minute, "
        f"and they are made again on other nodes; sooner: kubectl delete pod {pod} --force"
    )


def _uncollected(snapshot: Snapshot) -> Stuck | None:
    """The garbage collector has not begun with what a deleted JobSet owns."""
    late_s = seconds_since(snapshot.jobset["metadata"].get("deletionTimestamp"), snapshot.now) or 0.0
    alive = [one["metadata"]["name"] for one in snapshot.jobs if "deletionTimestamp" not in one["metadata"]]
    if late_s < _UNCOLLECTED_S or not alive or "pods" in snapshot.not_read:
        return None
    return Stuck(f"the garbage collector has not deleted its Job {alive[0]} in {age(late_s)}", KUBE_CONTROLLERS)


KUBE_CONTROLLERS = (
    "ask the cluster administrator whether kube-controller-manager, which has the Job controller, runs, and what its "
    "log says of the Job."
)
_STUCK_S = 30.0  # controllers remove their own finalizers within seconds
_UNCOLLECTED_S = 60.0
_WAITS = ("foregroundDeletion", "orphan")  # Kubernetes' own: it waits for what the object owns


def _done(snapshot: Snapshot) -> Answer:
    status = status_of(snapshot)
    parts = [f"is done: all of {count(status.hosts, 'host')}" if status.hosts > 1 else "is done"]
    if status.step is not None:
        parts.append(f"step {status.step}")
    if status.lasted_s is not None:
        parts.append(f"in {age(status.lasted_s)}")
    evidence = _numbers(snapshot)
    return Answer("done", ", ".join(parts), evidence)


def _numbers(snapshot: Snapshot) -> tuple[str, ...]:
    """The last metrics that rank 0 reported, as far as they are numbers."""
    beat = snapshot.report.heartbeat
    metrics = {} if beat is None else beat.metrics or {}
    texts = [f"{name} {value:.6g}" for name, value in metrics.items() if isinstance(value, int | float)]
    return (", ".join(texts),) if texts else ()


# Why Kueue deactivates a Workload.
_DEACTIVATED = {
    "DeactivatedDueToRequeuingLimitExceeded": "its pods were repeatedly not ready in time",
    "DeactivatedDueToMaximumExecutionTimeExceeded": "its maximum execution time was exceeded",
    "DeactivatedDueToAdmissionCheck": "an admission check rejected it",
}


def _stopped(snapshot: Snapshot, state: State) -> Answer:
    """Suspended, and nothing but a submit resumes it."""
    saved = _saved(snapshot)
    left = [host for host in snapshot.hosts if not host.has_ended]
    if state is State.STOPPING:
        pods = unread.why(snapshot, "pods") or f"{count(len(left), 'pod')} still saving"
        return Answer("stopping", f"is stopping: {pods}", saved)
    evicted = condition(snapshot.workload or {}, "Evicted")
    if is_stopped_in_queue(snapshot) and evicted.get("reason", "") in _DEACTIVATED:
        why = _DEACTIVATED[evicted["reason"]]
        evidence = (*saved, f"Workload: {one_line(evicted.get('message', ''))}")
        return Answer("given-up", f"was deactivated by Kueue: {why}", evidence)
    return Answer("stopped", f"is stopped{_saved_step(snapshot)}", saved)


def _saved_step(snapshot: Snapshot) -> str:
    """ "; step 120 is saved", or the verdict of its last pods."""
    report = snapshot.report
    if report.committed is not None:
        return f"; step {report.committed} is saved"
    return "" if report.verdict is None else f"; {one_line(report.verdict.verdict.message)}"


def _saved(snapshot: Snapshot) -> tuple[str, ...]:
    """The verdict of the attempt that was stopped."""
    verdict = snapshot.report.verdict
    return () if verdict is None else (verdict.title,)
