"""What happens to a node, for as short as it can be: others may be using it."""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.cluster.access import Access
from tests.cluster.harness.api import Refused
from tests.cluster.harness.places import NODES


@contextmanager
def steady() -> Iterator[None]:
    """While it lasts, no test of another process changes the nodes."""
    with _held(fcntl.LOCK_SH):
        yield


@contextmanager
def changing() -> Iterator[None]:
    """While it lasts, no test of another process relies on the nodes as they are."""
    with _held(fcntl.LOCK_EX):
        yield


@contextmanager
def _held(how: int) -> Iterator[None]:
    NODES.parent.mkdir(parents=True, exist_ok=True)
    with open(NODES, "w") as lock:
        fcntl.flock(lock, how)
        yield


def node(access: Access, name: str) -> Any:
    return access.api.get(f"/api/v1/nodes/{name}")


@contextmanager
def cordoned(access: Access, name: str) -> Iterator[None]:
    """Nothing new is put on the node."""
    with changing():
        access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
        try:
            yield
        finally:
            access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None}})


@contextmanager
def tainted(access: Access, name: str, key: str, pods: Collection[str]) -> Iterator[None]:
    """The node throws out these pods; all others on it are made to tolerate that before, and no new ones come."""
    with cordoned(access, name):
        for pod in access.api.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}")["items"]:
            if pod["metadata"]["name"] not in pods:
                known = pod["spec"].get("tolerations", [])
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
                with suppress(Refused):  # it is gone meanwhile
                    access.api.merge(
                        path,
                        {"spec": {"tolerations": [*known, {"key": key, "operator": "Exists"}]}},
                    )
        before = node(access, name)["spec"].get("taints", [])
        taint = {"key": key, "effect": "NoExecute"}
        access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": [*before, taint]}})
        try:
            yield
        finally:
            left = [
                one for one in node(access, name)["spec"].get("taints", []) if one["key"] != key
            ]
            access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": left}})


@contextmanager
def offering(access: Access, name: str, resource: str, count: int) -> Iterator[None]:
    """The node has so many of a resource of which nobody else knows."""
    offer(access, name, resource, count)
    try:
        yield
    finally:
        offer(access, name, resource, None)


def offer(access: Access, name: str, resource: str, count: int | None) -> None:
    """From now on the node has so many of this resource; None: it knows none of it."""
    given = {resource: None if count is None else str(count)}
    access.api.merge(
        f"/api/v1/nodes/{name}/status", {"status": {"capacity": given, "allocatable": given}}
    )


def evict(access: Access, namespace: str, pod: str) -> None:
    """As `kubectl drain` does."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    access.api.create(f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", eviction)
