"""Reads the agent's records from the log of host 0's pod, the leader; `launcher logs` reads the rest of the log."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from jaxlaunch.launcher.errors import ApiError, ClusterError, Unreachable
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import Line, Past, Tail

_RECENT_S = 45  # of a running leader's log: it writes a heartbeat every 15 s
_MANY = 4_000  # lines of it that are read first, and eight times as many while they have no record: a program may flood
_TAIL = 400  # lines of the log of a leader that ended
TIMEOUT_S = 8.0  # of a node that does not answer: the rest of the snapshot must not wait for it
# How the API server says that a node's kubelet did not give it a log.
_KUBELET = re.compile(r'"https://[^/"]+/containerLogs/[^"]*": (?P<why>.+?)(?: \(GET \S+\))?$')
_HEAD_BYTES = 256 * 1024  # where it writes how earlier attempts ended


def why_unread(error: ClusterError, node: str | None) -> str:
    """Why a log could not be read: the API server fetches it from the kubelet of its node, which may be at fault."""
    match = _KUBELET.search(error.message) if isinstance(error, ApiError) else None
    if match is not None:
        says = "is not trusted by" if match["why"].startswith("tls: ") else "does not answer"
        return f"the kubelet of node {node} {says} the API server: {match['why']}"
    if isinstance(error, Unreachable) and error.sent:
        return f"the kubelet of node {node} has not sent it to the API server in time"
    return error.message


def recent(cluster: Cluster, namespace: str, leader: Host, timeout_s: float = TIMEOUT_S) -> list[Line]:
    """The newest heartbeats of its gang, or its verdict. Raises ClusterError when its log cannot be read."""
    if leader.ended:
        return _read(cluster, namespace, leader, timeout_s, tail=_TAIL)[0]
    for power in itertools.count():
        most = _MANY * 8**power
        found, read = _read(cluster, namespace, leader, timeout_s, since_s=_RECENT_S, tail=most)
        if found or read < most:
            return found
    raise AssertionError("a log ends")


def full(cluster: Cluster, namespace: str, leader: Host) -> list[Line]:
    """The same, and the records of earlier attempts before it; two calls where the log is long. Raises ClusterError."""
    found = recent(cluster, namespace, leader)
    if any(isinstance(one, Past) for one in found):
        return found
    return [*_read(cluster, namespace, leader, TIMEOUT_S, limit_bytes=_HEAD_BYTES)[0], *found]


def followed(cluster: Cluster, namespace: str, leader: Host) -> Iterator[Line]:
    """The records that it writes from now on, until its log ends. Raises ClusterError when that cannot be read."""
    return _records(cluster.log(namespace, leader.pod, container=leader.container, follow=True, since_s=1))


def _read(cluster: Cluster, namespace: str, leader: Host, timeout_s: float, **part: int) -> tuple[list[Line], int]:
    """The records in a part of its log, and how many lines that part has."""
    lines = cluster.log(namespace, leader.pod, container=leader.container, patience_s=timeout_s, **part)  # type: ignore[arg-type]
    counted = itertools.count()
    found = list(_records(line for line in lines if next(counted) >= 0))
    return found, next(counted)


def _records(lines: Iterable[str]) -> Iterator[Line]:
    for line in lines:
        record = log_lines.parse(line)
        if record is not None and not isinstance(record, Tail):  # the end of an older log is as long as a log
            yield record
