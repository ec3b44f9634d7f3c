"""A job's queue and priority: the LocalQueue, its ClusterQueue and quota, the priority class. Pure.

`launcher submit` and `launcher doctor` judge queues here alone; launcher/kubernetes/queues reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from jaxlaunch.launcher.diagnose.doctor.controllers import matches
from jaxlaunch.launcher.diagnose.doctor.finding import ASK_ADMIN, Finding, Findings, fail, fail_admin, ok, unknown, warn
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.kubernetes import queues, requests
from jaxlaunch.launcher.kubernetes.kinds import WORKLOAD_PRIORITY_CLASSES
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.quantity import amount
from jaxlaunch.launcher.wording import either

PODS = "pods"  # a resource to Kueue, where a ClusterQueue covers it


def local(name: str, namespace: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """Whether the LocalQueue exists and is active; `others` are the namespace's LocalQueues."""
    if found is None:
        return fail(
            "LocalQueue {name} does not exist in namespace {namespace}",
            "Kueue never starts a job of a queue that does not exist.",
            "use {others}." if others else f"{ASK_ADMIN} create a LocalQueue in this namespace.",
            name=name,
            namespace=namespace,
            others=either(others) if others else "",
        )
    behind = queues.cluster_queue_of(found)
    return _inactive(f"LocalQueue {name}", found) or ok(
        "LocalQueue {name} is active, on ClusterQueue {behind}", name=name, behind=behind
    )


def _inactive(name: str, queue: Obj) -> Finding | None:
    found = queues.inactive(queue)
    if found is None:
        return None
    if found.stop_policy is not None:
        what, fix = "{name} is stopped (stopPolicy: {policy})", f"{ASK_ADMIN} resume it."
        return fail_admin(what, "Kueue admits nothing from it.", fix, name=name, policy=found.stop_policy)
    reason = found.message or found.reason or Text("no reason is given")
    what, why = "{name} is inactive", "Kueue admits nothing from it: {reason}"
    return fail_admin(what, why, f"{ASK_ADMIN} fix what the message names.", name=name, reason=reason)


def cluster_queue(
    name: str,
    found: Obj | None,
    namespace_labels: Mapping[str, str] | None,
    requested: Mapping[str, Decimal],
    pods: int,
) -> Findings:
    """The ClusterQueue: active, open to the namespace, with quota of each resource, and large enough for the job."""
    if found is None:
        fix = f"{ASK_ADMIN} create it."
        yield fail_admin("ClusterQueue {name} does not exist", "the job's LocalQueue points to it.", fix, name=name)
        return
    if (inactive := _inactive(f"ClusterQueue {name}", found)) is not None:
        yield inactive
    selector = found["spec"].get("namespaceSelector")
    if selector is None or (namespace_labels is not None and not matches(selector, namespace_labels)):
        what = "ClusterQueue {name} does not accept this namespace"
        why = "its namespaceSelector does not match, so Kueue admits nothing from here."
        yield fail_admin(what, why, f"{ASK_ADMIN} extend namespaceSelector.", name=name)
    covered = queues.covered(found)
    missing = [resource for resource in requested if resource not in covered]
    for resource in missing:
        yield fail_admin(
            "ClusterQueue {name} does not cover {resource}, of which the job requests {requested}",
            "Kueue never admits the job.",
            ASK_ADMIN + " add it to coveredResources ({covered}).",
            name=name,
            resource=resource,
            requested=requests.written(resource, requested[resource]),
            covered=list(covered) or Text("none"),
        )
    if not missing:
        yield _large_enough(name, found, {**requested, **({PODS: Decimal(pods)} if PODS in covered else {})})


def _large_enough(name: str, found: Obj, requested: Mapping[str, Decimal]) -> Finding:
    """Whether the job fits into one flavor of the ClusterQueue when nothing else uses it."""
    largest = largest_quota(found)
    over = {resource: most for resource, most in largest.items() if requested.get(resource, 0) > most}
    if not over:
        covered = list(queues.covered(found)) or Text("nothing")
        what = "ClusterQueue {name} covers {covered}" + (", all that the job requests" if requested else "")
        return ok(what, name=name, covered=covered)
    lacking = [
        Text(
            "{requested} of {resource} (quota {quota})",
            requested=requests.written(resource, requested[resource]),
            resource=resource,
            quota=requests.written(resource, most),
        )
        for resource, most in over.items()
    ]
    what, fields = "ClusterQueue {name} is too small: the job requests {lacking}", {"name": name, "lacking": lacking}
    if found["spec"].get("cohortName") or found["spec"].get("cohort"):
        why = "the rest must be borrowed from its cohort."
        return warn(what, why, "request less, or wait until the cohort has enough.", **fields)
    return fail_admin(what, "the job would wait forever.", f"request less, or {ASK_ADMIN} raise the quota.", **fields)


def largest_quota(found: Obj) -> dict[str, Decimal]:
    """Resource → the largest nominal quota that one flavor of a ClusterQueue has; 0 for a covered one without any."""
    most = dict.fromkeys(queues.covered(found), Decimal(0))
    for quota in queues.quotas(found):
        most[quota.resource] = max(most[quota.resource], amount(quota.nominal))
    return most


def quota_not_visible(name: str) -> Finding:
    """A ClusterQueue that the user may not read."""
    why = "you have no permission to read ClusterQueues."
    return unknown("the quota of ClusterQueue {name} is not known", why, name=name)


def priority(kind: str, name: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """Whether the priority class exists; `others` are those of the cluster."""
    if found is not None:
        return ok("{kind} {name} exists, value {value}", kind=kind, name=name, value=found.get("value"))
    fix = "use priority: {others}." if others else f"{ASK_ADMIN} create it."
    is_kueue_s = kind == WORKLOAD_PRIORITY_CLASSES.kind
    why = "Kueue does not admit a job that names it." if is_kueue_s else "pods that name it are rejected."
    listed = either(others) if others else ""
    return fail("{kind} {name} does not exist", why, fix, kind=kind, name=name, others=listed)
