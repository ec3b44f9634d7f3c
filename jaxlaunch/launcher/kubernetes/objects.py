"""What API objects report of themselves, and the parts of them that we keep. Pure.

There may be thousands of pods, nodes and events. A pod is some 8 kB of JSON, of which we read less than 1 kB: each is
cut down as its page of the list arrives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from jaxlaunch.launcher.kubernetes.labels import (
    GENERATION_LABEL,
    INDEX_LABEL,
    NAME_LABEL,
    REPLICATED_LABEL,
    SLICE_LABEL,
)

# An API object, as its JSON.
Obj = Mapping[str, Any]
# Between this machine's clock and the server's; beyond, ages mislead.
SKEW_S = 30.0


def condition(obj: Obj, kind: str) -> Obj:
    """Return the condition of that type; an empty one where it was never set."""
    conditions = obj.get("status", {}).get("conditions") or ()
    return next((state for state in conditions if state["type"] == kind), {})


def is_true(obj: Obj, kind: str) -> bool:
    """Return whether the condition of that type has status True."""
    return condition(obj, kind).get("status") == "True"


# --- JobSets ----------------------------------------------------------------------------------------------------------


def replicated_jobs(jobset: Obj) -> list[Obj]:
    """Return the replicated jobs of a JobSet."""
    return list(jobset.get("spec", {}).get("replicatedJobs") or ())


def terminal_state(jobset: Obj) -> str | None:
    """Return Completed or Failed; None while the JobSet may still run."""
    return jobset.get("status", {}).get("terminalState") or None


def is_suspended(jobset: Obj) -> bool:
    """Return whether the JobSet is suspended: by Kueue until it admits the job, or by whoever stopped it."""
    return bool(jobset.get("spec", {}).get("suspend"))


def pod_template(jobset: Obj) -> Obj:
    """Return the pod template of a JobSet's first replicated job; ours have but one."""
    first = next(iter(replicated_jobs(jobset)), {})
    template: Obj = first.get("template", {}).get("spec", {}).get("template", {})
    return template


# --- times ------------------------------------------------------------------------------------------------------------


def parse_time(text: str | None) -> datetime | None:
    """Parse a time of the API: seconds in metadata, microseconds in leases and newer events."""
    return None if not text else datetime.fromisoformat(text)


def seconds_since(text: str | None, now: datetime) -> float | None:
    """Return how long ago that was; never negative, however the clocks differ."""
    then = parse_time(text)
    return None if then is None else max(0.0, (now - then).total_seconds())


def ahead_s(before: datetime, there: datetime, after: datetime) -> float:
    """Return how far this machine's clock is at least ahead of the server's; less than 0 where it is behind.

    Args:
        before: The time here before the request.
        there: The server's time, which it gives to the second.
        after: The time here after the request.
    """
    ahead, behind = (before - there).total_seconds() - 1, (there - after).total_seconds()
    return ahead if ahead > 0 else -max(behind, 0.0)


def format_age(seconds: float) -> str:
    """Return a span as kubectl writes ages: 95s, 3m20s, 47m, 5h10m, 3d."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return f"{minutes}m{whole % 60}s" if whole % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{days}d"


# --- Kueue's LocalQueues and ClusterQueues, read through these functions alone ----------------------------------------


class InactiveQueue(NamedTuple):
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


def cluster_queue_name(local_queue: Obj | None) -> str | None:
    """Return the ClusterQueue that a LocalQueue points to."""
    name = (local_queue or {}).get("spec", {}).get("clusterQueue")
    return None if name is None else str(name)


def inactive_state(queue: Obj) -> InactiveQueue | None:
    """Return why a LocalQueue or a ClusterQueue admits nothing; None where it does."""
    active, policy = condition(queue, "Active"), queue.get("spec", {}).get("stopPolicy", "None")
    stop_policy = None if policy == "None" else policy
    if active.get("status") == "False":
        return InactiveQueue(stop_policy, active.get("reason", ""), active.get("message", ""))
    return None if stop_policy is None else InactiveQueue(stop_policy, "", "")


def queue_quotas(cluster_queue: Obj) -> Iterator[Quota]:
    """Yield the quota of each resource in each flavor, in the ClusterQueue's order."""
    reserved = {
        (flavor["name"], resource["name"]): str(resource["total"])
        for flavor in cluster_queue.get("status", {}).get("flavorsReservation") or ()
        for resource in flavor.get("resources") or ()
    }
    for group in cluster_queue.get("spec", {}).get("resourceGroups") or ():
        for flavor in group.get("flavors") or ():
            for resource in flavor.get("resources") or ():
                key = flavor.get("name", ""), resource["name"]
                yield Quota(*key, str(resource["nominalQuota"]), reserved.get(key, "0"))


def covered_resources(cluster_queue: Obj) -> Sequence[str]:
    """Return the resources that a ClusterQueue has quota of, in its order."""
    groups = cluster_queue.get("spec", {}).get("resourceGroups") or ()
    covered = [resource for group in groups for resource in group.get("coveredResources") or ()]
    return list(dict.fromkeys([*covered, *(quota.resource for quota in queue_quotas(cluster_queue))]))


# --- the fields that we keep ------------------------------------------------------------------------------------------

# Characters; no termination message is longer.
MAX_MESSAGE = 4_096
MAX_KINDS_OF_EVENT = 200
# Objects that a folded event names.
MAX_NAMED = 8
# Events of normal operation. A thousand pods have thousands of them.
QUIET_EVENTS = ("Scheduled", "Pulled", "Created", "Started", "SuccessfulCreate", "SuccessfulDelete")

_CONDITION = ("type", "status", "reason", "message")
# The end of a pod's name, and numbers.
_RANDOM = re.compile(r"-[a-z0-9]{5}\b|\d+")


def trim_pod(pod: Obj) -> dict[str, Any]:
    """Keep of a pod its place in the gang, its node, and the states of its containers."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels = _keep(metadata.get("labels", {}), NAME_LABEL, GENERATION_LABEL, SLICE_LABEL, INDEX_LABEL, REPLICATED_LABEL)
    statuses = {
        kind: [_keep(one, "name", "image", "ready", "restartCount", "state", "lastState") for one in status[kind]]
        for kind in ("containerStatuses", "initContainerStatuses")
        if status.get(kind)
    }
    return {
        "metadata": _keep(metadata, "namespace", "name", "uid", "creationTimestamp", "deletionTimestamp", "finalizers")
        | {"labels": labels},
        "spec": _keep(spec, "nodeName", "schedulingGates")
        | (_limits(spec) if spec.get("nodeName") else _requests(spec)),
        "status": _keep(status, "phase", "reason", "message", "startTime")
        | {"conditions": [_keep(state, *_CONDITION) for state in status.get("conditions", ())]}
        | statuses,
    }


def _requests(spec: Obj) -> dict[str, Any]:
    """Keep what admission made of the requests of a pod without a node: defaults, sidecars, overhead."""
    containers = {
        kind: [_keep(container, "name", "resources", "restartPolicy") for container in spec[kind]]
        for kind in ("containers", "initContainers")
        if spec.get(kind)
    }
    return containers | _keep(spec, "overhead", "resources", "nodeSelector", "tolerations")


def _limits(spec: Obj) -> dict[str, Any]:
    """Keep the memory limits of a pod's containers, and which of them are sidecars."""
    kept: dict[str, Any] = {}
    for kind in ("containers", "initContainers"):
        for container in spec.get(kind) or ():
            limits = _keep((container.get("resources") or {}).get("limits") or {}, "memory")
            fields = _keep(container, "restartPolicy") | ({"resources": {"limits": limits}} if limits else {})
            if fields:
                kept.setdefault(kind, []).append({"name": container["name"], **fields})
    return kept


def trim_node(node: Obj) -> dict[str, Any]:
    """Keep of a node what the scheduler reads, as far as we do, and the conditions that are not as they should be."""
    conditions = node.get("status", {}).get("conditions") or ()
    unwell = [
        _keep(state, *_CONDITION) for state in conditions if (state["type"] == "Ready") != (state["status"] == "True")
    ]
    return {
        "metadata": _keep(node["metadata"], "name", "labels"),
        "spec": _keep(node.get("spec", {}), "taints", "unschedulable"),
        "status": _keep(node.get("status", {}), "allocatable") | ({"conditions": unwell} if unwell else {}),
    }


def _keep(obj: Obj, *names: str) -> dict[str, Any]:
    kept = {name: obj[name] for name in names if obj.get(name) not in (None, "", [], {})}
    return {name: value[:MAX_MESSAGE] if isinstance(value, str) else value for name, value in kept.items()}


def trim_event(event: Obj) -> dict[str, Any]:
    """Keep of an event of either API its object, message, count, and when it was last seen."""
    series, about = event.get("series") or {}, event.get("involvedObject") or {}
    last = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    last = last or event["metadata"].get("creationTimestamp") or ""
    return {
        "type": event.get("type", ""),
        "reason": event.get("reason", ""),
        "message": (event.get("message") or "")[:MAX_MESSAGE],
        "kind": about.get("kind", ""),
        "names": [about.get("name", "")],
        "count": max(1, series.get("count") or event.get("count") or 1),
        # To the second: newer events have microseconds, which do not compare with the others as text.
        "last": f"{last[:19]}Z" if last else "",
        "by": event.get("reportingComponent") or (event.get("source") or {}).get("component", ""),
    }


def fold_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Fold events with the same reason and message into one, the newest first: a thousand pods make one line."""
    folded: dict[tuple[str, str, str], dict[str, Any]] = {}
    for event in events:
        key = event["kind"], event["reason"], _RANDOM.sub("", event["message"])
        same = folded.get(key)
        if same is None:
            folded[key] = dict(event)
            if len(folded) > MAX_KINDS_OF_EVENT:
                del folded[min(folded, key=lambda key: folded[key]["last"])]
            continue
        newer = max(event, same, key=lambda event: event["last"])
        names = list(dict.fromkeys([*same["names"], *event["names"]]))[:MAX_NAMED]
        folded[key] = {**newer, "names": names, "count": event["count"] + same["count"]}
    return sorted(folded.values(), key=lambda event: event["last"], reverse=True)
