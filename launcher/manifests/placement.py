"""Where pods may run: labels and taints of nodes, kinds of capacity, topologies. Pure.

The first half finds what a job needs of its nodes, for launcher/manifests/resolve; patch() renders it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.launcher.job.defaults import Nodes as ClusterNodes
from jaxlaunch.launcher.job.schema import Accelerator, Capacity, Network, Placement, Reservation, Toleration
from jaxlaunch.launcher.kube.labels import PREFERRED_TOPOLOGY, REQUIRED_TOPOLOGY, SLICE_SIZE, SLICE_TOPOLOGY
from jaxlaunch.launcher.manifests.platforms import eks, gke, table
from jaxlaunch.launcher.manifests.platforms.facts import (
    BLOCK,
    GKE_GPU,
    GKE_TOPOLOGY,
    GKE_TPU,
    INSTANCE,
    NAME,
    PROJECT,
    SUB_BLOCK,
    Nodes,
    Provisioner,
)
from jaxlaunch.launcher.manifests.platforms.table import Where

# Kubernetes waits five minutes for a node that is gone; the gang knows after seconds and waits for its pod's end.
_GONE_NODE = tuple(
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
)


def nodes(kind: str, where: Where, own: ClusterNodes | None, per_host: int) -> Nodes | None:
    """The nodes that have `per_host` of an accelerator, `own` before the platform's usual.

    None where the platform has none of the kind; without a value of a label where it has none with so many.
    """
    if own is not None:
        return _of_cluster(own)
    if (known := table.NODES[where].get(kind)) is None or INSTANCE not in known.labels:
        return known
    types = tuple(one for one in known.labels[INSTANCE] if eks.INSTANCES[one].gpus >= per_host)
    return dataclasses.replace(known, labels={**known.labels, INSTANCE: types})


def capacity(kind: Capacity, where: Where, provisioner: Provisioner, own: Mapping[Any, ClusterNodes]) -> Nodes | None:
    """The nodes of a kind of capacity, likewise."""
    if kind == "on-demand":
        return Nodes()
    known = table.capacity(where, provisioner)
    if not isinstance(kind, Reservation):
        return _of_cluster(own[kind]) if kind in own else known.get(kind)
    bought = known.get("reservation")
    return None if bought is None else _reserved(kind, bought, where)


def _reserved(kind: Reservation, bought: Nodes, where: Where) -> Nodes:
    """The nodes of this very reservation, and of a part of it where the job names one."""
    parts = {NAME: kind.reservation, PROJECT: kind.project, BLOCK: kind.block, SUB_BLOCK: kind.sub_block}
    labels = dict(bought.labels)
    if where == "gke":
        for part, nodes in gke.IN_RESERVATION.items():
            if getattr(kind, part) is not None:
                labels |= nodes.labels
    filled = {key: tuple(parts.get(value) or value for value in values) for key, values in labels.items()}
    return Nodes(filled, bought.tolerations, bought.source)


def labels(
    accelerator: Nodes | None,
    capacity: Nodes | None,
    selector: Mapping[str, str],
    asked: Accelerator,
    network: Network,
) -> dict[str, tuple[str, ...]]:
    """All labels that a node must have; `selector` chooses one value of several, or adds a label."""
    wanted = {
        key: values for kind in (accelerator, capacity) if kind is not None for key, values in kind.labels.items()
    }
    wanted |= {key: (value,) for key, value in selector.items()}
    if asked.topology is not None and GKE_TPU in wanted:
        wanted[GKE_TOPOLOGY] = (asked.topology,)
        of_platform = accelerator is not None and accelerator.source is not None
        if of_platform and asked.topology in KNOWN[asked.type].whole_host:
            wanted[gke.CHIPS_LABEL.value] = (str(asked.per_host),)
    if network == "gpudirect-tcpxo" and gke.TCPXO_GPU.value in wanted.get(GKE_GPU, ()):
        wanted[GKE_GPU] = (gke.TCPXO_GPU.value,)
    return wanted


def tolerations(
    accelerator: Nodes | None, capacity: Nodes | None, given: Iterable[Toleration]
) -> tuple[Mapping[str, Any], ...]:
    """All taints that the pods tolerate."""
    of_nodes = [one for kind in (accelerator, capacity) if kind is not None for one in kind.tolerations]
    return (*_GONE_NODE, *of_nodes, *_tolerations(given))


def efa_interfaces(accelerator: Nodes | None, selector: Mapping[str, str], hosts: int) -> tuple[int, ...]:
    """How many EFA interfaces the nodes that fit have, ascending: several numbers for several instance types, but of a
    single host, which reaches no other, the smallest."""
    types = () if accelerator is None else accelerator.labels.get(INSTANCE, ())
    if (chosen := selector.get(INSTANCE)) is not None:
        types = (chosen,)
    known = (eks.INSTANCES[one].efa for one in types if one in eks.INSTANCES)
    found = tuple(sorted({interfaces for interfaces in known if interfaces}))
    return found if hosts > 1 else found[:1]


def _of_cluster(own: ClusterNodes) -> Nodes:
    return Nodes({key: (value,) for key, value in own.node_selector.items()}, tuple(_tolerations(own.tolerations)))


def _tolerations(given: Iterable[Toleration]) -> list[dict[str, Any]]:
    return [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in given]


def patch(
    labels: Mapping[str, tuple[str, ...]],
    tolerations: Sequence[Mapping[str, Any]],
    *,
    priority_class: str | None,
    annotations: Mapping[str, str],
) -> dict[str, Any]:
    """The pod template's part of it. `annotations`: topology()."""
    spec: dict[str, Any] = _selection(labels)
    spec["tolerations"] = [dict(toleration) for toleration in tolerations]
    if priority_class is not None:
        spec["priorityClassName"] = priority_class
    return {"metadata": {"annotations": dict(annotations)}, "spec": spec} if annotations else {"spec": spec}


def topology(placement: Placement | None, slices: int, hosts: int) -> dict[str, str]:
    """What Kueue reads of a pod's annotations: the level of its Topology that a slice of `hosts` pods keeps to."""
    if placement is None:
        return {}
    if (level := placement.required) is None:
        return {} if placement.preferred is None else {PREFERRED_TOPOLOGY: placement.preferred}
    return {REQUIRED_TOPOLOGY: level} if slices == 1 else {SLICE_TOPOLOGY: level, SLICE_SIZE: str(hosts)}


def _selection(wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """A selector for labels with one value; an affinity for those with several."""
    spec: dict[str, Any] = {}
    if single := {key: values[0] for key, values in wanted.items() if len(values) == 1}:
        spec["nodeSelector"] = single
    if several := {key: values for key, values in wanted.items() if len(values) > 1}:
        terms = [{"key": key, "operator": "In", "values": list(values)} for key, values in several.items()]
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return spec
