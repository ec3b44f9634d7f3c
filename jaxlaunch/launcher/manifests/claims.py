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
    templates = _templates(network, nodes)
    if not templates:
        return {}
    main = {"name": MAIN_CONTAINER, "resources": {"claims": [{"name": name} for name in templates]}}
    claims = [{"name": name, "resourceClaimTemplateName": template} for name, template in templates.items()]
    return {"spec": {"containers": [main], "resourceClaims": claims}}


def _templates(network: JobNetwork, nodes: JobNodes) -> Mapping[str, str]:
    """Name of each claim → its template."""
    found = [_ADAPTERS] if adapters(network, nodes) is not None else []
    found += [_NVLINK] if network.job.compute_domain else []
    return {name: f"{network.job.name}-{name}" for name in found}


def objects(network: JobNetwork, nodes: JobNodes, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The template of the adapters' claims, and the ComputeDomain, whose controller makes the template of its own."""
    found, templates = [], _templates(network, nodes)
    if (asked := adapters(network, nodes)) is not None:
        exactly: dict[str, Any] = {"deviceClassName": asked.device_class, "allocationMode": "All"}
        if asked.number is not None:
            exactly |= {"allocationMode": "ExactCount", "count": asked.number}
        request = {"name": _ADAPTERS, "exactly": exactly}
        own = {**metadata, "name": templates[_ADAPTERS]}
        spec = {"spec": {"devices": {"requests": [request]}}}
        found.append(_object(RESOURCE_CLAIM_TEMPLATES.api_version, RESOURCE_CLAIM_TEMPLATES.kind, own, spec))
    if network.job.compute_domain:
        # Without the driver's DNS names every pod waits for so many hosts; with them it says when all are there.
        channel = {"resourceClaimTemplate": {"name": templates[_NVLINK]}}
        domain = {"numNodes": network.job.host_count, "channel": channel}
        found.append(_object(COMPUTE_DOMAINS.api_version, COMPUTE_DOMAINS.kind, dict(metadata), domain))
    return found


def _object(api_version: str, kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}
