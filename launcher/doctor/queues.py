"""A queue of Kueue's: there, active, open to the namespace, covering and large enough for the job. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from launcher import demand
from launcher.finding import Finding, Findings, clusters, ok, unknown, warn, yours
from launcher.objects import Obj, condition
from launcher.quantity import amount
from launcher.symptoms.controllers import matches
from launcher.wording import either

PODS = "pods"  # which Kueue counts as a resource, where a queue covers it


def local(name: str, namespace: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """The LocalQueue itself."""
    if found is None:
        why = "Kueue would let the job wait for ever; submit refuses it."
        fix = f"use {either(others)}." if others else "its owner makes a LocalQueue here."
        return yours(f"queue {name}: namespace {namespace} has no such LocalQueue", why, fix)
    return _active("queue", name, found) or ok(f"queue {name} is active, on ClusterQueue {cluster_queue(found)}")


def cluster_queue(found: Obj) -> str:
    """The ClusterQueue that a LocalQueue leads to."""
    return str(found["spec"].get("clusterQueue", ""))


def _active(what: str, name: str, found: Obj) -> Finding | None:
    active = condition(found, "Active")
    stopped = found["spec"].get("stopPolicy", "None")
    if stopped != "None":
        return clusters(f"{what} {name} is stopped ({stopped})", "nothing in it is admitted.", "its owner resumes it.")
    if active.get("status") == "False":
        why = f"nothing in it is admitted: {active.get('message', 'Kueue does not say why')}"
        return clusters(f"{what} {name} is not active", why, "its owner mends what the message names.")
    return None


def whole(
    name: str, found: Obj | None, namespace_labels: Mapping[str, str] | None, asked: Mapping[str, Decimal], pods: int
) -> Findings:
    """The ClusterQueue: open to the namespace, covering what is asked, and ever able to give it."""
    if found is None:
        yield clusters(f"ClusterQueue {name} does not exist", "its LocalQueue leads nowhere.", "its owner makes it.")
        return
    if (inactive := _active("ClusterQueue", name, found)) is not None:
        yield inactive
    selector = found["spec"].get("namespaceSelector")
    if selector is None or (namespace_labels is not None and not matches(selector, namespace_labels)):
        why = "its namespaceSelector does not match, and Kueue admits nothing from here."
        yield clusters(f"ClusterQueue {name} is closed to this namespace", why, "its owner widens namespaceSelector.")
    covered = nominal(found)
    missing = [resource for resource in asked if resource not in covered]
    for resource in missing:
        what = f"ClusterQueue {name} does not cover {resource}, of which the job asks {_much(resource, asked)}"
        yield clusters(what, "Kueue admits no part of it.", f"its owner adds it to coveredResources: {_some(covered)}.")
    if not missing:
        yield _large_enough(name, found, covered, {**asked, **({PODS: Decimal(pods)} if PODS in covered else {})})


def _large_enough(
    name: str, found: Obj, covered: Mapping[str, Decimal | None], asked: Mapping[str, Decimal]
) -> Finding:
    """Whether an empty queue would hold the job, in one flavor."""
    over = {resource: most for resource, most in covered.items() if most is not None and asked.get(resource, 0) > most}
    if not over:
        return ok(f"ClusterQueue {name} covers {_some(covered)}" + (", all that is asked" if asked else ""))
    lacking = ", ".join(f"{_much(each, asked)} of {each}, at most {demand.written(each, over[each])}" for each in over)
    what = f"ClusterQueue {name} is too small for the job: it asks {lacking}"
    if found["spec"].get("cohortName") or found["spec"].get("cohort"):
        return warn(what, "what is beyond must be borrowed from its cohort.", "ask for less, or wait for the cohort.")
    return clusters(what, "it would wait for ever.", "ask for less, or its owner raises the quota.")


def nominal(found: Obj) -> dict[str, Decimal]:
    """Resource → the most of it that one flavor of a ClusterQueue has."""
    most: dict[str, Decimal] = {}
    for group in found["spec"].get("resourceGroups") or []:
        for resource in group.get("coveredResources") or []:
            most.setdefault(resource, Decimal(0))
        for flavor in group.get("flavors") or []:
            for each in flavor.get("resources") or []:
                quota = amount(str(each["nominalQuota"]))
                most[each["name"]] = max(most.get(each["name"], Decimal(0)), quota)
    return most


def _much(resource: str, asked: Mapping[str, Decimal]) -> str:
    return demand.written(resource, asked[resource])


def _some(covered: Mapping[str, object]) -> str:
    return ", ".join(covered) or "nothing"


def priority(kind: str, name: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """The priority class that the job names."""
    if found is not None:
        return ok(f"{kind} {name} exists, value {found.get('value')}")
    fix = f"use {either(others)}." if others else "its owner makes it."
    return yours(f"priority {name}: the cluster has no such {kind}", "pods that name it are refused.", fix)


def unseen(name: str) -> Finding:
    return unknown(f"what ClusterQueue {name} covers is not known", "you may not look at ClusterQueues.")
