"""The nodes of a job: labels, taints, devices, kind of capacity and placement of pods. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxlaunch.accelerators import GPUS, KNOWN
from jaxlaunch.launcher.errors import Fault
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.job.defaults import Nodes as ClusterNodes
from jaxlaunch.launcher.job.schema import JobSpec, Network, Reservation, Toleration
from jaxlaunch.launcher.kubernetes.labels import PREFERRED_TOPOLOGY, REQUIRED_TOPOLOGY, SLICE_SIZE, SLICE_TOPOLOGY
from jaxlaunch.launcher.platforms import eks, gke, table
from jaxlaunch.launcher.platforms.facts import (
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
from jaxlaunch.launcher.platforms.table import Where
from jaxlaunch.launcher.wording import count, either

# By default, Kubernetes evicts pods five minutes after their node is lost. The gang notices after seconds, and then
# waits for the eviction.
GONE_NODE = tuple(
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
)


@dataclasses.dataclass(frozen=True)
class JobNodes:
    """The requirements of a job on its nodes."""

    job: JobSpec
    platform: Where
    queue: str | None
    # The component that adds nodes on EKS.
    provisioner: Provisioner
    # Nodes with the accelerator; None if the platform has none.
    accelerator: Nodes | None
    # Nodes of the kind of capacity; None if the platform has none.
    capacity: Nodes | None
    # Labels that a node must have, with one of several values for each key.
    labels: Mapping[str, tuple[str, ...]]
    tolerations: tuple[Mapping[str, Any], ...]
    # Possible numbers of EFA interfaces, ascending.
    efa_interfaces: tuple[int, ...]
    # The label that nodes of one TPU slice share.
    slice_label: str | None
    # Variables with the folders in which programs find the driver.
    search_paths: Mapping[str, str]


# --- resolve ----------------------------------------------------------------------------------------------------------


def resolve(job: JobSpec, given: Defaults, where: Where, network: Network) -> JobNodes:
    """Combine the choices of the job, the cluster and the platform, in this order of precedence."""
    accelerator, capacity = _with_accelerator(job, given, where), _of_capacity(job, given, where)
    selector = given.node_selector | job.node_selector
    usual = table.PLATFORMS[where].slice_label
    paths = table.PLATFORMS[where].search_paths.get(job.accelerator.platform)
    known = [nodes for nodes in (accelerator, capacity) if nodes is not None]
    return JobNodes(
        job=job,
        platform=where,
        queue=job.queue or given.queue,
        provisioner=given.provisioner,
        accelerator=accelerator,
        capacity=capacity,
        labels=_labels(job, known, selector, network, is_usual=accelerator is not None and bool(accelerator.source)),
        tolerations=(
            *GONE_NODE,
            *(toleration for nodes in known for toleration in nodes.tolerations),
            *_tolerations([*given.tolerations, *job.tolerations]),
        ),
        efa_interfaces=_efa_interfaces(accelerator, selector, job.host_count),
        slice_label=given.slice_label or (None if usual is None else usual.value),
        search_paths={} if paths is None else paths.value,
    )


def _with_accelerator(job: JobSpec, given: Defaults, where: Where) -> Nodes | None:
    """Return the nodes with enough of the accelerators, or None if the platform does not have the type.

    If no node has enough of them, the instance types are empty.
    """
    kind = job.accelerator.type
    known = table.NODES[where].get(kind)
    if kind in given.nodes:
        return _of_cluster(given.nodes[kind], known)
    if known is None or INSTANCE not in known.labels:
        return known
    types = tuple(name for name in known.labels[INSTANCE] if eks.INSTANCES[name].gpus >= job.accelerator.per_host)
    return dataclasses.replace(known, labels={**known.labels, INSTANCE: types})


def _of_capacity(job: JobSpec, given: Defaults, where: Where) -> Nodes | None:
    kind = job.capacity
    if kind == "on-demand":
        return Nodes()
    known = table.capacity(where, given.provisioner)
    if not isinstance(kind, Reservation):
        return _of_cluster(given.capacity[kind], known.get(kind)) if kind in given.capacity else known.get(kind)
    if (bought := known.get("reservation")) is None:
        return None
    # The nodes of the reservation, or of the part of it that the job names.
    parts = {NAME: kind.reservation, PROJECT: kind.project, BLOCK: kind.block, SUB_BLOCK: kind.sub_block}
    labels = dict(bought.labels)
    if given.provisioner == "managed" and given.reservation_label is not None:
        labels = {given.reservation_label: (NAME,)}
    if where == "gke":
        for part, nodes in gke.IN_RESERVATION.items():
            if getattr(kind, part) is not None:
                labels |= nodes.labels
    filled = {key: tuple(parts.get(value) or value for value in values) for key, values in labels.items()}
    return Nodes(filled, bought.tolerations, bought.source)


def _of_cluster(own: ClusterNodes, usual: Nodes | None) -> Nodes:
    """Return the nodes that the cluster defaults describe, with the usual tolerations unless they set others."""
    keeps = usual is not None and "tolerations" not in own.model_fields_set
    tolerations = usual.tolerations if usual is not None and keeps else _tolerations(own.tolerations)
    return Nodes({key: (value,) for key, value in own.node_selector.items()}, tuple(tolerations))


def _labels(
    job: JobSpec, known: Iterable[Nodes], selector: Mapping[str, str], network: Network, *, is_usual: bool
) -> dict[str, tuple[str, ...]]:
    """Return all labels that a node must have; `selector` chooses one of several values, or adds a label."""
    asked = job.accelerator
    wanted = {key: values for nodes in known for key, values in nodes.labels.items()}
    wanted |= {key: (value,) for key, value in selector.items()}
    if asked.topology is not None and GKE_TPU in wanted:
        wanted[GKE_TOPOLOGY] = (asked.topology,)
        if is_usual and asked.topology in KNOWN[asked.type].whole_host:
            wanted[gke.CHIPS_LABEL.value] = (str(asked.per_host),)
    if network == "gpudirect-tcpxo" and gke.TCPXO_GPU.value in wanted.get(GKE_GPU, ()):
        wanted[GKE_GPU] = (gke.TCPXO_GPU.value,)
    return wanted


def _tolerations(given: Iterable[Toleration]) -> list[dict[str, Any]]:
    return [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in given]


def _efa_interfaces(accelerator: Nodes | None, selector: Mapping[str, str], hosts: int) -> tuple[int, ...]:
    """Return the possible numbers of EFA interfaces, ascending; for a single host only the smallest."""
    types = () if accelerator is None else accelerator.labels.get(INSTANCE, ())
    if (chosen := selector.get(INSTANCE)) is not None:
        types = (chosen,)
    known = (eks.INSTANCES[name].efa for name in types if name in eks.INSTANCES)
    found = tuple(sorted({interfaces for interfaces in known if interfaces}))
    return found if hosts > 1 else found[:1]


# --- faults -----------------------------------------------------------------------------------------------------------


def faults(nodes: JobNodes) -> Iterator[Fault]:
    """Yield faults for everything that the job requests and the platform does not have."""
    yield from _devices(nodes)
    yield from _another_kind(nodes)
    yield from _capacity(nodes)
    job, accelerator = nodes.job, nodes.job.accelerator
    if nodes.platform == "gke" and accelerator.platform == "tpu" and job.slices > 1 and job.hosts == 1:
        message = f"slices = {job.slices}: GKE connects only slices of several hosts, "
        message += f"and {accelerator.type} {accelerator.topology} is one host."
        yield Fault(("slices",), message, "use a larger accelerator.topology, or slices: 1.")
    yield from _one_kind(nodes)
    if nodes.job.placement is not None and nodes.queue is None:
        yield Fault(("placement",), "placement is done by Kueue, and the job has no queue.", "name one with queue:.")


def _devices(nodes: JobNodes) -> Iterator[Fault]:
    kind, asked = nodes.job.accelerator.type, nodes.job.accelerator.per_host
    if nodes.accelerator is None:
        have = [name for name, known in table.NODES.items() if kind in known]
        hint = f"use platform: {either(have)}, or name their labels under nodes.{kind} in the cluster defaults."
        message = f"accelerator.type = {kind} is not known on platform = {nodes.platform}."
        yield Fault(("accelerator", "type"), message, hint)
        return
    if nodes.job.accelerator.platform not in GPUS:
        return
    has = {name: table.LARGEST[name] for names in nodes.labels.values() for name in names if name in table.LARGEST}
    if nodes.accelerator.labels.get(INSTANCE) == () and not has:
        has = {name: table.LARGEST[name] for name in table.NODES[nodes.platform][kind].labels[INSTANCE]}
    chosen = next((value for value in nodes.job.node_selector.values() if value in has), None)
    if has and max(has.values()) < asked and chosen is not None:
        message = f"node_selector: {chosen} has {count(has[chosen], 'GPU')}, and accelerator.per_host = {asked}."
        yield Fault(("node_selector",), message, f"use accelerator.per_host: {has[chosen]}, or another machine type.")
    elif has and max(has.values()) < asked:
        message = f"accelerator.per_host = {asked}: the largest {kind} machine of platform = {nodes.platform} has "
        hint = "use more hosts with fewer devices each."
        yield Fault(("accelerator", "per_host"), f"{message}{max(has.values())}.", hint)


def _another_kind(nodes: JobNodes) -> Iterator[Fault]:
    kind, known = nodes.job.accelerator.type, table.NODES[nodes.platform]
    if nodes.accelerator is None or kind not in known or nodes.accelerator.source is None:
        return
    for key, own in known[kind].labels.items():
        for value in nodes.labels.get(key, ()):
            others = [name for name, other in known.items() if value in other.labels.get(key, ())]
            if value not in own and others:
                message = f"node_selector: {key} = {value} is {either(others)}, and accelerator.type = {kind}."
                yield Fault(("node_selector",), message, f"choose {either(own)}, or accelerator.type: {others[0]}.")


def _capacity(nodes: JobNodes) -> Iterator[Fault]:
    kind = nodes.job.capacity
    if nodes.capacity is not None:
        # Nodes of flex-start are removed after some days, whatever runs there.
        longest, deadline = gke.LONGEST_FLEX_START_S.value, nodes.job.deadline
        if kind == "flex-start" and nodes.platform == "gke" and deadline is not None and deadline > longest:
            days = longest // 86_400
            message = f"deadline = {deadline / 86_400:g} days: nodes of capacity = flex-start last at most {days} days."
            yield Fault(("deadline",), message, f"write deadline: {days}d or less, or another capacity.")
        if isinstance(kind, Reservation):
            yield from _reservation(nodes, kind)
    elif isinstance(kind, Reservation):
        message = f"capacity = reservation is not known on platform = {nodes.platform}."
        yield Fault(("capacity", "reservation"), message, "use on-demand with node_selector: of those nodes.")
    else:
        hint = f"use on-demand, or name its labels under capacity.{kind} in the cluster defaults."
        yield Fault(("capacity",), f"capacity = {kind} is not known on platform = {nodes.platform}.", hint)


def _reservation(nodes: JobNodes, capacity: Reservation) -> Iterator[Fault]:
    name = capacity.reservation
    if nodes.platform == "eks" and nodes.provisioner != "managed" and not name.startswith(eks.RESERVATION_ID.value):
        message = f"capacity.reservation = {name} is not an id, by which Karpenter labels reserved nodes."
        hint = f"write {eks.RESERVATION_ID.value}…, or provisioner: managed in the cluster defaults for node groups."
        yield Fault(("capacity", "reservation"), message, hint)
    for part in gke.IN_RESERVATION:
        if getattr(capacity, part) is not None and nodes.platform != "gke":
            message = f"capacity.{part} is not known on platform = {nodes.platform}."
            yield Fault(("capacity", part), message, "leave it out: reservation names it whole.")
    if capacity.sub_block is not None and capacity.block is None:
        message = f"capacity.sub_block = {capacity.sub_block} is part of a block, and capacity.block is missing."
        yield Fault(("capacity", "sub_block"), message, "block: …")


def _one_kind(nodes: JobNodes) -> Iterator[Fault]:
    """Refuse nodes of different kinds: a gang is as fast as its slowest host and as large as its smallest."""
    kind = nodes.job.accelerator.type
    if nodes.accelerator is None or nodes.job.host_count == 1 or KNOWN[kind].alike:
        return
    for key in nodes.accelerator.labels:
        if len(values := nodes.labels.get(key, ())) > 1:
            hosts = count(nodes.job.host_count, "host")
            message = f"{hosts} of {kind} could be {either(values)}, which differ in memory or network."
            hint = f"choose one: node_selector: {{{key}: {values[0]}}}, or nodes.{kind} in the cluster defaults."
            yield Fault(("accelerator", "type"), message, hint)


# --- patch ------------------------------------------------------------------------------------------------------------


def patch(nodes: JobNodes) -> dict[str, Any]:
    """Return the patch of the pod template."""
    spec: dict[str, Any] = _selection(nodes.labels)
    spec["tolerations"] = [dict(toleration) for toleration in nodes.tolerations]
    # With a queue, the priority is a label of the JobSet that Kueue reads.
    if nodes.job.priority is not None and nodes.queue is None:
        spec["priorityClassName"] = nodes.job.priority
    job, annotations = nodes.job, dict[str, str]()
    # Kueue reads from these annotations the level of its Topology in which a slice is placed.
    if job.placement is not None:
        required, preferred = job.placement.required, job.placement.preferred
        if required is not None and job.slices > 1:
            annotations = {SLICE_TOPOLOGY: required, SLICE_SIZE: str(job.hosts)}
        elif required is not None:
            annotations = {REQUIRED_TOPOLOGY: required}
        elif preferred is not None:
            annotations = {PREFERRED_TOPOLOGY: preferred}
    return {"metadata": {"annotations": annotations}, "spec": spec} if annotations else {"spec": spec}


def _selection(wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if single := {key: values[0] for key, values in wanted.items() if len(values) == 1}:
        spec["nodeSelector"] = single
    if several := {key: values for key, values in wanted.items() if len(values) > 1}:
        terms = [{"key": key, "operator": "In", "values": list(values)} for key, values in several.items()]
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return spec


def resources(nodes: JobNodes) -> dict[str, Any]:
    """Return requests and limits of the main container.

    The CPU is not limited, because a throttled host delays the whole gang.
    """
    job = nodes.job
    asked = {
        "cpu": job.resources.cpu,
        "memory": job.resources.memory,
        "ephemeral-storage": job.resources.ephemeral,
        "hugepages-2Mi": job.resources.hugepages,
    }
    requests = {name: amount for name, amount in asked.items() if amount is not None}
    if (extended := table.RESOURCE.get(job.accelerator.platform)) is not None:
        requests[extended.value] = str(job.accelerator.per_host)
    limits = {name: amount for name, amount in requests.items() if name != "cpu"}
    given = {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}
    return {"resources": given} if given else {}
