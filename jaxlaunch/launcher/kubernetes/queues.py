"""Kueue's LocalQueues and ClusterQueues: whether they are active, and their quota. Pure.

`launcher doctor`, `launcher submit` and `launcher explain` read queues through this file alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxlaunch.launcher.kubernetes.objects import Obj, condition


class Inactive(NamedTuple):
    """Why a queue admits nothing."""

    stop_policy: str | None  # Hold or HoldAndDrain, where somebody stopped it; else None
    reason: str  # of its condition Active; empty until Kueue has set that to False
    message: str


class Quota(NamedTuple):
    """Quota of one resource in one flavor of a ClusterQueue, as quantities are written."""

    flavor: str
    resource: str
    nominal: str
    reserved: str  # by admitted jobs


def cluster_queue_of(local: Obj | None) -> str | None:
    """The ClusterQueue that a LocalQueue points to."""
    found = (local or {}).get("spec", {}).get("clusterQueue")
    return None if found is None else str(found)


def inactive(queue: Obj) -> Inactive | None:
    """Why a LocalQueue or a ClusterQueue admits nothing; None where it does."""
    active, policy = condition(queue, "Active"), queue.get("spec", {}).get("stopPolicy", "None")
    stop_policy = None if policy == "None" else policy
    if active.get("status") == "False":
        return Inactive(stop_policy, active.get("reason", ""), active.get("message", ""))
    return None if stop_policy is None else Inactive(stop_policy, "", "")


def quotas(cluster_queue: Obj) -> Iterator[Quota]:
    """The quota of each resource in each flavor, in the ClusterQueue's order."""
    reserved = {
        (flavor["name"], resource["name"]): str(resource["total"])
        for flavor in cluster_queue.get("status", {}).get("flavorsReservation") or ()
        for resource in flavor.get("resources") or ()
    }
    for group in cluster_queue.get("spec", {}).get("resourceGroups") or ():
        for flavor in group.get("flavors") or ():
            for each in flavor.get("resources") or ():
                flavor_name, resource = flavor.get("name", ""), each["name"]
                used = reserved.get((flavor_name, resource), "0")
                yield Quota(flavor_name, resource, str(each["nominalQuota"]), used)


def covered(cluster_queue: Obj) -> Sequence[str]:
    """The resources that a ClusterQueue has quota of, in its order."""
    groups = cluster_queue.get("spec", {}).get("resourceGroups") or ()
    named = [resource for group in groups for resource in group.get("coveredResources") or ()]
    return list(dict.fromkeys([*named, *(quota.resource for quota in quotas(cluster_queue))]))
