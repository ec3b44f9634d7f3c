"""Looks at all jobs of a namespace, or of every one: a few calls, however many there are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

from launcher import hear, slim, world
from launcher.cluster import Cluster
from launcher.errors import ApiError, ClusterError
from launcher.jobset import NAME_LABEL, OWN_LABEL
from launcher.kinds import PODS, WORKLOADS
from launcher.objects import Obj
from launcher.placement import JOB_UID, QUEUE
from launcher.seen import World

PATIENCE_S = 2.0  # with each node
MAX_LOGS = 16  # leaders whose log is read for the step they are at

_Place = tuple[str, str]  # namespace, name


def gather(cluster: Cluster, namespace: str | None) -> list[World]:
    """Every job of ours there, by namespace and name; None looks at all namespaces."""
    now = datetime.now(UTC)
    jobsets = world.jobsets(cluster, namespace, OWN_LABEL)
    pods = _pods(cluster, namespace)
    workloads = _workloads(cluster, namespace, jobsets)
    seen = []
    for jobset in sorted(jobsets, key=_place):
        of_namespace, name = _place(jobset)
        one = World(
            of_namespace,
            name,
            now,
            jobset=jobset,
            pods=tuple(pods[of_namespace, name]),
            workload=workloads.get(jobset["metadata"]["uid"]),
        )
        seen.append(one)
    return _heard(cluster, seen)


def _heard(cluster: Cluster, seen: list[World]) -> list[World]:
    """The same, with the newest words of those that run: of the first of them, for each costs a call."""
    found, calls = [], 0
    for one in seen:
        leader = next((host for host in one.hosts if host.number == 0 and host.running and not host.is_init), None)
        if leader is not None and calls < MAX_LOGS:
            calls += 1
            with contextlib.suppress(ClusterError):  # its step is then not known
                one = dataclasses.replace(one, words=tuple(hear.newest(cluster, one.namespace, leader, PATIENCE_S)))
        found.append(one)
    return found


def _place(obj: Obj) -> _Place:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _pods(cluster: Cluster, namespace: str | None) -> dict[_Place, list[Obj]]:
    found: dict[_Place, list[Obj]] = defaultdict(list)
    for pod in cluster.list(PODS, namespace, labels=f"{OWN_LABEL},{NAME_LABEL}", keep=slim.pod):
        found[pod["metadata"]["namespace"], pod["metadata"]["labels"][NAME_LABEL]].append(pod)
    return found


def _workloads(cluster: Cluster, namespace: str | None, jobsets: Sequence[Obj]) -> dict[str, Obj]:
    """Kueue's Workloads by the uid of their job; none is asked for where no job has a queue."""
    if not any(QUEUE in jobset["metadata"].get("labels", {}) for jobset in jobsets):
        return {}
    try:
        found = cluster.list(WORKLOADS, namespace, labels=JOB_UID)
    except ApiError:
        return {}  # the state then says that it is queued, which the JobSet itself shows
    return {one["metadata"]["labels"][JOB_UID]: one for one in found}
