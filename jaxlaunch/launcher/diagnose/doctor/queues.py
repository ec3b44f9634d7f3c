"""A job's queue and priority: the LocalQueue, its ClusterQueue and quota, the priority class. Pure.

`launcher submit` and `launcher doctor` judge queues here alone; launcher/kubernetes/queues reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from jaxlaunch.launcher.diagnose.doctor.controllers import matches
from jaxlaunch.launcher.diagnose.doctor.finding import ASK_ADMIN, Finding, Findings, fail, fail_admin, ok, unknown, warn
from jaxlaunch.launcher.kubernetes import queues, requests
from jaxlaunch.launcher.kubernetes.kinds import WORKLOAD_PRIORITY_CLASSES
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.quantity import amount
from jaxlaunch.launcher.wording import either

PODS = "pods"  # a resource to Kueue, where a ClusterQueue covers it


def local(name: str, namespace: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """Whether the LocalQueue exists and is active; `others` are the namespace's LocalQueues."""
    if found is None:
        fix = f"use {either(others)}." if others else f"{ASK_ADMIN} create a LocalQueue in this namespace."
        what = f"LocalQueue {name} does not exist in namespace {namespace}"
        return fail(what, "Kueue never starts a job of a queue that does not exist.", fix)
    on = f"on ClusterQueue {queues.cluster_queue_of(found)}"
    return _inactive(f"LocalQueue {name}", found) or ok(f"LocalQueue {name} is active, {on}")


def _inactive(name: str, queue: Obj) -> Finding | None:
    found = queues.inactive(queue)
    if found is None:
        return None
    if found.stop_policy is not None:
        what = f"{name} is stopped (stopPolicy: {found.stop_policy})"
        return fail_admin(what, "Kueue admits nothing from it.", f"{ASK_ADMIN} resume it.")
    why = f"Kueue admits nothing from it: {found.message or found.reason or 'no reason is given'}"
    return fail_admin(f"{name} is inactive", why, f"{ASK_ADMIN} fix what the message names.")


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
        yield fail_admin(f"ClusterQueue {name} does not exist", "the job's LocalQueue points to it.", fix)
        return
    if (inactive := _inactive(f"ClusterQueue {name}", found)) is not None:
        yield inactive
    selector = found["spec"].get("namespaceSelector")
    if selector is None or (namespace_labels is not None and not matches(selector, namespace_labels)):
        what = f"ClusterQueue {name} does not accept this namespace"
        why = "its namespaceSelector does not match, so Kueue admits nothing from here."
        yield fail_admin(what, why, f"{ASK_ADMIN} extend namespaceSelector.")
    covered = queues.covered(found)
    missing = [resource for resource in requested if resource not in covered]
    for resource in missing:
        amount_text = requests.written(resource, requested[resource])
        what = f"ClusterQueue {name} does not cover {resource}, of which the job requests {amount_text}"
        fix = f"{ASK_ADMIN} add it to coveredResources ({', '.join(covered) or 'none'})."
        yield fail_admin(what, "Kueue never admits the job.", fix)
    if not missing:
        yield _large_enough(name, found, {**requested, **({PODS: Decimal(pods)} if PODS in covered else {})})


def _large_enough(name: str, found: Obj, requested: Mapping[str, Decimal]) -> Finding:
    """Whether the job fits into one flavor of the ClusterQueue when nothing else uses it."""
    largest = largest_quota(found)
    over = {resource: most for resource, most in largest.items() if requested.get(resource, 0) > most}
    if not over:
        listed = ", ".join(queues.covered(found)) or "nothing"
        return ok(f"ClusterQueue {name} covers {listed}" + (", all that the job requests" if requested else ""))
    lacking = ", ".join(
        f"{requests.written(each, requested[each])} of {each} (quota {requests.written(each, most)})"
        for each, most in over.items()
    )
    what = f"ClusterQueue {name} is too small: the job requests {lacking}"
    if found["spec"].get("cohortName") or found["spec"].get("cohort"):
        why = "the rest must be borrowed from its cohort."
        return warn(what, why, "request less, or wait until the cohort has enough.")
    return fail_admin(what, "the job would wait forever.", f"request less, or {ASK_ADMIN} raise the quota.")


def largest_quota(found: Obj) -> dict[str, Decimal]:
    """Resource → the largest nominal quota that one flavor of a ClusterQueue has; 0 for a covered one without any."""
    most = dict.fromkeys(queues.covered(found), Decimal(0))
    for quota in queues.quotas(found):
        most[quota.resource] = max(most[quota.resource], amount(quota.nominal))
    return most


def quota_not_visible(name: str) -> Finding:
    """A ClusterQueue that the user may not read."""
    return unknown(f"the quota of ClusterQueue {name} is not known", "you have no permission to read ClusterQueues.")


def priority(kind: str, name: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """Whether the priority class exists; `others` are those of the cluster."""
    if found is not None:
        return ok(f"{kind} {name} exists, value {found.get('value')}")
    fix = f"use priority: {either(others)}." if others else f"{ASK_ADMIN} create it."
    is_kueue_s = kind == WORKLOAD_PRIORITY_CLASSES.kind
    why = "Kueue does not admit a job that names it." if is_kueue_s else "pods that name it are rejected."
    return fail(f"{kind} {name} does not exist", why, fix)
