"""What of the cluster would keep a job from running, asked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from launcher import kinds, placement, podsecurity
from launcher.cluster import ApiError, Cluster
from launcher.errors import ClusterError, UserError
from launcher.kinds import JOBSETS, NAMESPACES, PODS, Kind
from launcher.objects import Obj, condition, template
from launcher.wording import either

KINDS = {kind.kind: kind for kind in (JOBSETS, kinds.NETWORK_POLICIES, kinds.CONFIGMAPS)}  # that a job consists of


class Right(NamedTuple):
    """One thing that the user must be allowed to do."""

    verb: str
    kind: Kind
    subresource: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.kind.resource}" + (f"/{self.subresource}" if self.subresource else "")


def check(cluster: Cluster, manifests: Sequence[Obj], *, replace: bool, watch: bool) -> list[str]:
    """What a user should know of the job on this cluster. `watch`: its end is waited for, or its logs are shown.

    Raises UserError, or ClusterError where it is the cluster's to mend, with everything that is in its way.
    """
    jobset, namespace = manifests[0], str(manifests[0]["metadata"]["namespace"])
    served(cluster, JOBSETS, "JobSet 0.10 or newer")
    found: list[UserError] = []
    notes: list[str] = []
    for question in (
        _namespace(cluster, jobset, namespace),
        _rights(cluster, rights(manifests, replace=replace, watch=watch), namespace),
        _queue(cluster, jobset, namespace),
        _priority(cluster, jobset, namespace),
    ):
        for answer in question:
            notes.append(answer) if isinstance(answer, str) else found.append(answer)
    if found:
        raise _all(found)
    return notes


def served(cluster: Cluster, kind: Kind, wanted: str) -> None:
    """Raises ClusterError unless the server knows the kind at the version that we speak."""
    versions = cluster.served(kind.group)
    if kind.version not in versions:
        has = f"it serves {kind.group} {either(versions)}, not {kind.version}" if versions else f"it has no {kind.kind}"
        raise ClusterError(f"The cluster {cluster.context} lacks {wanted}: {has}.", "its owner installs it.")


def rights(manifests: Sequence[Obj], *, replace: bool, watch: bool) -> list[Right]:
    """What submitting needs."""
    needed = [Right("create", JOBSETS), Right("get", JOBSETS)]
    for manifest in manifests[1:]:
        kind = KINDS[manifest["kind"]]
        needed += [Right("create", kind), Right("get", kind)]
        if kind is kinds.CONFIGMAPS:
            needed.append(Right("patch", kind))
    if replace:
        needed.append(Right("delete", JOBSETS))
    if watch:
        needed += [Right(verb, kind) for kind in (JOBSETS, PODS) for verb in ("list", "watch")]
        needed.append(Right("get", PODS, "log"))
    return needed


def _rights(cluster: Cluster, needed: Sequence[Right], namespace: str) -> Iterator[UserError]:
    missing = [str(one) for one in needed if not cluster.may(*one[:2], namespace, subresource=one.subresource)]
    if missing:
        hint = "ask the namespace's owner for a Role with these verbs; `launcher doctor` lists all that are used."
        yield ClusterError(f"You may not do this in namespace {namespace}: {', '.join(missing)}.", hint)


def _namespace(cluster: Cluster, jobset: Obj, namespace: str) -> Iterator[UserError | str]:
    try:
        found = cluster.get(NAMESPACES, namespace)
    except ApiError as error:
        if error.status != 403:
            raise
        return  # few may look
    if found is None:
        yield UserError(f"The cluster has no namespace {namespace}.", "name one with namespace: or -n.")
    elif "deletionTimestamp" in found["metadata"]:
        yield UserError(f"Namespace {namespace} is being deleted.", "use another.")
    elif (level := found["metadata"].get("labels", {}).get(podsecurity.ENFORCE)) in podsecurity.LEVELS:
        for broken in podsecurity.violations(template(jobset), level):
            yield f"namespace {namespace} enforces Pod Security level {level}, and will refuse the pods: {broken}"


def _queue(cluster: Cluster, jobset: Obj, namespace: str) -> Iterator[UserError | str]:
    """Kueue would let a job wait for ever in a queue that does not exist."""
    name = jobset["metadata"]["labels"].get(placement.QUEUE)
    if name is None:
        return
    served(cluster, kinds.LOCAL_QUEUES, "Kueue 0.15 or newer, and the job names a queue")
    queue = cluster.get(kinds.LOCAL_QUEUES, name, namespace)
    if queue is None:
        known = [one["metadata"]["name"] for one in cluster.list(kinds.LOCAL_QUEUES, namespace)]
        hint = f"it has {either(known)}." if known else "it has none: its owner makes a LocalQueue."
        yield UserError(f"queue = {name}: namespace {namespace} has no such LocalQueue.", hint)
    elif (active := condition(queue, "Active")).get("status") == "False":
        yield f"queue {name} is not active, so the job will wait: {active.get('message', '')}"


def _priority(cluster: Cluster, jobset: Obj, namespace: str) -> Iterator[UserError | str]:
    in_queue = jobset["metadata"]["labels"].get(placement.PRIORITY)
    name, kind = in_queue or template(jobset)["spec"].get("priorityClassName"), kinds.PRIORITY_CLASSES
    if in_queue is not None:
        kind = kinds.WORKLOAD_PRIORITY_CLASSES
    if name is None:
        return
    try:
        if cluster.get(kind, name) is not None:
            return
        known = [one["metadata"]["name"] for one in cluster.list(kind)]
    except ApiError as error:
        if error.status != 403:
            raise
        yield f"whether {kind.kind} {name} exists is not known: you may not look."
        return
    hint = f"it has {either(known)}." if known else "it has none."
    yield UserError(f"priority = {name}: the cluster has no such {kind.kind}.", hint)


def _all(found: Sequence[UserError]) -> UserError:
    """One error for all; the cluster's when one of them is."""
    kind = ClusterError if any(isinstance(one, ClusterError) for one in found) else UserError
    return found[0] if len(found) == 1 else kind("\n".join(map(str, found)))
