"""Whether launcher manages a JobSet: checked before one is replaced, stopped or deleted."""

from __future__ import annotations

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import Obj

# Managers of fields that no person and no tool of theirs is; they are listed before the creator when they apply.
_CONTROLLERS = ("kueue", "jobset", "manager", "kube-controller-manager", "kubelet")


def own(cluster: Cluster, name: str, namespace: str) -> Obj:
    """The JobSet of that name. Raises UserError when there is none, or launcher does not manage it."""
    jobset = cluster.get(JOBSETS, name, namespace)
    if jobset is None:
        known = [one["metadata"]["name"] for one in cluster.list(JOBSETS, namespace) if hosts.is_ours(one)]
        hint = f"it has {', '.join(known)}." if known else "it has no job of launcher; -n names another namespace."
        raise UserError(f"Namespace {namespace} has no job {name}.", hint)
    if not hosts.is_ours(jobset):
        message = f"JobSet {name} in namespace {namespace} is not managed by launcher{whose(jobset)}."
        raise UserError(message, "change it with kubectl.")
    return jobset


def whose(obj: Obj) -> str:
    """Who created an object, by its metadata: `: created by kubectl-create at 2026-…`."""
    metadata = obj["metadata"]
    fields = [one for one in metadata.get("managedFields") or () if not one.get("subresource")]
    people = [one for one in fields if one.get("manager") not in _CONTROLLERS] or fields
    by = min(people, key=lambda one: str(one.get("time", "")))["manager"] if people else None
    return f": created by {by or 'an unknown client'} at {metadata.get('creationTimestamp', 'an unknown time')}"
