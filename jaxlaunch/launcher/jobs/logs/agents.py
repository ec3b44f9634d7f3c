"""The last lines of a pod's processes as its agent has them: a kubelet gives only the newest file of a log, which is
empty after it has rotated a long one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from jaxlaunch.launcher.errors import ClusterError
from jaxlaunch.launcher.kubernetes.client import Cluster

_REQUEST = b"GET /output HTTP/1.1\r\nHost: agent\r\n\r\n"


def last_lines(cluster: Cluster, namespace: str, pod: str, port: int) -> Mapping[int, Sequence[str]]:
    """The last lines that each of its processes has written, by rank.

    Empty where the agent does not give them: it ends, its version is older, or the user may not use port-forwards.
    """
    try:
        head, _, body = cluster.port_forward(namespace, pod, port, _REQUEST).partition(b"\r\n\r\n")
        by_rank = json.loads(body) if head.split()[1:2] == [b"200"] else {}
        return {int(rank): [str(line) for line in lines] for rank, lines in by_rank.items()}
    except (ClusterError, ValueError, TypeError, AttributeError):  # what answers is no such agent
        return {}
