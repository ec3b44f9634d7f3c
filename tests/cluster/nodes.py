"""Changes to a node, as short as possible since others may be using it."""

from __future__ import annotations

import fcntl
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.cluster.access import Access
from tests.cluster.harness.api import RefusedError
from tests.cluster.harness.places import NODES


@contextmanager
def keep_nodes_steady() -> Iterator[None]:
    """Keep tests of other processes from changing the nodes."""
    with _hold_lock(fcntl.LOCK_SH):
        yield


@contextmanager
def change_nodes() -> Iterator[None]:
    """Keep tests of other processes from relying on the nodes."""
    with _hold_lock(fcntl.LOCK_EX):
        yield


@contextmanager
def _hold_lock(mode: int) -> Iterator[None]:
    NODES.parent.mkdir(parents=True, exist_ok=True)
    with open(NODES, "w") as lock:
        fcntl.flock(lock, mode)
        yield


def get_node(access: Access, name: str) -> Any:
    return access.api.get(f"/api/v1/nodes/{name}")


@contextmanager
def cordon(access: Access, name: str) -> Iterator[None]:
    """Keep new pods from the node."""
    with change_nodes():
        access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": True}})
        try:
            yield
        finally:
            access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": None}})


@contextmanager
def taint(access: Access, name: str, key: str, pods: Collection[str]) -> Iterator[None]:
    """Evict these pods from the node and keep new ones away; all others tolerate the taint."""
    with cordon(access, name):
        for pod in access.api.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}")["items"]:
            namespace, pod_name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            if pod_name not in pods:
                tolerations = [*pod["spec"].get("tolerations", [])]
                tolerations.append({"key": key, "operator": "Exists"})
                path = f"/api/v1/namespaces/{namespace}/pods/{pod_name}"
                with suppress(RefusedError):  # it is gone meanwhile
                    access.api.merge(path, {"spec": {"tolerations": tolerations}})
        other_taints = get_node(access, name)["spec"].get("taints", [])
        taint = {"key": key, "effect": "NoExecute"}
        access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": [*other_taints, taint]}})
        try:
            yield
        finally:
            remaining_taints = [
                item
                for item in get_node(access, name)["spec"].get("taints", [])
                if item["key"] != key
            ]
            access.api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": remaining_taints}})


@contextmanager
def offer_resource(access: Access, name: str, resource: str, count: int) -> Iterator[None]:
    """Offer a number of a resource that nobody else knows."""
    set_resource(access, name, resource, count)
    try:
        yield
    finally:
        set_resource(access, name, resource, None)


def set_resource(access: Access, name: str, resource: str, count: int | None) -> None:
    """Set the node's number of this resource; None removes it."""
    amount = {resource: None if count is None else str(count)}
    access.api.merge(
        f"/api/v1/nodes/{name}/status", {"status": {"capacity": amount, "allocatable": amount}}
    )


def evict_pod(access: Access, namespace: str, pod: str) -> None:
    """Evict a pod as `kubectl drain` does."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    access.api.create(f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", eviction)
