"""How hosts reach each other: ports, the fast networks, and who may come in. Pure.

Each profile adds exactly what it needs. Sources: AWS's and GKE's documentation of EFA and GPUDirect-TCPXO, and
GoogleCloudPlatform/container-engine-accelerators for the receive daemon.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from launcher import platforms
from launcher.checks import MAIN_CONTAINER
from launcher.placement import nodes
from launcher.profile import Profile, Prometheus, Tcpxo
from launcher.schema import JobSpec, Rdma

METRICS_PORT = 9400
LEADER_PORT = 9401
# With the host's network, jobs share its ports: below them lie services, above outgoing connections and NodePorts.
_HOST_PORTS = range(20000, 30000, 2)
# GKE's TPU runtime: slice builder, transfers between slices, metrics.
TPU_PORTS: Mapping[str, int] = {"tpu-slice": 8471, "tpu-dcn": 8080, "tpu-metrics": 8431}

DAEMON = "tcpxo-daemon"
_LIBRARIES = "/usr/local/nvidia"
_APERTURE = "/dev/aperture_devices"


def ports(job: JobSpec) -> tuple[int, int]:
    """The port of the leader and the one of metrics."""
    if job.network != "hostnetwork":
        return LEADER_PORT, METRICS_PORT
    whose = f"{job.namespace or ''}/{job.name}".encode()
    first = _HOST_PORTS[zlib.crc32(whose) % len(_HOST_PORTS)]
    return first, first + 1


def container_ports(job: JobSpec) -> list[dict[str, Any]]:
    leader, metrics = ports(job)
    named = {"leader": leader, "metrics": metrics}
    if job.accelerator.platform == "tpu":
        named |= TPU_PORTS
    return [{"name": name, "containerPort": port} for name, port in named.items()]


def patch(job: JobSpec, profile: Profile) -> dict[str, Any]:
    """The pod template's part of it."""
    if isinstance(job.network, Rdma):
        return _rdma(job.network)
    return _PATCHES[job.network](job, profile)


def _none(job: JobSpec, profile: Profile) -> dict[str, Any]:
    return {}


def _host_network(job: JobSpec, profile: Profile) -> dict[str, Any]:
    return {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}}


def _rdma(network: Rdma) -> dict[str, Any]:
    """Verbs pin memory, and a pod cannot raise its memlock limit otherwise."""
    security = {"capabilities": {"add": ["IPC_LOCK"]}}
    return _main(_resources({network.resource: network.count}) | {"securityContext": security})


def efa_interfaces(job: JobSpec, profile: Profile) -> set[int]:
    """How many EFA interfaces the nodes that fit have: one number, or it must be said which nodes are meant."""
    found = nodes(job, profile)
    types = () if found is None else found.labels.get(platforms.INSTANCE, ())
    chosen = (profile.node_selector | job.node_selector).get(platforms.INSTANCE)
    return {platforms.EFA[one] for one in ((chosen,) if chosen else types) if one in platforms.EFA}


def _efa(job: JobSpec, profile: Profile) -> dict[str, Any]:
    (count,) = efa_interfaces(job, profile)
    env = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    return _main(
        _resources({platforms.EFA_RESOURCE: count, "hugepages-2Mi": platforms.EFA_HUGEPAGES}) | {"env": variables(env)}
    )


def _tcpxo(job: JobSpec, profile: Profile) -> dict[str, Any]:
    """The receive daemon beside the program, the host's libraries and devices, and one interface for each GPU."""
    assert profile.tcpxo is not None, "refused before"
    env = {"LD_LIBRARY_PATH": f"{_LIBRARIES}/lib64", "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": _APERTURE}
    seen = [{"name": "libraries", "mountPath": _LIBRARIES}, {"name": "aperture-devices", "mountPath": _APERTURE}]
    host = {
        "libraries": "/home/kubernetes/bin/nvidia",
        "sys": "/sys",
        "proc-sys": "/proc/sys",
        "aperture-devices": _APERTURE,
    }
    template = _main({"env": variables(env), "volumeMounts": seen})
    template["metadata"] = {"annotations": _tcpxo_annotations(profile.tcpxo)}
    template["spec"]["volumes"] = [{"name": name, "hostPath": {"path": path}} for name, path in host.items()]
    template["spec"]["initContainers"] = [_tcpxo_daemon(profile.tcpxo)]
    return template


def _tcpxo_annotations(given: Tcpxo) -> dict[str, str]:
    devices = [f"nvidia{number}" for number in range(platforms.TCPXO_GPUS)]
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
            f"set -ex; chmod 755 {script}; exec {script} --num_hops=2 --num_nics={platforms.TCPXO_GPUS} --uid= "
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


_PATCHES: Mapping[str, Callable[[JobSpec, Profile], dict[str, Any]]] = {
    "default": _none,
    "hostnetwork": _host_network,
    "efa": _efa,
    "gpudirect-tcpxo": _tcpxo,
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


def policy(job: JobSpec, profile: Profile, metadata: dict[str, Any], members: dict[str, str]) -> dict[str, Any] | None:
    """The NetworkPolicy; None where the job wants none, or has the host's network, which no policy reaches."""
    if not job.network_policy or job.network == "hostnetwork":
        return None
    _, metrics = ports(job)
    own = {"podSelector": {"matchLabels": members}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": {
            "podSelector": {"matchLabels": members},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"from": [_scraper(profile.prometheus)], "ports": [{"protocol": "TCP", "port": metrics}]},
            ],
        },
    }


def _scraper(prometheus: Prometheus) -> dict[str, Any]:
    where = {} if prometheus.namespace is None else {"kubernetes.io/metadata.name": prometheus.namespace}
    namespaces = {"matchLabels": where} if where else {}
    return {"namespaceSelector": namespaces, "podSelector": {"matchLabels": dict(prometheus.labels)}}
