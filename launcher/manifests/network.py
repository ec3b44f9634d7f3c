"""How hosts reach each other: ports, the fast networks, and who may come in. Pure.

Each network adds exactly what it needs. Sources: AWS's and GKE's documentation of EFA and GPUDirect-TCPXO, and
GoogleCloudPlatform/container-engine-accelerators for the receive daemon.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launcher.job.accelerators import Platform
from launcher.job.profile import Prometheus, Tcpxo
from launcher.job.schema import Network, Rdma
from launcher.kube.labels import MAIN_CONTAINER
from launcher.manifests.platforms import eks, gke

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


def patch(
    network: Network, efa_interfaces: Sequence[int], tcpxo: Tcpxo | None, *, has_hugepages: bool
) -> dict[str, Any]:
    """The pod template's part of it, of a job that launcher.manifests.platform_checks accepts."""
    match network:
        case Rdma():
            return _rdma(network)
        case "hostnetwork":
            return {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}
        case "efa":
            return _efa(*efa_interfaces, has_hugepages=has_hugepages)
        case "gpudirect-tcpxo" if tcpxo is not None:
            return _tcpxo(tcpxo)
    return {}


def _rdma(network: Rdma) -> dict[str, Any]:
    """Verbs pin memory, and a pod cannot raise its memlock limit otherwise."""
    security = {"capabilities": {"add": ["IPC_LOCK"]}}
    return _main(_resources({network.resource: network.count}) | {"securityContext": security})


def _efa(interfaces: int, *, has_hugepages: bool) -> dict[str, Any]:
    container = _resources({eks.EFA_RESOURCE.value: interfaces})
    return _main(container if has_hugepages else container | {"env": variables(eks.WITHOUT_HUGEPAGES.value)})


def _tcpxo(given: Tcpxo) -> dict[str, Any]:
    """The receive daemon beside the program, the host's libraries and devices, and one interface for each GPU."""
    env = {"NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": _APERTURE}
    seen = [{"name": "libraries", "mountPath": _LIBRARIES}, {"name": "aperture-devices", "mountPath": _APERTURE}]
    host = {
        "libraries": "/home/kubernetes/bin/nvidia",
        "sys": "/sys",
        "proc-sys": "/proc/sys",
        "aperture-devices": _APERTURE,
    }
    template = _main({"env": variables(env), "volumeMounts": seen})
    template["metadata"] = {"annotations": _tcpxo_annotations(given)}
    template["spec"]["volumes"] = [{"name": name, "hostPath": {"path": path}} for name, path in host.items()]
    template["spec"]["initContainers"] = [_tcpxo_daemon(given)]
    return template


def _tcpxo_annotations(given: Tcpxo) -> dict[str, str]:
    devices = [f"nvidia{number}" for number in range(gke.TCPXO_GPUS.value)]
    devices += ["nvidiactl", "nvidia-uvm", "dmabuf_import_helper"]
    interfaces = [
        {"interfaceName": f"eth{number}", "network": name} for number, name in enumerate(["default", *given.networks])
    ]
    return {
        f"devices.gke.io/container.{DAEMON}": "".join(f"- path: /dev/{device}\n" for device in devices),
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": json.dumps(interfaces),
    }


def _tcpxo_daemon(given: Tcpxo) -> dict[str, Any]:
    """A native sidecar: an ordinary container that runs for ever would keep the Job from ending."""
    script = "/fts/entrypoint_rxdm_container.sh"
    return {
        "name": DAEMON,
        "image": given.image,
        "restartPolicy": "Always",
        "command": ["/bin/sh", "-c"],
        "args": [
            f"set -ex; chmod 755 {script}; exec {script} --num_hops=2 --num_nics={gke.TCPXO_GPUS.value} --uid= "
            "--alsologtostderr"
        ],
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
