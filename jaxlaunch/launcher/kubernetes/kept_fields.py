"""The fields that we keep of pods, nodes and events, of which there may be thousands. Pure.

A pod is some 8 kB of JSON, of which we read less than 1 kB: each is cut down as its page of the list arrives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxlaunch.launcher.kubernetes.labels import (
    GENERATION_LABEL,
    INDEX_LABEL,
    NAME_LABEL,
    REPLICATED_LABEL,
    SLICE_LABEL,
)
from jaxlaunch.launcher.kubernetes.objects import Obj

MAX_MESSAGE = 4_096  # characters; no termination message is longer
MAX_KINDS_OF_EVENT = 200
MAX_NAMED = 8  # objects that a folded event names

# Events of normal operation. A thousand pods have thousands of them.
QUIET = ("Scheduled", "Pulled", "Created", "Started", "SuccessfulCreate", "SuccessfulDelete")

_LABELS = (NAME_LABEL, GENERATION_LABEL, SLICE_LABEL, INDEX_LABEL, REPLICATED_LABEL)
_CONDITION = ("type", "status", "reason", "message")
_RANDOM = re.compile(r"-[a-z0-9]{5}\b|\d+")  # the end of a pod's name, and numbers


def pod(full: Obj) -> dict[str, Any]:
    """A pod: its place in the gang, its node, and the states of its containers."""
    metadata, spec, status = full["metadata"], full.get("spec", {}), full.get("status", {})
    labels = metadata.get("labels", {})
    return {
        "metadata": _keep(metadata, "namespace", "name", "uid", "creationTimestamp", "deletionTimestamp", "finalizers")
        | {"labels": _keep(labels, *_LABELS)},
        "spec": _keep(spec, "nodeName", "schedulingGates")
        | (_limits(spec) if spec.get("nodeName") else _requests(spec)),
        "status": _keep(status, "phase", "reason", "message", "startTime")
        | {"conditions": [_keep(one, *_CONDITION) for one in status.get("conditions", ())]}
        | {kind: [_container(one) for one in status[kind]] for kind in _CONTAINERS if status.get(kind)},
    }


def _requests(spec: Obj) -> dict[str, Any]:
    """What admission made of the requests of a pod without a node: defaults, sidecars, overhead."""
    kinds = {
        kind: [_keep(one, *_REQUESTS) for one in spec[kind]]
        for kind in ("containers", "initContainers")
        if spec.get(kind)
    }
    return kinds | _keep(spec, "overhead", "resources", "nodeSelector", "tolerations")


def _limits(spec: Obj) -> dict[str, Any]:
    """The memory limits of a pod's containers, and which of them are sidecars."""
    kept: dict[str, Any] = {}
    for kind in ("containers", "initContainers"):
        for one in spec.get(kind) or ():
            limits = _keep((one.get("resources") or {}).get("limits") or {}, "memory")
            told = _keep(one, "restartPolicy") | ({"resources": {"limits": limits}} if limits else {})
            if told:
                kept.setdefault(kind, []).append({"name": one["name"], **told})
    return kept


_REQUESTS = ("name", "resources", "restartPolicy")
_CONTAINERS = ("containerStatuses", "initContainerStatuses")


def _container(status: Obj) -> Obj:
    return _keep(status, "name", "image", "ready", "restartCount", "state", "lastState")


def node(full: Obj) -> dict[str, Any]:
    """A node: what the scheduler reads, as far as node_fit does, and the conditions that are not as they should be."""
    conditions = full.get("status", {}).get("conditions") or ()
    unwell = [_keep(one, *_CONDITION) for one in conditions if (one["type"] == "Ready") != (one["status"] == "True")]
    return {
        "metadata": _keep(full["metadata"], "name", "labels"),
        "spec": _keep(full.get("spec", {}), "taints", "unschedulable"),
        "status": _keep(full.get("status", {}), "allocatable") | ({"conditions": unwell} if unwell else {}),
    }


def _keep(of: Obj, *names: str) -> dict[str, Any]:
    return {name: _cut(of[name]) for name in names if of.get(name) not in (None, "", [], {})}


def _cut(value: Any) -> Any:
    return value[:MAX_MESSAGE] if isinstance(value, str) else value


def event(full: Obj) -> dict[str, Any]:
    """An event of either API: its object, message, count, and when it was last seen."""
    series = full.get("series") or {}
    last = series.get("lastObservedTime") or full.get("lastTimestamp") or full.get("eventTime")
    about = full.get("involvedObject") or {}
    return {
        "type": full.get("type", ""),
        "reason": full.get("reason", ""),
        "message": (full.get("message") or "")[:MAX_MESSAGE],
        "kind": about.get("kind", ""),
        "names": [about.get("name", "")],
        "count": max(1, series.get("count") or full.get("count") or 1),
        "last": _second(last or full["metadata"].get("creationTimestamp") or ""),
        "by": full.get("reportingComponent") or (full.get("source") or {}).get("component", ""),
    }


def _second(moment: str) -> str:
    """A time to the second: newer events have microseconds, which do not compare with the others as text."""
    return f"{moment[:19]}Z" if moment else ""


def folded(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Events with the same reason and message as one, the newest first: a thousand pods make one line."""
    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in events:
        key = one["kind"], one["reason"], _RANDOM.sub("", one["message"])
        other = kept.get(key)
        if other is None:
            kept[key] = dict(one)
            if len(kept) > MAX_KINDS_OF_EVENT:
                del kept[min(kept, key=lambda key: kept[key]["last"])]
            continue
        newer = max(one, other, key=lambda event: event["last"])
        names = list(dict.fromkeys([*other["names"], *one["names"]]))[:MAX_NAMED]
        kept[key] = {**newer, "names": names, "count": one["count"] + other["count"]}
    return sorted(kept.values(), key=lambda event: event["last"], reverse=True)
