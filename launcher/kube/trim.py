"""What is kept of an object that comes by the thousand. Pure.

A pod is some 8 kB of JSON, of which a page says less than one: each is cut down as its page comes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from launcher import hosts
from launcher.checks import REPLICATED_JOB
from launcher.hosts import GENERATION_LABEL, INDEX_LABEL, REPLICATED_LABEL, SLICE_LABEL
from launcher.jobset import NAME_LABEL
from launcher.objects import Obj, replicated

MAX_MESSAGE = 4_096  # of a kubelet's or a scheduler's words; a termination message is no longer
MAX_KINDS_OF_EVENT = 200
MAX_NAMED = 8  # objects that a folded event names

# Events that say only that all is well. A thousand pods have thousands of them.
QUIET = ("Scheduled", "Pulled", "Created", "Started", "SuccessfulCreate", "SuccessfulDelete")

_LABELS = (NAME_LABEL, GENERATION_LABEL, SLICE_LABEL, INDEX_LABEL, REPLICATED_LABEL)
_SAYS = ("type", "status", "reason", "message")
_RANDOM = re.compile(r"-[a-z0-9]{5}\b|\d+")  # the end of a pod's name, and numbers


def pod(full: Obj) -> dict[str, Any]:
    """Where it is in its gang, where it runs, and what its containers say."""
    metadata, spec, status = full["metadata"], full.get("spec", {}), full.get("status", {})
    labels = metadata.get("labels", {})
    return {
        "metadata": _keep(metadata, "namespace", "name", "uid", "creationTimestamp", "deletionTimestamp")
        | {"labels": _keep(labels, *_LABELS)},
        "spec": _keep(spec, "nodeName", "schedulingGates"),
        "status": _keep(status, "phase", "reason", "message")
        | {"conditions": [_keep(one, *_SAYS) for one in status.get("conditions", ())]}
        | {kind: [_container(one) for one in status[kind]] for kind in _CONTAINERS if status.get(kind)},
    }


_CONTAINERS = ("containerStatuses", "initContainerStatuses")


def _container(status: Obj) -> Obj:
    return _keep(status, "name", "image", "ready", "restartCount", "state", "lastState")


def node(full: Obj) -> dict[str, Any]:
    """What the scheduler looks at, as far as we do."""
    return {
        "metadata": _keep(full["metadata"], "name", "labels"),
        "spec": _keep(full.get("spec", {}), "taints", "unschedulable"),
        "status": _keep(full.get("status", {}), "allocatable"),
    }


def _keep(of: Obj, *names: str) -> dict[str, Any]:
    return {name: _cut(of[name]) for name in names if of.get(name) not in (None, "", [], {})}


def _cut(value: Any) -> Any:
    return value[:MAX_MESSAGE] if isinstance(value, str) else value


def event(full: Obj) -> dict[str, Any]:
    """An event of either API: who is meant, what is said, how often and when last."""
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
    """A time to the second: newer events have microseconds, and nothing else compares with those as text."""
    return f"{moment[:19]}Z" if moment else ""


def about(events: Iterable[Mapping[str, Any]], name: str, jobset: Obj | None) -> Iterator[Mapping[str, Any]]:
    """The events on a job of that name and on what is made of it: Jobs, pods, claims, its Workload.

    Of a JobSet that is there, only those since it was created: one of the same name may have been before.
    """
    since = "" if jobset is None else jobset["metadata"].get("creationTimestamp", "")
    claims = () if jobset is None else hosts.claims(jobset)
    parts_of = "|".join(re.escape(one["name"]) for one in replicated(jobset or {})) or REPLICATED_JOB
    job = rf"{re.escape(name)}-(?:{parts_of})-\d+"
    parts = {
        "JobSet": re.escape(name),
        "Job": job,
        "Pod": rf"{job}-\d+-[a-z0-9]{{5}}",
        "Workload": rf"jobset-{re.escape(name)}-[a-z0-9]{{5}}",
    }
    for one in events:
        pattern = parts.get(one["kind"])
        is_its = one["names"][0] in claims if one["kind"] == "PersistentVolumeClaim" else False
        if is_its or (pattern and re.fullmatch(pattern, one["names"][0]) and one["last"] >= since):
            yield one


def folded(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One of each kind, the newest first: a thousand pods that wait for one reason make one line."""
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
