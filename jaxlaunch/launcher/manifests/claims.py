"""What a job claims of its nodes by dynamic resource allocation (DRA): network adapters, NVLink between hosts. Pure.

From Kubernetes 1.34 on, which serves resource.k8s.io/v1. Each pod has claims of its own, made from a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxlaunch.launcher.kubernetes.kinds import COMPUTE_DOMAINS, RESOURCE_CLAIM_TEMPLATES
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.launcher.manifests.network import JobNetwork
from jaxlaunch.launcher.manifests.nodes import JobNodes
from jaxlaunch.launcher.platforms import eks, gke

_ADAPTERS, _NVLINK = "adapters", "nvlink"  # names of claims in a pod


class Adapters(NamedTuple):
    """The network adapters of a host that its pod claims."""

    device_class: str
    number: int | None  # None: all that the node has


def adapters(network: JobNetwork, nodes: JobNodes) -> Adapters | None:
    """The adapters that a job's network has by DRA; None for any other network."""
    if network.chosen == "efa-dra":
        known = nodes.efa_interfaces
        return Adapters(eks.EFA_CLASS.value, known[0] if len(known) == 1 else None)
    if network.chosen == "gpudirect-rdma-dra":
        of_kind = gke.NODES[network.job.accelerator.type].rdma
        return Adapters(gke.RDMA_CLASS.value, None if of_kind is None else of_kind.value)
    return None


def patch(network: JobNetwork, nodes: JobNodes) -> dict[str, Any]:
    """The pod template's part of it."""
    names = [_ADAPTERS] if adapters(network, nodes) is not None else []
    names += [_NVLINK] if network.job.compute_domain else []
    if not names:
        return {}
    main = {"name": MAIN_CONTAINER, "resources": {"claims": [{"name": name} for name in names]}}
    claims = [{"name": name, "resourceClaimTemplateName": f"{network.job.name}-{name}"} for name in names]
    return {"spec": {"containers": [main], "resourceClaims": claims}}


def objects(network: JobNetwork, nodes: JobNodes, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the template of the adapters' claims, and the ComputeDomain, whose controller makes its own template."""
    manifests = []
    if (claimed := adapters(network, nodes)) is not None:
        exactly: dict[str, Any] = {"deviceClassName": claimed.device_class, "allocationMode": "All"}
        if claimed.number is not None:
            exactly |= {"allocationMode": "ExactCount", "count": claimed.number}
        named = {**metadata, "name": f"{network.job.name}-{_ADAPTERS}"}
        spec: dict[str, Any] = {"spec": {"devices": {"requests": [{"name": _ADAPTERS, "exactly": exactly}]}}}
        manifests.append((RESOURCE_CLAIM_TEMPLATES, named, spec))
    if network.job.compute_domain:
        # Without the driver's DNS names every pod waits for so many hosts; with them it says when all are there.
        channel = {"resourceClaimTemplate": {"name": f"{network.job.name}-{_NVLINK}"}}
        manifests.append((COMPUTE_DOMAINS, dict(metadata), {"numNodes": network.job.host_count, "channel": channel}))
    return [
        {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": named, "spec": spec}
        for kind, named, spec in manifests
    ]
