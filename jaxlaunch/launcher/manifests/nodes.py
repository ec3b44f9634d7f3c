"""The nodes of a job: labels, taints, devices, kind of capacity and placement of pods. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxlaunch.accelerators import ACCELERATORS, GPU_PLATFORMS
from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.job.defaults import Nodes as ClusterNodes
from jaxlaunch.launcher.job.schema import JobSpec, Network, Reservation, Toleration
from jaxlaunch.launcher.kubernetes.labels import (
    PREFERRED_TOPOLOGY,
    REQUIRED_TOPOLOGY,
    SLICE_SIZE,
    SLICE_TOPOLOGY,
)
from jaxlaunch.launcher.platforms import eks, generic, gke, names, table
from jaxlaunch.launcher.platforms.facts import (
    GKE_GPU,
    GKE_TOPOLOGY,
    GKE_TPU,
    INSTANCE,
    RESERVATION_BLOCK,
    RESERVATION_NAME,
    RESERVATION_PROJECT,
    RESERVATION_SUB_BLOCK,
    Nodes,
    Provisioner,
    toleration_for,
)
from jaxlaunch.launcher.platforms.table import PlatformName
from jaxlaunch.launcher.wording import format_count, join_choices

# By default, Kubernetes evicts pods five minutes after their node is lost. The gang notices after
# seconds, and then waits for the eviction.
LOST_NODE_TOLERATIONS = tuple(
    {**toleration_for(f"node.kubernetes.io/{taint}", "NoExecute"), "tolerationSeconds": 30}
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
    # Nodes with the accelerator; None if they are not known on the platform.
    accelerator: Nodes | None
    # Nodes of the kind of capacity; None if they are not known on the platform.
    capacity: Nodes | None
    # Labels that a node must have, with one of several values for each key.
    labels: Mapping[str, tuple[str, ...]]
    tolerations: tuple[Mapping[str, Any], ...]
    # Possible numbers of EFA interfaces, ascending.
    efa_interfaces: tuple[int, ...]
    # The label that nodes of one TPU slice share.
    slice_label: str | None
    # Environment variables with the folders of the driver.
    search_paths: Mapping[str, str]


# --- resolve --------------------------------------------------------------------------------------


def resolve(job: JobSpec, defaults: Defaults, platform: PlatformName, network: Network) -> JobNodes:
    """Combine the choices of the job, the cluster and the platform, in this order of precedence."""
    accelerator = _accelerator_nodes(job, defaults, platform)
    capacity = _capacity_nodes(job, defaults, platform)
    selector = defaults.node_selector | job.node_selector
    facts = table.PLATFORMS[platform]
    paths = facts.search_paths.get(job.accelerator.platform)
    slice_label = defaults.slice_label or (facts.slice_label.value if facts.slice_label else None)
    node_kinds = [nodes for nodes in (accelerator, capacity) if nodes is not None]
    has_platform_labels = accelerator is not None and bool(accelerator.source)
    # Nodes with special devices may have a taint with the name of their resource, as the admission
    # controller ExtendedResourceToleration expects.
    resource = job.accelerator.resource
    device_tolerations = [] if resource is None else [toleration_for(resource)]
    return JobNodes(
        job=job,
        platform=platform,
        queue=job.queue or defaults.queue,
        provisioner=defaults.provisioner,
        accelerator=accelerator,
        capacity=capacity,
        labels=_required_labels(
            job, node_kinds, selector, network, has_platform_labels=has_platform_labels
        ),
        tolerations=(
            *LOST_NODE_TOLERATIONS,
            *(toleration for nodes in node_kinds for toleration in nodes.tolerations),
            *device_tolerations,
            *_dump_tolerations([*defaults.tolerations, *job.tolerations]),
        ),
        efa_interfaces=_efa_interfaces(accelerator, selector, job.host_count),
        slice_label=slice_label,
        search_paths={} if paths is None else paths.value,
    )


def _accelerator_nodes(job: JobSpec, defaults: Defaults, platform: PlatformName) -> Nodes | None:
    """Return the nodes with enough of the accelerators, or None on an unknown platform.

    If no node has enough of them, the instance types are empty.
    """
    kind, per_host = job.accelerator.type, job.accelerator.per_host
    nodes = table.NODES[platform].get(kind)
    if kind in defaults.nodes:
        return _cluster_nodes(defaults.nodes[kind], nodes)
    if nodes is None or INSTANCE not in nodes.labels:
        return nodes
    types = [name for name in nodes.labels[INSTANCE] if eks.INSTANCES[name].gpus >= per_host]
    return dataclasses.replace(nodes, labels={**nodes.labels, INSTANCE: tuple(types)})


def _capacity_nodes(job: JobSpec, defaults: Defaults, platform: PlatformName) -> Nodes | None:
    kind = job.capacity
    if kind == "on-demand":
        return Nodes()
    capacities = table.capacity_nodes(platform, defaults.provisioner)
    if not isinstance(kind, Reservation):
        if kind in defaults.capacity:
            return _cluster_nodes(defaults.capacity[kind], capacities.get(kind))
        return capacities.get(kind)
    if (reservation_nodes := capacities.get("reservation")) is None:
        return None
    labels = dict(reservation_nodes.labels)
    if defaults.provisioner == "managed" and defaults.reservation_label is not None:
        labels = {defaults.reservation_label: (RESERVATION_NAME,)}
    if platform == "gke":
        for part, nodes in gke.RESERVATION_PARTS.items():
            if getattr(kind, part) is not None:
                labels |= nodes.labels
    placeholders = {
        RESERVATION_NAME: kind.reservation,
        RESERVATION_PROJECT: kind.project,
        RESERVATION_BLOCK: kind.block,
        RESERVATION_SUB_BLOCK: kind.sub_block,
    }
    for key, values in labels.items():
        labels[key] = tuple(placeholders.get(value) or value for value in values)
    return Nodes(labels, reservation_nodes.tolerations, reservation_nodes.source)


def _cluster_nodes(cluster_nodes: ClusterNodes, platform_nodes: Nodes | None) -> Nodes:
    """Return the nodes of the cluster defaults, by default with the platform's tolerations."""
    tolerations = tuple(_dump_tolerations(cluster_nodes.tolerations))
    if platform_nodes is not None and "tolerations" not in cluster_nodes.model_fields_set:
        tolerations = platform_nodes.tolerations
    return Nodes({key: (value,) for key, value in cluster_nodes.node_selector.items()}, tolerations)


def _required_labels(
    job: JobSpec,
    node_kinds: Iterable[Nodes],
    selector: Mapping[str, str],
    network: Network,
    *,
    has_platform_labels: bool,
) -> dict[str, tuple[str, ...]]:
    """Return the required labels; `selector` chooses one of several values, or adds a label."""
    kind, topology = ACCELERATORS[job.accelerator.type], job.accelerator.topology
    labels = {key: values for nodes in node_kinds for key, values in nodes.labels.items()}
    # Nodes of a machine type may lack the labels that an optional component of the cluster adds.
    if has_platform_labels and names.KIND_LABELS & selector.keys():
        for key in {*generic.DISCOVERED_LABELS.value} - selector.keys():
            labels.pop(key, None)
    labels |= {key: (value,) for key, value in selector.items()}
    if topology is not None and GKE_TPU in labels:
        labels[GKE_TOPOLOGY] = (topology,)
        if has_platform_labels and topology in kind.whole_host_topologies:
            labels[gke.CHIPS_LABEL.value] = (str(job.accelerator.per_host),)
    if network == "gpudirect-tcpxo" and gke.TCPXO_GPU.value in labels.get(GKE_GPU, ()):
        labels[GKE_GPU] = (gke.TCPXO_GPU.value,)
    return labels


def _dump_tolerations(tolerations: Iterable[Toleration]) -> list[Mapping[str, Any]]:
    return [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in tolerations]


def _efa_interfaces(
    accelerator: Nodes | None, selector: Mapping[str, str], hosts: int
) -> tuple[int, ...]:
    """Return the possible numbers of EFA interfaces; for a single host only the smallest."""
    types = () if accelerator is None else accelerator.labels.get(INSTANCE, ())
    if (instance_type := selector.get(INSTANCE)) is not None:
        types = (instance_type,)
    interface_counts = (eks.INSTANCES[name].efa for name in types if name in eks.INSTANCES)
    counts = tuple(sorted({interfaces for interfaces in interface_counts if interfaces}))
    return counts if hosts > 1 else counts[:1]


# --- faults ---------------------------------------------------------------------------------------


def find_faults(nodes: JobNodes) -> Iterator[Fault]:
    """Yield faults for devices, capacity and placement that the platform does not have."""
    yield from _device_faults(nodes)
    yield from _other_kind_faults(nodes)
    yield from _capacity_faults(nodes)
    job, accelerator = nodes.job, nodes.job.accelerator
    is_one_host = job.slices > 1 and job.hosts == 1
    if nodes.platform == "gke" and accelerator.platform == "tpu" and is_one_host:
        message = f"slices = {job.slices}: GKE connects only slices of several hosts, "
        message += f"and {accelerator.type} {accelerator.topology} is one host."
        yield Fault(("slices",), message, "use a larger accelerator.topology, or slices: 1.")
    yield from _mixed_kind_faults(nodes)
    if job.placement is not None and nodes.queue is None:
        message = "placement is done by Kueue, and the job has no queue."
        yield Fault(("placement",), message, "name one with queue:.")


def _device_resource(job: JobSpec) -> str | None:
    """Return the resource of the job's devices, which a CPU does not have."""
    if job.accelerator.resource is not None:
        return job.accelerator.resource
    default_resource = table.RESOURCE_NAMES.get(job.accelerator.platform)
    return None if default_resource is None else default_resource.value


def _device_faults(nodes: JobNodes) -> Iterator[Fault]:
    kind, per_host = nodes.job.accelerator.type, nodes.job.accelerator.per_host
    if nodes.accelerator is None:
        platforms = [name for name, nodes_by_type in table.NODES.items() if kind in nodes_by_type]
        hint = f"use platform: {join_choices(platforms)}, "
        hint += f"or name their labels under nodes.{kind} in the cluster defaults."
        message = f"accelerator.type = {kind} is not known on platform = {nodes.platform}."
        yield Fault(("accelerator", "type"), message, hint)
        return
    if nodes.job.accelerator.platform not in GPU_PLATFORMS:
        return
    label_values = {value for values in nodes.labels.values() for value in values}
    machines = label_values & table.MAX_GPUS_BY_LABEL.keys()
    if nodes.accelerator.labels.get(INSTANCE) == () and not machines:
        machines = {*table.NODES[nodes.platform][kind].labels[INSTANCE]}
    largest = max((table.MAX_GPUS_BY_LABEL[name] for name in machines), default=per_host)
    if largest >= per_host:
        return
    for value in nodes.job.node_selector.values():
        if value in machines:
            gpus = table.MAX_GPUS_BY_LABEL[value]
            message = f"node_selector: {value} has {format_count(gpus, 'GPU')}, and "
            message += f"accelerator.per_host = {per_host}."
            hint = f"use accelerator.per_host: {gpus}, or another machine type."
            yield Fault(("node_selector",), message, hint)
            return
    limit = f"the largest {kind} machine of platform = {nodes.platform} has {largest}."
    message = f"accelerator.per_host = {per_host}: {limit}"
    yield Fault(("accelerator", "per_host"), message, "use more hosts with fewer devices each.")


def _other_kind_faults(nodes: JobNodes) -> Iterator[Fault]:
    kind, nodes_of_kind = nodes.job.accelerator.type, table.NODES[nodes.platform]
    if nodes.accelerator is None or kind not in nodes_of_kind or nodes.accelerator.source is None:
        return
    for key, own_values in nodes_of_kind[kind].labels.items():
        for value in nodes.labels.get(key, ()):
            kinds = [
                name for name, other in nodes_of_kind.items() if value in other.labels.get(key, ())
            ]
            if value not in own_values and kinds:
                choices = join_choices(kinds)
                message = f"node_selector: {key} = {value} is {choices}, and "
                message += f"accelerator.type = {kind}."
                hint = f"choose {join_choices(own_values)}, or accelerator.type: {kinds[0]}."
                yield Fault(("node_selector",), message, hint)
                return
    if (mismatch := names.find_other_kind(nodes.job.node_selector, kind)) is not None:
        key, other_kind = mismatch
        setting = f"node_selector: {key} = {nodes.job.node_selector[key]}"
        message = f"{setting} is {other_kind}, and accelerator.type = {kind}."
        hint = f"choose nodes of {kind}, or accelerator.type: {other_kind}."
        yield Fault(("node_selector",), message, hint)


def _capacity_faults(nodes: JobNodes) -> Iterator[Fault]:
    kind, deadline = nodes.job.capacity, nodes.job.deadline
    if nodes.capacity is None:
        is_reservation = isinstance(kind, Reservation)
        name = "reservation" if is_reservation else kind
        path: KeyPath = ("capacity", "reservation") if is_reservation else ("capacity",)
        message = f"capacity = {name} is not known on platform = {nodes.platform}."
        hint = f"use on-demand, or name its labels under capacity.{name} in the cluster defaults."
        if is_reservation:
            hint = "use on-demand with node_selector: of those nodes."
        yield Fault(path, message, hint)
    elif isinstance(kind, Reservation):
        yield from _reservation_faults(nodes, kind)
    # GKE removes nodes of flex-start after some days, even if jobs run on them.
    elif kind == "flex-start" and nodes.platform == "gke" and deadline is not None:
        days = gke.LONGEST_FLEX_START_S.value // 86_400
        if deadline > gke.LONGEST_FLEX_START_S.value:
            message = f"deadline = {deadline / 86_400:g} days: "
            message += f"nodes of capacity = flex-start last at most {days} days."
            hint = f"write deadline: {days}d or less, or another capacity."
            yield Fault(("deadline",), message, hint)


def _reservation_faults(nodes: JobNodes, capacity: Reservation) -> Iterator[Fault]:
    name, prefix = capacity.reservation, eks.RESERVATION_ID.value
    needs_id = nodes.platform == "eks" and nodes.provisioner != "managed"
    if needs_id and not name.startswith(prefix):
        reason = "by which Karpenter labels reserved nodes."
        hint = f"write {prefix}…, or provisioner: managed in the cluster defaults for node groups."
        message = f"capacity.reservation = {name} is not an id, {reason}"
        yield Fault(("capacity", "reservation"), message, hint)
    for part in gke.RESERVATION_PARTS:
        if getattr(capacity, part) is not None and nodes.platform != "gke":
            message = f"capacity.{part} is not known on platform = {nodes.platform}."
            yield Fault(("capacity", part), message, "leave it out: reservation names it whole.")
    if capacity.sub_block is not None and capacity.block is None:
        message = f"capacity.sub_block = {capacity.sub_block} is part of a block"
        path = ("capacity", "sub_block")
        yield Fault(path, f"{message}, and capacity.block is missing.", "block: …")


def _mixed_kind_faults(nodes: JobNodes) -> Iterator[Fault]:
    """Refuse nodes of several kinds, because the slowest or smallest would limit the gang.

    Nodes are of one kind if the job also selects a label such as the machine type.
    """
    kind = nodes.job.accelerator.type
    if nodes.accelerator is None or nodes.job.host_count == 1 or ACCELERATORS[kind].may_mix_kinds:
        return
    if any(len(nodes.labels[key]) == 1 for key in names.KIND_LABELS & nodes.labels.keys()):
        return
    for key in nodes.accelerator.labels:
        if len(values := nodes.labels.get(key, ())) > 1:
            hosts = f"{format_count(nodes.job.host_count, 'host')} of {kind}"
            choices = join_choices(values)
            message = f"{hosts} could be {choices}, which differ in memory or network."
            hint = f"choose one: node_selector: {{{key}: {values[0]}}}, "
            hint += f"or nodes.{kind} in the cluster defaults."
            yield Fault(("accelerator", "type"), message, hint)


# --- patch ----------------------------------------------------------------------------------------


def patch(nodes: JobNodes) -> dict[str, Any]:
    """Return the patch of the pod template."""
    spec: dict[str, Any] = _node_selection(nodes.labels)
    spec["tolerations"] = [dict(toleration) for toleration in nodes.tolerations]
    # With a queue, the priority is a label of the JobSet that Kueue reads.
    if nodes.job.priority is not None and nodes.queue is None:
        spec["priorityClassName"] = nodes.job.priority
    job, placement = nodes.job, nodes.job.placement
    if placement is None:
        return {"spec": spec}
    # Kueue reads these annotations: the level of its Topology in which a slice is placed.
    annotations = {PREFERRED_TOPOLOGY: placement.preferred}
    if placement.required is not None:
        annotations = {REQUIRED_TOPOLOGY: placement.required}
        if job.slices > 1:
            annotations = {SLICE_TOPOLOGY: placement.required, SLICE_SIZE: str(job.hosts)}
    return {"metadata": {"annotations": annotations}, "spec": spec}


def _node_selection(labels: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if selector := {key: values[0] for key, values in labels.items() if len(values) == 1}:
        spec["nodeSelector"] = selector
    terms = [
        {"key": key, "operator": "In", "values": list(values)}
        for key, values in labels.items()
        if len(values) > 1
    ]
    if terms:
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required}
        spec["affinity"] = {"nodeAffinity": affinity}
    return spec


def container_resources(nodes: JobNodes) -> dict[str, Any]:
    """Return requests and limits of the main container.

    The CPU is not limited, because a throttled host delays the whole gang.
    """
    resources, accelerator = nodes.job.resources, nodes.job.accelerator
    quantities = {
        "cpu": resources.cpu,
        "memory": resources.memory,
        "ephemeral-storage": resources.ephemeral,
        "hugepages-2Mi": resources.hugepages,
    }
    requests = {name: text for name, text in quantities.items() if text is not None}
    if (device_resource := _device_resource(nodes.job)) is not None:
        requests[device_resource] = str(accelerator.per_host)
    if not requests:
        return {}
    limits = {name: text for name, text in requests.items() if name != "cpu"}
    return {"resources": {"requests": requests} | ({"limits": limits} if limits else {})}
