"""The network between the hosts of a job: ports, fast networks and the NetworkPolicy. Pure.

The facts about each network and their sources are in launcher/platforms. Network adapters and
NVLink between hosts may be claimed by dynamic resource allocation (DRA), which needs
resource.k8s.io/v1 of Kubernetes 1.34. Each pod has its own claims, created from a template.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job import checks
from jaxlaunch.launcher.job.defaults import Defaults, Gib, Prometheus, Tcpxo
from jaxlaunch.launcher.job.schema import JobSpec, Network, Rdma
from jaxlaunch.launcher.kubernetes.kinds import COMPUTE_DOMAINS, RESOURCE_CLAIM_TEMPLATES
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER, NAME_LABEL
from jaxlaunch.launcher.manifests.nodes import JobNodes
from jaxlaunch.launcher.platforms import eks, gke, runtime
from jaxlaunch.launcher.platforms.facts import GKE_GPU, INSTANCE
from jaxlaunch.launcher.platforms.table import PlatformName
from jaxlaunch.launcher.wording import join_choices

METRICS_PORT = 9400
LEADER_PORT = 9401
# Jobs with the host's network share its ports. Lower ports belong to services, higher ones to
# outgoing connections and NodePorts.
_HOST_PORTS = range(20000, 30000, 2)
# GKE's TPU runtime: slice builder, transfers between slices, metrics.
TPU_PORTS: Mapping[str, int] = {"tpu-slice": 8471, "tpu-dcn": 8080, "tpu-metrics": 8431}

DAEMON_CONTAINER = "tcpxo-daemon"
_LIBRARY_FOLDER = "/usr/local/nvidia"
_APERTURE_FOLDER = "/dev/aperture_devices"

# GPUDirect networks of GKE, which connect whole hosts with these accelerators.
_WHOLE_HOST_NETWORKS: Mapping[str, Sequence[str]] = {
    "gpudirect-tcpxo": ["h100"],
    "gpudirect-rdma": [kind for kind, nodes in gke.NODES.items() if nodes.gib_tuner],
    "gpudirect-rdma-dra": [kind for kind, nodes in gke.NODES.items() if nodes.rdma],
}


class Ports(NamedTuple):
    """The ports of a pod to which its gang and Prometheus connect."""

    leader: int
    metrics: int


@dataclasses.dataclass(frozen=True)
class JobNetwork:
    """The network between the hosts of a job."""

    job: JobSpec
    platform: PlatformName
    choice: Network
    ports: Ports
    tcpxo: Tcpxo | None
    gib: Gib
    # Variables of NCCL and libfabric, which the job may override.
    environment: Mapping[str, str]
    prometheus: Prometheus
    # Keys of the job whose values come from the cluster defaults → their keys there.
    default_keys: Mapping[KeyPath, KeyPath]

    @property
    def pinning(self) -> str | None:
        """The name of a network that needs pinned memory, or None."""
        name = "rdma" if isinstance(self.choice, Rdma) else self.choice
        return name if self.job.host_count > 1 and name in runtime.PINNING.value else None

    @property
    def container_names(self) -> tuple[str, ...]:
        """The names of the containers that the network adds to a pod."""
        return (DAEMON_CONTAINER,) if self.choice == "gpudirect-tcpxo" else ()


# --- resolve --------------------------------------------------------------------------------------


def resolve(job: JobSpec, defaults: Defaults, platform: PlatformName) -> JobNetwork:
    """Choose the network of the job, else that of the cluster for its accelerator."""
    choice, kind = job.network, job.accelerator.type
    default_keys: dict[KeyPath, KeyPath] = {}
    if "network" not in job.model_fields_set and kind in defaults.network:
        choice, default_keys[("network",)] = defaults.network[kind], ("network", kind)
    ports = Ports(LEADER_PORT, METRICS_PORT)
    # Jobs on one host share its ports, so each job derives its own from its name. The namespace of
    # a kubeconfig's context does not count: `render`, `plan` and `submit` give the same ports. If
    # two jobs have the same ports, the scheduler places their pods on different nodes.
    if choice == "hostnetwork":
        owner = f"{job.namespace or ''}/{job.name}"
        first = _HOST_PORTS[zlib.crc32(owner.encode()) % len(_HOST_PORTS)]
        ports = Ports(first, first + 1)
    return JobNetwork(
        job=job,
        platform=platform,
        choice=choice,
        ports=ports,
        tcpxo=defaults.tcpxo,
        gib=defaults.gib or Gib(),
        environment=_nccl_environment(job, choice, platform, defaults.tcpxo),
        prometheus=defaults.prometheus,
        default_keys=default_keys,
    )


def _nccl_environment(
    job: JobSpec, choice: Network, platform: PlatformName, tcpxo: Tcpxo | None
) -> dict[str, str]:
    """Return the variables that NCCL and libfabric need, which a job may override.

    Google's examples source a shell script instead, which needs a shell in the command.
    """
    if isinstance(choice, Rdma):
        return dict(choice.env)
    if choice in ("efa", "efa-dra") and job.resources.hugepages is None:
        return dict(eks.WITHOUT_HUGEPAGES.value)
    if choice == "gpudirect-tcpxo":
        return dict(gke.TCPXO_VARIABLES.value if tcpxo is None or tcpxo.env is None else tcpxo.env)
    nodes = gke.NODES.get(job.accelerator.type) if platform == "gke" else None
    if nodes is None or nodes.plugins is None:
        return {}
    if choice in ("gpudirect-rdma", "gpudirect-rdma-dra"):
        # The tuner ends a program on machines without a configuration, so it is disabled there.
        tuner = nodes.gib_tuner and {"NCCL_TUNER_CONFIG_PATH": nodes.gib_tuner.value}
        return {**gke.GIB_VARIABLES.value, **(tuner or {"NCCL_TUNER_PLUGIN": "none"})}
    # A job may configure NCCL's plugins itself: by a variable, or in its pod or command.
    prefixes, text = tuple(gke.PLUGIN_VARIABLE_PREFIXES.value), f"{job.pod} {job.command}"
    names = {*job.env, *job.secrets}
    has_variable = "NCCL_NET" in names or any(name.startswith(prefixes) for name in names)
    if has_variable or gke.GIB_FOLDER.value in text or "tcpx" in text:
        return {}
    return dict(gke.WITHOUT_PLUGINS.value) if choice in ("default", "hostnetwork") else {}


# --- faults ---------------------------------------------------------------------------------------


def find_faults(network: JobNetwork, nodes: JobNodes) -> Iterator[Fault]:
    """Yield faults of a network that these nodes do not support."""
    choice, kind = network.choice, network.job.accelerator.type
    if (fault := checks.network_fault(choice, kind, network.platform)) is not None:
        yield fault
    elif choice == "efa":
        yield from _efa_faults(network, nodes)
    elif isinstance(choice, str) and choice in _WHOLE_HOST_NETWORKS:
        yield from _gpudirect_faults(network, nodes, choice)


def _gpudirect_faults(network: JobNetwork, nodes: JobNodes, profile: str) -> Iterator[Fault]:
    path: KeyPath = ("network",)
    kinds = _WHOLE_HOST_NETWORKS[profile]
    kind, per_host = network.job.accelerator.type, network.job.accelerator.per_host
    gpu = gke.TCPX_GPU.value
    if kind not in kinds or per_host != ACCELERATORS[kind].per_host:
        hosts = ", ".join(f"{name} with {ACCELERATORS[name].per_host}" for name in kinds)
        hint = f"it joins whole hosts: {hosts} per host."
        if not {*gke.COMPUTE_DOMAIN_GPUS.value}.isdisjoint(nodes.labels.get(GKE_GPU, ())):
            hint += " {network: gpudirect-rdma-dra, compute_domain: true} is RDMA and NVLink "
            hint += f"between hosts of {kind}."
        message = f"network = {profile} does not apply to {kind} with {per_host} per host."
        yield Fault(path, message, hint)
    elif profile == "gpudirect-tcpxo" and nodes.labels.get(GKE_GPU) == (gpu,):
        reason = "whose GPUDirect-TCPX is not supported."
        message = f"network = {profile} does not exist on nodes of {gpu}, {reason}"
        yield Fault(path, message, f"choose {GKE_GPU}: {gke.TCPXO_GPU.value}, or network: default.")
    if profile == "gpudirect-tcpxo" and network.tcpxo is None:
        message = f"network = {profile} needs the receive daemon's image, "
        message += "and the cluster defaults have none."
        yield Fault(path, message, "tcpxo: {image: …} in the cluster defaults.")


def _efa_faults(network: JobNetwork, nodes: JobNodes) -> Iterator[Fault]:
    """Yield faults at the keys to change. The network itself may come from the cluster defaults."""
    kind, resources = network.job.accelerator.type, network.job.resources
    if not nodes.efa_interfaces:
        message = f"network = efa: how many interfaces nodes of {kind} have is not known."
        hint = f"write {{profile: rdma, resource: {eks.EFA_RESOURCE.value}, count: …}}."
        yield Fault(("network",), message, hint)
    elif len(nodes.efa_interfaces) > 1 and ACCELERATORS[kind].may_mix_kinds:
        types = nodes.labels.get(INSTANCE, ())
        counts = join_choices(nodes.efa_interfaces)
        message = f"network = efa: nodes of {kind} have {counts} interfaces, by their type."
        hint = f"choose one: node_selector: {{{INSTANCE}: {types[-1] if types else '…'}}}."
        yield Fault(("network",), message, hint)
    if resources.hugepages is not None and resources.cpu is None and resources.memory is None:
        message = f"resources.hugepages = {resources.hugepages}: "
        message += "Kubernetes gives them only together with cpu or memory."
        yield Fault(("resources",), message, "resources: {cpu: 90, memory: 1500Gi, hugepages: 5Gi}")


# --- patch ----------------------------------------------------------------------------------------


def patch(network: JobNetwork, nodes: JobNodes) -> dict[str, Any]:
    """Return the patch of the pod template for a job without faults."""
    match network.choice:
        case Rdma(resource=resource, count=number, networks=networks):
            template = _resource_patch(resource, number)
            if networks:
                annotations = {runtime.MULTUS.value: ",".join(networks)}
                template["metadata"] = {"annotations": annotations}
            return template
        case "hostnetwork":
            return {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}
        case "efa":
            (interfaces,) = nodes.efa_interfaces
            return _resource_patch(eks.EFA_RESOURCE.value, interfaces)
        case "gpudirect-tcpxo" if network.tcpxo is not None:
            return _tcpxo_patch(network.tcpxo)
        case "gpudirect-rdma":
            first = gke.GIB_FIRST_INTERFACE.value
            annotations = _interface_annotations(network.gib.networks, first)
            return _gib_patch(gke.GIB_FOLDERS.value) | {"metadata": {"annotations": annotations}}
        case "gpudirect-rdma-dra":
            # The interfaces are claimed by `claims_patch`.
            has_plugin = gke.NODES[network.job.accelerator.type].plugins is not None
            return _gib_patch(gke.GIB_FOLDERS.value if has_plugin else gke.DRIVER_FOLDER.value)
    return {}


def container_ports(network: JobNetwork) -> list[dict[str, Any]]:
    """Return the ports of the main container."""
    tpu_ports = TPU_PORTS if network.job.accelerator.platform == "tpu" else {}
    ports = {**network.ports._asdict(), **tpu_ports}
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _tcpxo_patch(tcpxo: Tcpxo) -> dict[str, Any]:
    mounts = {"libraries": _LIBRARY_FOLDER, "aperture-devices": _APERTURE_FOLDER}
    folders = {"libraries": "/home/kubernetes/bin/nvidia", "sys": "/sys", "proc-sys": "/proc/sys"}
    template = _node_folders_patch(folders | {"aperture-devices": _APERTURE_FOLDER}, mounts)
    devices = [f"nvidia{number}" for number in range(gke.TCPXO_GPUS.value)]
    devices += ["nvidiactl", "nvidia-uvm", "dmabuf_import_helper"]
    device_list = "".join(f"- path: /dev/{device}\n" for device in devices)
    annotation = {f"devices.gke.io/container.{DAEMON_CONTAINER}": device_list}
    interfaces = _interface_annotations(tcpxo.networks, first=1)
    template["metadata"] = {"annotations": annotation | interfaces}
    template["spec"]["initContainers"] = [_tcpxo_daemon(tcpxo)]
    return template


def _interface_annotations(networks: Sequence[str], first: int) -> dict[str, str]:
    """Return GKE's annotations for eth0 and one interface per network, from eth`first` on."""
    interfaces = [{"interfaceName": "eth0", "network": "default"}]
    for number, network in enumerate(networks, first):
        interfaces.append({"interfaceName": f"eth{number}", "network": network})
    return {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": json.dumps(interfaces),
    }


def _gib_patch(folders: Mapping[str, str]) -> dict[str, Any]:
    names = {path.rpartition("/")[2]: path for path in folders}
    return _node_folders_patch(names, {name: folders[path] for name, path in names.items()})


def _node_folders_patch(folders: Mapping[str, str], mounts: Mapping[str, str]) -> dict[str, Any]:
    """Return the patch with folders of the node as volumes, and mounts in the main container."""
    volume_mounts = [{"name": name, "mountPath": path} for name, path in mounts.items()]
    volumes = [{"name": name, "hostPath": {"path": path}} for name, path in folders.items()]
    main = {"name": MAIN_CONTAINER, "volumeMounts": volume_mounts}
    return {"spec": {"containers": [main], "volumes": volumes}}


def _tcpxo_daemon(tcpxo: Tcpxo) -> dict[str, Any]:
    """Return the receive daemon, a native sidecar so that the Job can complete."""
    script = "/fts/entrypoint_rxdm_container.sh"
    return {
        "name": DAEMON_CONTAINER,
        "image": tcpxo.image,
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c"],
        "args": [f"set -ex; chmod 755 {script}; exec {script} --num_hops=2"],
        "env": render_env({"LD_LIBRARY_PATH": f"{_LIBRARY_FOLDER}/lib64"}),
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]},
        },
        "volumeMounts": [
            {"name": "libraries", "mountPath": _LIBRARY_FOLDER},
            {"name": "sys", "mountPath": "/hostsysfs"},
            {"name": "proc-sys", "mountPath": "/hostprocsysfs"},
        ],
    }


def _resource_patch(name: str, number: int) -> dict[str, Any]:
    """Return the patch that requests an extended resource, whose limit must be equal."""
    resources = {"requests": {name: str(number)}, "limits": {name: str(number)}}
    return {"spec": {"containers": [{"name": MAIN_CONTAINER, "resources": resources}]}}


def render_env(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return environment variables with `$` escaped, because the kubelet expands $(NAME)."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in env.items()]


def render_policy(network: JobNetwork, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the NetworkPolicy. It admits the job's pods, and Prometheus to the metrics port.

    The list is empty if the job disables it or uses the host's network, to which policies do not
    apply.
    """
    if not network.job.network_policy or network.choice == "hostnetwork":
        return []
    job_pods = {"podSelector": {"matchLabels": {NAME_LABEL: metadata["name"]}}}
    namespaces: dict[str, Any] = {}
    if (namespace := network.prometheus.namespace) is not None:
        namespaces["matchLabels"] = {"kubernetes.io/metadata.name": namespace}
    labels = dict(network.prometheus.labels)
    prometheus = {"namespaceSelector": namespaces, "podSelector": {"matchLabels": labels}}
    metrics_port = {"protocol": "TCP", "port": network.ports.metrics}
    rules = [{"from": [job_pods]}, {"from": [prometheus], "ports": [metrics_port]}]
    spec = {**job_pods, "policyTypes": ["Ingress"], "ingress": rules}
    manifest = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    return [{**manifest, "metadata": dict(metadata), "spec": spec}]


# Names of the claims of a pod.
_ADAPTER_CLAIM, _NVLINK_CLAIM = "adapters", "nvlink"


class Adapters(NamedTuple):
    """The network adapters of a host that its pod claims."""

    device_class: str
    # None for all adapters of the node.
    number: int | None


def claimed_adapters(network: JobNetwork, nodes: JobNodes) -> Adapters | None:
    """Return the adapters that the network claims by DRA, or None."""
    if network.choice == "efa-dra":
        interfaces = nodes.efa_interfaces
        return Adapters(eks.EFA_CLASS.value, interfaces[0] if len(interfaces) == 1 else None)
    if network.choice == "gpudirect-rdma-dra":
        rdma = gke.NODES[network.job.accelerator.type].rdma
        return Adapters(gke.RDMA_CLASS.value, None if rdma is None else rdma.value)
    return None


def claims_patch(network: JobNetwork, nodes: JobNodes) -> dict[str, Any]:
    """Return the patch of the pod template with the claims."""
    names = [_ADAPTER_CLAIM] if claimed_adapters(network, nodes) is not None else []
    names += [_NVLINK_CLAIM] if network.job.compute_domain else []
    if not names:
        return {}
    main = {"name": MAIN_CONTAINER, "resources": {"claims": [{"name": name} for name in names]}}
    templates = {name: f"{network.job.name}-{name}" for name in names}
    claims = [{"name": name, "resourceClaimTemplateName": templates[name]} for name in names]
    return {"spec": {"containers": [main], "resourceClaims": claims}}


def claim_manifests(
    network: JobNetwork, nodes: JobNodes, metadata: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the claim template of the adapters and the ComputeDomain, if the job needs them."""
    manifests = []
    if (adapters := claimed_adapters(network, nodes)) is not None:
        exactly: dict[str, Any] = {
            "deviceClassName": adapters.device_class,
            "allocationMode": "All",
        }
        if adapters.number is not None:
            exactly |= {"allocationMode": "ExactCount", "count": adapters.number}
        requests = {"requests": [{"name": _ADAPTER_CLAIM, "exactly": exactly}]}
        spec: dict[str, Any] = {"spec": {"devices": requests}}
        name = f"{network.job.name}-{_ADAPTER_CLAIM}"
        manifests.append((RESOURCE_CLAIM_TEMPLATES, {**metadata, "name": name}, spec))
    if network.job.compute_domain:
        # The controller of ComputeDomains creates the claim template. Every pod waits for numNodes
        # hosts, unless the driver uses DNS names; then the number is only reported.
        channel = {"resourceClaimTemplate": {"name": f"{network.job.name}-{_NVLINK_CLAIM}"}}
        spec = {"numNodes": network.job.host_count, "channel": channel}
        manifests.append((COMPUTE_DOMAINS, dict(metadata), spec))
    return [
        {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec}
        for kind, metadata, spec in manifests
    ]
