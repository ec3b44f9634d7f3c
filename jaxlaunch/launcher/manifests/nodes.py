"""The nodes of a job: labels, taints, devices, kind of capacity and placement of pods. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxlaunch.accelerators import ACCELERATORS, GPU_PLATFORMS
from jaxlaunch.launcher.errors import Fault
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.job.defaults import Nodes as ClusterNodes
from jaxlaunch.launcher.job.schema import JobSpec, Network, Reservation, Toleration
from jaxlaunch.launcher.kubernetes.labels import (
    PREFERRED_TOPOLOGY,
    REQUIRED_TOPOLOGY,
    SLICE_SIZE,
    SLICE_TOPOLOGY,
)
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
from jaxlaunch.launcher.platforms.table import PlatformName
from jaxlaunch.launcher.wording import format_count, join_choices

# By default, Kubernetes evicts pods five minutes after their node is lost. The gang notices after
# seconds, and then waits for the eviction.
LOST_NODE_TOLERATIONS = tuple(
    {
        "key": f"node.kubernetes.io/{taint}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 30,
    }
    for taint in ("not-ready", "unreachable")
)


@dataclasses.dataclass(frozen=True)
class JobNodes:
    """The requirements of a job on its nodes."""

    job: JobSpec
    platform: PlatformName
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


# --- resolve --------------------------------------------------------------------------------------


def resolve(job: JobSpec, defaults: Defaults, platform: PlatformName, network: Network) -> JobNodes:
    """Combine the choices of the job, the cluster and the platform, in this order of precedence."""
    accelerator = _accelerator_nodes(job, defaults, platform)
    capacity = _capacity_nodes(job, defaults, platform)
    selector = defaults.node_selector | job.node_selector
    usual_slice_label = table.PLATFORMS[platform].slice_label
    paths = table.PLATFORMS[platform].search_paths.get(job.accelerator.platform)
    node_kinds = [nodes for nodes in (accelerator, capacity) if nodes is not None]
    return JobNodes(
        job=job,
        platform=platform,
        queue=job.queue or defaults.queue,
        provisioner=defaults.provisioner,
        accelerator=accelerator,
        capacity=capacity,
        labels=_required_labels(
            job,
            node_kinds,
            selector,
            network,
            is_usual=accelerator is not None and bool(accelerator.source),
        ),
        tolerations=(
            *LOST_NODE_TOLERATIONS,
            *(toleration for nodes in node_kinds for toleration in nodes.tolerations),
            *_dump_tolerations([*defaults.tolerations, *job.tolerations]),
        ),
        efa_interfaces=_efa_interfaces(accelerator, selector, job.host_count),
        slice_label=defaults.slice_label
        or (None if usual_slice_label is None else usual_slice_label.value),
        search_paths={} if paths is None else paths.value,
    )


def _accelerator_nodes(job: JobSpec, defaults: Defaults, platform: PlatformName) -> Nodes | None:
    """Return the nodes with enough of the accelerators, or None if the platform does not have the type.

    If no node has enough of them, the instance types are empty.
    """
    kind = job.accelerator.type
    nodes = table.NODES[platform].get(kind)
    if kind in defaults.nodes:
        return _cluster_nodes(defaults.nodes[kind], nodes)
    if nodes is None or INSTANCE not in nodes.labels:
        return nodes
    types = tuple(
        name
        for name in nodes.labels[INSTANCE]
        if eks.INSTANCES[name].gpus >= job.accelerator.per_host
    )
    return dataclasses.replace(nodes, labels={**nodes.labels, INSTANCE: types})


def _capacity_nodes(job: JobSpec, defaults: Defaults, platform: PlatformName) -> Nodes | None:
    kind = job.capacity
    if kind == "on-demand":
        return Nodes()
    capacities = table.capacity_nodes(platform, defaults.provisioner)
    if not isinstance(kind, Reservation):
        return (
            _cluster_nodes(defaults.capacity[kind], capacities.get(kind))
            if kind in defaults.capacity
            else capacities.get(kind)
        )
    if (reserved := capacities.get("reservation")) is None:
        return None
    # The nodes of the reservation, or of the part of it that the job names.
    names = {
        NAME: kind.reservation,
        PROJECT: kind.project,
        BLOCK: kind.block,
        SUB_BLOCK: kind.sub_block,
    }
    labels = dict(reserved.labels)
    if defaults.provisioner == "managed" and defaults.reservation_label is not None:
        labels = {defaults.reservation_label: (NAME,)}
    if platform == "gke":
        for part, nodes in gke.RESERVATION_PARTS.items():
            if getattr(kind, part) is not None:
                labels |= nodes.labels
    filled = {
        key: tuple(names.get(value) or value for value in values) for key, values in labels.items()
    }
    return Nodes(filled, reserved.tolerations, reserved.source)


def _cluster_nodes(cluster_nodes: ClusterNodes, usual: Nodes | None) -> Nodes:
    """Return the nodes that the cluster defaults describe, with the usual tolerations unless they set others."""
    keeps_tolerations = usual is not None and "tolerations" not in cluster_nodes.model_fields_set
    tolerations = (
        usual.tolerations
        if usual is not None and keeps_tolerations
        else _dump_tolerations(cluster_nodes.tolerations)
    )
    return Nodes(
        {key: (value,) for key, value in cluster_nodes.node_selector.items()}, tuple(tolerations)
    )


def _required_labels(
    job: JobSpec,
    node_kinds: Iterable[Nodes],
    selector: Mapping[str, str],
    network: Network,
    *,
    is_usual: bool,
) -> dict[str, tuple[str, ...]]:
    """Return all labels that a node must have; `selector` chooses one of several values, or adds a label."""
    accelerator = job.accelerator
    labels = {key: values for nodes in node_kinds for key, values in nodes.labels.items()}
    labels |= {key: (value,) for key, value in selector.items()}
    if accelerator.topology is not None and GKE_TPU in labels:
        labels[GKE_TOPOLOGY] = (accelerator.topology,)
        if (
            is_usual
            and accelerator.topology in ACCELERATORS[accelerator.type].whole_host_topologies
        ):
            labels[gke.CHIPS_LABEL.value] = (str(accelerator.per_host),)
    if network == "gpudirect-tcpxo" and gke.TCPXO_GPU.value in labels.get(GKE_GPU, ()):
        labels[GKE_GPU] = (gke.TCPXO_GPU.value,)
    return labels


def _dump_tolerations(tolerations: Iterable[Toleration]) -> list[dict[str, Any]]:
    return [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in tolerations]


def _efa_interfaces(
    accelerator: Nodes | None, selector: Mapping[str, str], hosts: int
) -> tuple[int, ...]:
    """Return the possible numbers of EFA interfaces, ascending; for a single host only the smallest."""
    types = () if accelerator is None else accelerator.labels.get(INSTANCE, ())
    if (chosen := selector.get(INSTANCE)) is not None:
        types = (chosen,)
    interface_counts = (eks.INSTANCES[name].efa for name in types if name in eks.INSTANCES)
    counts = tuple(sorted({interfaces for interfaces in interface_counts if interfaces}))
    return counts if hosts > 1 else counts[:1]


# --- faults ---------------------------------------------------------------------------------------


def find_faults(nodes: JobNodes) -> Iterator[Fault]:
    """Yield faults for everything that the job requests and the platform does not have."""
    yield from _device_faults(nodes)
    yield from _other_kind_faults(nodes)
    yield from _capacity_faults(nodes)
    job, accelerator = nodes.job, nodes.job.accelerator
    if (
        nodes.platform == "gke"
        and accelerator.platform == "tpu"
        and job.slices > 1
        and job.hosts == 1
    ):
        message = f"slices = {job.slices}: GKE connects only slices of several hosts, "
        message += f"and {accelerator.type} {accelerator.topology} is one host."
        yield Fault(("slices",), message, "use a larger accelerator.topology, or slices: 1.")
    yield from _mixed_kind_faults(nodes)
    if nodes.job.placement is not None and nodes.queue is None:
        yield Fault(
            ("placement",),
            "placement is done by Kueue, and the job has no queue.",
            "name one with queue:.",
        )


def _device_faults(nodes: JobNodes) -> Iterator[Fault]:
    kind, per_host = nodes.job.accelerator.type, nodes.job.accelerator.per_host
    if nodes.accelerator is None:
        platforms = [name for name, nodes_by_type in table.NODES.items() if kind in nodes_by_type]
        hint = (
            f"use platform: {join_choices(platforms)}, or name their labels under nodes.{kind} "
            "in the cluster defaults."
        )
        message = f"accelerator.type = {kind} is not known on platform = {nodes.platform}."
        yield Fault(("accelerator", "type"), message, hint)
        return
    if nodes.job.accelerator.platform not in GPU_PLATFORMS:
        return
    gpus_of_type = {
        name: table.LARGEST[name]
        for names in nodes.labels.values()
        for name in names
        if name in table.LARGEST
    }
    if nodes.accelerator.labels.get(INSTANCE) == () and not gpus_of_type:
        gpus_of_type = {
            name: table.LARGEST[name] for name in table.NODES[nodes.platform][kind].labels[INSTANCE]
        }
    chosen = next(
        (value for value in nodes.job.node_selector.values() if value in gpus_of_type), None
    )
    if gpus_of_type and max(gpus_of_type.values()) < per_host and chosen is not None:
        message = (
            f"node_selector: {chosen} has {format_count(gpus_of_type[chosen], 'GPU')}, and "
            f"accelerator.per_host = {per_host}."
        )
        yield Fault(
            ("node_selector",),
            message,
            f"use accelerator.per_host: {gpus_of_type[chosen]}, or another machine type.",
        )
    elif gpus_of_type and max(gpus_of_type.values()) < per_host:
        message = (
            f"accelerator.per_host = {per_host}: the largest {kind} machine of platform = "
            f"{nodes.platform} has "
        )
        hint = "use more hosts with fewer devices each."
        yield Fault(("accelerator", "per_host"), f"{message}{max(gpus_of_type.values())}.", hint)


def _other_kind_faults(nodes: JobNodes) -> Iterator[Fault]:
    kind, nodes_of_kind = nodes.job.accelerator.type, table.NODES[nodes.platform]
    if nodes.accelerator is None or kind not in nodes_of_kind or nodes.accelerator.source is None:
        return
    for key, own_values in nodes_of_kind[kind].labels.items():
        for value in nodes.labels.get(key, ()):
            other_kinds = [
                name for name, other in nodes_of_kind.items() if value in other.labels.get(key, ())
            ]
            if value not in own_values and other_kinds:
                message = (
                    f"node_selector: {key} = {value} is {join_choices(other_kinds)}, and "
                    f"accelerator.type = {kind}."
                )
                yield Fault(
                    ("node_selector",),
                    message,
                    f"choose {join_choices(own_values)}, or accelerator.type: {other_kinds[0]}.",
                )


def _capacity_faults(nodes: JobNodes) -> Iterator[Fault]:
    kind = nodes.job.capacity
    if nodes.capacity is not None:
        # Nodes of flex-start are removed after some days, whatever runs there.
        longest, deadline = gke.LONGEST_FLEX_START_S.value, nodes.job.deadline
        if (
            kind == "flex-start"
            and nodes.platform == "gke"
            and deadline is not None
            and deadline > longest
        ):
            days = longest // 86_400
            message = (
                f"deadline = {deadline / 86_400:g} days: nodes of capacity = flex-start last "
                f"at most {days} days."
            )
            yield Fault(
                ("deadline",), message, f"write deadline: {days}d or less, or another capacity."
            )
        if isinstance(kind, Reservation):
            yield from _reservation_faults(nodes, kind)
    elif isinstance(kind, Reservation):
        message = f"capacity = reservation is not known on platform = {nodes.platform}."
        yield Fault(
            ("capacity", "reservation"),
            message,
            "use on-demand with node_selector: of those nodes.",
        )
    else:
        hint = f"use on-demand, or name its labels under capacity.{kind} in the cluster defaults."
        yield Fault(
            ("capacity",), f"capacity = {kind} is not known on platform = {nodes.platform}.", hint
        )


def _reservation_faults(nodes: JobNodes, capacity: Reservation) -> Iterator[Fault]:
    name = capacity.reservation
    if (
        nodes.platform == "eks"
        and nodes.provisioner != "managed"
        and not name.startswith(eks.RESERVATION_ID.value)
    ):
        message = (
            f"capacity.reservation = {name} is not an id, by which Karpenter labels reserved nodes."
        )
        hint = (
            f"write {eks.RESERVATION_ID.value}…, or provisioner: managed in the cluster "
            "defaults for node groups."
        )
        yield Fault(("capacity", "reservation"), message, hint)
    for part in gke.RESERVATION_PARTS:
        if getattr(capacity, part) is not None and nodes.platform != "gke":
            message = f"capacity.{part} is not known on platform = {nodes.platform}."
            yield Fault(("capacity", part), message, "leave it out: reservation names it whole.")
    if capacity.sub_block is not None and capacity.block is None:
        message = (
            f"capacity.sub_block = {capacity.sub_block} is part of a block, and "
            "capacity.block is missing."
        )
        yield Fault(("capacity", "sub_block"), message, "block: …")


def _mixed_kind_faults(nodes: JobNodes) -> Iterator[Fault]:
    """Refuse nodes of different kinds: a gang is as fast as its slowest host and as large as its smallest."""
    kind = nodes.job.accelerator.type
    if nodes.accelerator is None or nodes.job.host_count == 1 or ACCELERATORS[kind].may_mix_kinds:
        return
    for key in nodes.accelerator.labels:
        if len(values := nodes.labels.get(key, ())) > 1:
            hosts = format_count(nodes.job.host_count, "host")
            message = (
                f"{hosts} of {kind} could be {join_choices(values)}, which differ in memory "
                "or network."
            )
            hint = (
                f"choose one: node_selector: {{{key}: {values[0]}}}, or nodes.{kind} in the "
                "cluster defaults."
            )
            yield Fault(("accelerator", "type"), message, hint)


# --- patch ----------------------------------------------------------------------------------------


def patch(nodes: JobNodes) -> dict[str, Any]:
    """Return the patch of the pod template."""
    spec: dict[str, Any] = _node_selection(nodes.labels)
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
    return (
        {"metadata": {"annotations": annotations}, "spec": spec} if annotations else {"spec": spec}
    )


def _node_selection(labels: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if single := {key: values[0] for key, values in labels.items() if len(values) == 1}:
        spec["nodeSelector"] = single
    if several := {key: values for key, values in labels.items() if len(values) > 1}:
        terms = [
            {"key": key, "operator": "In", "values": list(values)}
            for key, values in several.items()
        ]
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        spec["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}
        }
    return spec


def container_resources(nodes: JobNodes) -> dict[str, Any]:
    """Return requests and limits of the main container.

    The CPU is not limited, because a throttled host delays the whole gang.
    """
    job = nodes.job
    quantities = {
        "cpu": job.resources.cpu,
        "memory": job.resources.memory,
        "ephemeral-storage": job.resources.ephemeral,
        "hugepages-2Mi": job.resources.hugepages,
    }
    requests = {name: amount for name, amount in quantities.items() if amount is not None}
    if (extended := table.RESOURCE.get(job.accelerator.platform)) is not None:
        requests[extended.value] = str(job.accelerator.per_host)
    limits = {name: amount for name, amount in requests.items() if name != "cpu"}
    blocks = {
        name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts
    }
    return {"resources": blocks} if blocks else {}
