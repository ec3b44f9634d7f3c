"""How hosts reach each other: ports, the fast networks, and who may come in. Pure.

Each network adds exactly what it needs, from launcher/manifests/platforms, with its sources there.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch.accelerators import Platform
from jaxlaunch.launcher.job.defaults import Gib, Prometheus, Tcpxo
from jaxlaunch.launcher.job.schema import Network, Rdma
from jaxlaunch.launcher.kube.labels import MAIN_CONTAINER
from jaxlaunch.launcher.manifests.platforms import eks, gke, runtime
from jaxlaunch.launcher.manifests.platforms.table import Where

METRICS_PORT = 9400
LEADER_PORT = 9401
# With the host's network, jobs share its ports: below them lie services, above outgoing connections and NodePorts.
_HOST_PORTS = range(20000, 30000, 2)
# GKE's TPU runtime: slice builder, transfers between slices, metrics.
TPU_PORTS: Mapping[str, int] = {"tpu-slice": 8471, "tpu-dcn": 8080, "tpu-metrics": 8431}

DAEMON = "tcpxo-daemon"
_LIBRARIES = "/usr/local/nvidia"
_APERTURE = "/dev/aperture_devices"


class Ports(NamedTuple):
    """The ports of a pod that its gang and Prometheus reach."""

    leader: int
    metrics: int


def ports(network: Network, owner: str) -> Ports:
    """The ports of every pod of a job; with the host's network, where jobs share them, chosen by `owner`."""
    if network != "hostnetwork":
        return Ports(LEADER_PORT, METRICS_PORT)
    first = _HOST_PORTS[zlib.crc32(owner.encode()) % len(_HOST_PORTS)]
    return Ports(first, first + 1)


def container_ports(ports: Ports, platform: Platform) -> list[dict[str, Any]]:
    """The ports of the main container."""
    named = {**ports._asdict(), **(TPU_PORTS if platform == "tpu" else {})}
    return [{"name": name, "containerPort": port} for name, port in named.items()]


def environment(
    network: Network,
    where: Where,
    kind: str,
    tcpxo: Tcpxo | None,
    *,
    has_hugepages: bool,
    brings_gib: bool,
) -> dict[str, str]:
    """What NCCL and libfabric must be told there; a job may set each otherwise. Google's own pods source a script for
    it, which a program that is no shell cannot."""
    if network == "efa" and not has_hugepages:
        return dict(eks.WITHOUT_HUGEPAGES.value)
    if network == "gpudirect-tcpxo":
        return dict(gke.TCPXO_VARIABLES.value if tcpxo is None or tcpxo.env is None else tcpxo.env)
    if where == "gke" and kind in gke.GIB_TUNER:
        if network == "gpudirect-rdma":
            return {**gke.GIB_VARIABLES.value, "NCCL_TUNER_CONFIG_PATH": gke.GIB_TUNER[kind].value}
        if network in ("default", "hostnetwork") and not brings_gib:
            return dict(gke.WITHOUT_GIB.value)
    return {}


def patch(network: Network, efa_interfaces: Sequence[int], tcpxo: Tcpxo | None, gib: Gib) -> dict[str, Any]:
    """The pod template's part of it, of a job that launcher/manifests/platform_checks accepts."""
    match network:
        case Rdma():
            return _rdma(network)
        case "hostnetwork":
            return {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}
        case "efa":
            (interfaces,) = efa_interfaces
            return _main(_resources({eks.EFA_RESOURCE.value: interfaces}))
        case "gpudirect-tcpxo" if tcpxo is not None:
            return _tcpxo(tcpxo)
        case "gpudirect-rdma":
            return _gib(gib)
    return {}


def pinning(network: Network, hosts: int) -> str | None:
    """The name of a network whose adapters read and write memory that the program pins; None for any other, and for a
    single host, which reaches no other."""
    if hosts == 1:
        return None
    name = "rdma" if isinstance(network, Rdma) else network
    return name if name in runtime.PINNING.value else None


def _rdma(network: Rdma) -> dict[str, Any]:
    return _main(_resources({network.resource: network.count}))


def _tcpxo(given: Tcpxo) -> dict[str, Any]:
    """The receive daemon beside the program, the host's libraries and devices, and one interface for each GPU."""
    seen = [{"name": "libraries", "mountPath": _LIBRARIES}, {"name": "aperture-devices", "mountPath": _APERTURE}]
    host = {
        "libraries": "/home/kubernetes/bin/nvidia",
        "sys": "/sys",
        "proc-sys": "/proc/sys",
        "aperture-devices": _APERTURE,
    }
    template = _main({"volumeMounts": seen})
    template["metadata"] = {"annotations": _tcpxo_annotations(given)}
    template["spec"]["volumes"] = [{"name": name, "hostPath": {"path": path}} for name, path in host.items()]
    template["spec"]["initContainers"] = [_tcpxo_daemon(given)]
    return template


def _tcpxo_annotations(given: Tcpxo) -> dict[str, str]:
    devices = [f"nvidia{number}" for number in range(gke.TCPXO_GPUS.value)]
    devices += ["nvidiactl", "nvidia-uvm", "dmabuf_import_helper"]
    own = {f"devices.gke.io/container.{DAEMON}": "".join(f"- path: /dev/{device}\n" for device in devices)}
    return own | _interfaces(given.networks, first=1)


def _interfaces(networks: Sequence[str], first: int) -> dict[str, str]:
    """GKE's annotations: eth0 as ever, and interfaces from eth`first` on in these Network objects."""
    named = {"eth0": "default", **{f"eth{number}": name for number, name in enumerate(networks, first)}}
    interfaces = [{"interfaceName": name, "network": network} for name, network in named.items()]
    return {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": json.dumps(interfaces),
    }


def _gib(given: Gib) -> dict[str, Any]:
    """The host's driver and NCCL plugin, and one interface for each GPU."""
    names = {path: path.rpartition("/")[2] for path in gke.GIB_FOLDERS.value}
    seen = [{"name": names[path], "mountPath": mount} for path, mount in gke.GIB_FOLDERS.value.items()]
    template = _main({"volumeMounts": seen})
    template["metadata"] = {"annotations": _interfaces(given.networks, gke.GIB_FIRST_INTERFACE.value)}
    template["spec"]["volumes"] = [{"name": name, "hostPath": {"path": path}} for path, name in names.items()]
    return template


def _tcpxo_daemon(given: Tcpxo) -> dict[str, Any]:
    """A native sidecar: an ordinary container that runs for ever would keep the Job from ending."""
    script = "/fts/entrypoint_rxdm_container.sh"
    return {
        "name": DAEMON,
        "image": given.image,
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c"],
        "args": [f"set -ex; chmod 755 {script}; exec {script} --num_hops=2 --num_nics={gke.TCPXO_GPUS.value}"],
        "env": variables({"LD_LIBRARY_PATH": f"{_LIBRARIES}/lib64"}),
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]},
        },
        "volumeMounts": [
            {"name": "libraries", "mountPath": _LIBRARIES},
            {"name": "sys", "mountPath": "/hostsysfs"},
            {"name": "proc-sys", "mountPath": "/hostprocsysfs"},
        ],
    }


def _main(container: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": MAIN_CONTAINER, **container}]}}


def _resources(extended: Mapping[str, int | str]) -> dict[str, Any]:
    """Extended resources, which are never overcommitted: limit and request are one."""
    amounts = {name: str(amount) for name, amount in extended.items()}
    return {"resources": {"requests": amounts, "limits": amounts}}


def variables(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Environment variables with these very values: the kubelet would expand $(NAME), and take $$ for $."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in env.items()]


def policy(
    metadata: Mapping[str, Any], members: Mapping[str, str], metrics_port: int, prometheus: Prometheus
) -> dict[str, Any]:
    """The NetworkPolicy: only pods with the labels of `members` reach each other, and Prometheus their metrics."""
    own = {"podSelector": {"matchLabels": dict(members)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": dict(metadata),
        "spec": {
            "podSelector": {"matchLabels": dict(members)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"from": [_scraper(prometheus)], "ports": [{"protocol": "TCP", "port": metrics_port}]},
            ],
        },
    }


def _scraper(prometheus: Prometheus) -> dict[str, Any]:
    where = {} if prometheus.namespace is None else {"kubernetes.io/metadata.name": prometheus.namespace}
    namespaces = {"matchLabels": where} if where else {}
    return {"namespaceSelector": namespaces, "podSelector": {"matchLabels": dict(prometheus.labels)}}
