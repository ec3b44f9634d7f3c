"""Accessors for API objects, and functions that trim them to the fields that jaxlaunch reads. Pure.

There may be thousands of pods, nodes and events. A pod is some 8 kB of JSON, and less than 1 kB of
it is used, so each object is trimmed as soon as its page of the list arrives.
"""

from __future__ import annotations

import email.utils
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from jaxlaunch.launcher.kubernetes.labels import (
    GENERATION_LABEL,
    INDEX_LABEL,
    NAME_LABEL,
    REPLICATED_LABEL,
    SLICE_LABEL,
    UID_LABEL,
)

# An API object, as its JSON.
Obj = Mapping[str, Any]
# Ages are misleading if this machine's clock differs by more from the server's.
MAX_SKEW_S = 30.0


def find_condition(obj: Obj, kind: str) -> Obj:
    """Return the condition of type `kind`, or an empty mapping if it was never set."""
    conditions = obj.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), {})


def is_condition_true(obj: Obj, kind: str) -> bool:
    """Return whether the condition of type `kind` has status True."""
    return find_condition(obj, kind).get("status") == "True"


# --- JobSets --------------------------------------------------------------------------------------


def replicated_jobs(jobset: Obj) -> list[Obj]:
    """Return the replicated jobs of a JobSet."""
    return list(jobset.get("spec", {}).get("replicatedJobs") or ())


def terminal_state(jobset: Obj) -> str | None:
    """Return Completed or Failed, or None while the JobSet may still run."""
    return jobset.get("status", {}).get("terminalState") or None


def is_suspended(jobset: Obj) -> bool:
    """Return whether the JobSet is suspended: stopped, or not admitted by Kueue."""
    return bool(jobset.get("spec", {}).get("suspend"))


def pod_template(jobset: Obj) -> Obj:
    """Return the pod template of a JobSet's first replicated job, or of its lead.

    The lead is the first role that ends the job.
    """
    jobs, lead = replicated_jobs(jobset), lead_name(jobset)
    first = jobs[0] if jobs else {}
    return _job_template(next((job for job in jobs if job.get("name") == lead), first))


def lead_name(jobset: Obj) -> str | None:
    """Return the name of the first replicated job that ends the JobSet, or None if all do."""
    policy = jobset.get("spec", {}).get("successPolicy") or {}
    return next(iter(policy.get("targetReplicatedJobs") or ()), None)


def pod_templates(jobset: Obj) -> list[Obj]:
    """Return the pod templates of all replicated jobs of a JobSet."""
    return [_job_template(job) for job in replicated_jobs(jobset)]


def _job_template(job: Obj) -> Obj:
    template: Obj = job.get("template", {}).get("spec", {}).get("template", {})
    return template


# --- times ----------------------------------------------------------------------------------------


def parse_time(text: str | None) -> datetime | None:
    """Parse a time of the API. Those of leases and newer events have microseconds."""
    return None if not text else datetime.fromisoformat(text)


def parse_http_date(text: str | None) -> datetime | None:
    """Parse the time in a header of HTTP. Return None if it is missing or invalid."""
    try:
        moment = email.utils.parsedate_to_datetime(text or "")
    except ValueError:
        return None
    # The offset -0000 has no time zone in Python. The times of HTTP are in UTC.
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def seconds_since(text: str | None, now: datetime) -> float | None:
    """Return the seconds since a time, and 0 if it appears to be in the future."""
    past_time = parse_time(text)
    return None if past_time is None else max(0.0, (now - past_time).total_seconds())


def clock_skew_s(sent_at: datetime, server_time: datetime, received_at: datetime) -> float:
    """Return the least possible skew of this machine's clock, negative if it is behind.

    The server's time has a resolution of one second.
    """
    ahead = (sent_at - server_time).total_seconds() - 1
    behind = (server_time - received_at).total_seconds()
    return ahead if ahead > 0 else -max(behind, 0.0)


def format_age(seconds: float) -> str:
    """Format a duration as kubectl formats ages: 95s, 3m20s, 47m, 5h10m, 3d."""
    total_s = int(seconds)
    minutes, hours, days = total_s // 60, total_s // 3600, total_s // 86400
    if total_s < 120:
        return f"{total_s}s"
    if minutes < 10:
        return f"{minutes}m{total_s % 60}s" if total_s % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{days}d"


# --- Kueue's LocalQueues and ClusterQueues --------------------------------------------------------


class InactiveQueue(NamedTuple):
    """The reason for which a queue admits no jobs."""

    # Hold or HoldAndDrain if somebody stopped the queue, else None.
    stop_policy: str | None
    # Reason of the condition Active, empty until Kueue sets it to False.
    reason: str
    message: str


class Quota(NamedTuple):
    """Quota of one resource in one flavor of a ClusterQueue, in Kubernetes quantities."""

    flavor: str
    resource: str
    nominal: str
    # What admitted jobs have reserved.
    reserved: str


def cluster_queue_name(local_queue: Obj | None) -> str | None:
    """Return the ClusterQueue that a LocalQueue points to."""
    name = (local_queue or {}).get("spec", {}).get("clusterQueue")
    return None if name is None else str(name)


def inactive_state(queue: Obj) -> InactiveQueue | None:
    """Return why a LocalQueue or a ClusterQueue admits no jobs, or None if it is active."""
    condition = find_condition(queue, "Active")
    policy = queue.get("spec", {}).get("stopPolicy", "None")
    stop_policy = None if policy == "None" else policy
    if condition.get("status") == "False":
        return InactiveQueue(stop_policy, condition.get("reason", ""), condition.get("message", ""))
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
    """Return the resources for which a ClusterQueue has quota, in its order."""
    groups = cluster_queue.get("spec", {}).get("resourceGroups") or ()
    resources = [resource for group in groups for resource in group.get("coveredResources") or ()]
    resources += [quota.resource for quota in queue_quotas(cluster_queue)]
    return list(dict.fromkeys(resources))


# --- trimming -------------------------------------------------------------------------------------

_POSITION_LABELS = (
    *(NAME_LABEL, UID_LABEL, GENERATION_LABEL),
    *(SLICE_LABEL, INDEX_LABEL, REPLICATED_LABEL),
)
_POD_FIELDS = (
    *("namespace", "name", "uid", "resourceVersion"),
    *("creationTimestamp", "deletionTimestamp", "finalizers"),
)
_STATUS_FIELDS = ("name", "image", "ready", "restartCount", "state", "lastState")
# The longest termination message of a container.
MAX_MESSAGE_CHARS = 4_096
# At most this many different events are kept.
MAX_EVENT_KINDS = 200
# A folded event lists the names of at most this many objects.
MAX_EVENT_NAMES = 8
# Events of normal operation. A large job has thousands of them.
QUIET_EVENTS = ("Scheduled", "Pulled", "Created", "Started", "SuccessfulCreate", "SuccessfulDelete")

_CONDITION_FIELDS = ("type", "status", "reason", "message")
# Random suffixes of pod names, and numbers.
_RANDOM_PARTS = re.compile(r"-[a-z0-9]{5}\b|\d+")


def trim_pod(pod: Obj) -> dict[str, Any]:
    """Trim a pod to its position in the gang, its node, and the states of its containers."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels = _select_fields(metadata.get("labels", {}), *_POSITION_LABELS)
    resources = _trim_limits(spec) if spec.get("nodeName") else _trim_requests(spec)
    conditions = _select_each(status.get("conditions", ()), *_CONDITION_FIELDS)
    return {
        "metadata": _select_fields(metadata, *_POD_FIELDS) | {"labels": labels},
        "spec": _select_fields(spec, "nodeName", "schedulingGates") | resources,
        "status": _select_fields(status, "phase", "reason", "message", "startTime")
        | {"conditions": conditions}
        | {
            kind: _select_each(status[kind], *_STATUS_FIELDS)
            for kind in ("containerStatuses", "initContainerStatuses")
            if status.get(kind)
        },
    }


def _trim_requests(spec: Obj) -> dict[str, Any]:
    """Return the requests of a pod without a node, as admission changed them."""
    containers = {
        kind: _select_each(spec[kind], "name", "resources", "restartPolicy")
        for kind in ("containers", "initContainers")
        if spec.get(kind)
    }
    return containers | _select_fields(spec, "overhead", "resources", "nodeSelector", "tolerations")


def _trim_limits(spec: Obj) -> dict[str, Any]:
    """Return the memory limits of a pod's containers, and which of them are sidecars."""
    trimmed: dict[str, Any] = {}
    for kind in ("containers", "initContainers"):
        for container in spec.get(kind) or ():
            fields = _select_fields(container, "restartPolicy")
            limits = (container.get("resources") or {}).get("limits") or {}
            if memory := _select_fields(limits, "memory"):
                fields["resources"] = {"limits": memory}
            if fields:
                trimmed.setdefault(kind, []).append({"name": container["name"], **fields})
    return trimmed


def trim_node(node: Obj) -> dict[str, Any]:
    """Trim a node to what scheduling depends on, and to its conditions that indicate a problem."""
    conditions = node.get("status", {}).get("conditions") or ()
    problems = [
        condition
        for condition in conditions
        if (condition["type"] == "Ready") != (condition["status"] == "True")
    ]
    status = _select_fields(node.get("status", {}), "allocatable")
    if problems:
        status["conditions"] = _select_each(problems, *_CONDITION_FIELDS)
    return {
        "metadata": _select_fields(node["metadata"], "name", "labels"),
        "spec": _select_fields(node.get("spec", {}), "taints", "unschedulable"),
        "status": status,
    }


def _select_each(objects: Iterable[Obj], *names: str) -> list[dict[str, Any]]:
    return [_select_fields(obj, *names) for obj in objects]


def _select_fields(obj: Obj, *names: str) -> dict[str, Any]:
    selected = {name: obj[name] for name in names if obj.get(name) not in (None, "", [], {})}
    return {
        name: value[:MAX_MESSAGE_CHARS] if isinstance(value, str) else value
        for name, value in selected.items()
    }


def trim_event(event: Obj) -> dict[str, Any]:
    """Trim an event to its object, message, count, last time and reporter.

    Events of the API group events.k8s.io have a series and an eventTime.
    """
    series, involved = event.get("series") or {}, event.get("involvedObject") or {}
    last_seen = (
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )
    return {
        "type": event.get("type", ""),
        "reason": event.get("reason", ""),
        "message": (event.get("message") or "")[:MAX_MESSAGE_CHARS],
        "kind": involved.get("kind", ""),
        "names": [involved.get("name", "")],
        "count": max(1, series.get("count") or event.get("count") or 1),
        # Times are compared as text, so the microseconds of newer events are cut off.
        "last": f"{last_seen[:19]}Z" if last_seen else "",
        "by": event.get("reportingComponent") or (event.get("source") or {}).get("component", ""),
    }


def fold_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge events with the same kind, reason and message; the newest come first.

    A merged event is the newest one, with the names of all objects, the newest one's first.
    """
    folded: dict[tuple[str, str, str], dict[str, Any]] = {}
    for event in events:
        key = event["kind"], event["reason"], _RANDOM_PARTS.sub("", event["message"])
        merged = folded.get(key)
        if merged is None:
            folded[key] = dict(event)
            if len(folded) > MAX_EVENT_KINDS:
                del folded[min(folded, key=lambda key: folded[key]["last"])]
            continue
        is_newer = event["last"] > merged["last"]
        newest, older = (event, merged) if is_newer else (merged, event)
        names = list(dict.fromkeys([*newest["names"], *older["names"]]))[:MAX_EVENT_NAMES]
        folded[key] = {**newest, "names": names, "count": event["count"] + merged["count"]}
    return sorted(folded.values(), key=lambda event: event["last"], reverse=True)
