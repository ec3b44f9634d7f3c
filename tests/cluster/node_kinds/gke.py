"""Nodes of GKE: a pool's node as Google's control plane labels and taints it.

The keys of every label here are those of GKE's own autoscaler (AUTOSCALER, package labels), which
also builds the node that a pool would have. A pool of GPUs or TPUs has a taint of its own; a Spot
or a flex-start pool has one where its owner, or node auto-provisioning for a pod that tolerates it,
adds it; a pool for queued provisioning always has.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.cluster.node_kinds.kind import Kind, Platform, cpu_left, split_names

_DOCS = "cloud.google.com/kubernetes-engine/docs"
AUTOSCALER = "k8s.io/gke-autoscaling, cluster-autoscaler/pkg/cloudprovider/gke/labels"
# nvidia.com/gpu=present:NoSchedule, cloud.google.com/gke-accelerator.
GPUS = f"{_DOCS}/concepts/gpus"
ACCELERATED = "cloud.google.com/compute/docs/accelerator-optimized-machines"  # vCPUs, memory, GPUs
TPUS = f"{_DOCS}/concepts/plan-tpus"  # machine types of each topology, vCPUs, memory, chips
# TPU label, taint.
TOOLKIT = "github.com/GoogleCloudPlatform/cluster-toolkit, modules/internal/tpu-definition/main.tf"
SPOT = f"{_DOCS}/concepts/spot-vms"
DWS = f"{_DOCS}/concepts/dws"
RESERVATIONS = f"{_DOCS}/how-to/consuming-reservations"
ARM = f"{_DOCS}/how-to/prepare-arm-workloads-for-deployment"  # kubernetes.io/arch=arm64:NoSchedule
GENERAL = "cloud.google.com/compute/docs/general-purpose-machines"
SIZES = f"{_DOCS}/concepts/plan-node-sizes"  # what the kubelet keeps of cores and memory

_CLOUD = "cloud.google.com"
_SPOT = {f"{_CLOUD}/gke-spot": "true", f"{_CLOUD}/gke-provisioning": "spot"}
_FLEX = {f"{_CLOUD}/gke-flex-start": "true", f"{_CLOUD}/gke-provisioning": "flex-start"}
_BOUGHT = {f"{_CLOUD}/reservation-name": "bought", f"{_CLOUD}/reservation-affinity": "specific"}
_SHARED = {**_BOUGHT, f"{_CLOUD}/reservation-project": "owner"}
_BLOCK = {**_BOUGHT, f"{_CLOUD}/reservation-blocks": "block-1"}
_QUEUED = {f"{_CLOUD}/gke-queued": "true"}

# Labels, taints, resources.
_Device = tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]
_NONE: _Device = ({}, {}, {})
_ARM: _Device = ({"kubernetes.io/arch": "arm64"}, {"kubernetes.io/arch": "arm64"}, {})


def _memory_left(gib: int) -> str:
    """Return what the kubelet leaves of a memory size (SIZES), less 100 MiB for evictions."""
    reserved, remaining = 100 / 1024, float(gib)
    for size, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (gib, 0.02)):
        reserved += share * min(remaining, size)
        remaining -= min(remaining, size)
    return f"{int((gib - reserved) * 1024)}Mi"


def _gpu_labels(value: str, count: int) -> _Device:
    labels = {f"{_CLOUD}/gke-accelerator": value, f"{_CLOUD}/gke-accelerator-count": str(count)}
    return labels, {"nvidia.com/gpu": "present"}, {"nvidia.com/gpu": str(count)}


def _tpu_labels(value: str, topology: str, chips: int) -> _Device:
    labels = {
        f"{_CLOUD}/gke-tpu-accelerator": value,
        f"{_CLOUD}/gke-tpu-topology": topology,
        f"{_CLOUD}/gke-accelerator-count": str(chips),
    }
    return labels, {"google.com/tpu": "present"}, {"google.com/tpu": str(chips)}


def _make_node(
    machine: str,
    size: tuple[int, int],  # vCPUs, GiB
    device: _Device,
    takes: str,
    source: str,
    *,
    suffix: str = "",
    labels: Mapping[str, str] | None = None,
    taints: Mapping[str, str] | None = None,
) -> Kind:
    name = f"gke-{machine}{suffix and '-' + suffix}"
    common = {
        "kubernetes.io/arch": "amd64",
        "kubernetes.io/os": "linux",
        "node.kubernetes.io/instance-type": machine,
        f"{_CLOUD}/machine-family": machine.partition("-")[0],
        f"{_CLOUD}/gke-nodepool": name,
        f"{_CLOUD}/gke-provisioning": "standard",
    }
    vcpus, gib = size
    return Kind(
        name,
        source,
        common | device[0] | (labels or {}),
        {**device[1], **(taints or {})},
        {"cpu": cpu_left(vcpus), "memory": _memory_left(gib), **device[2]},
        split_names(takes),
    )


_L4, _A100, _A100_80 = "nvidia-l4", "nvidia-tesla-a100", "nvidia-a100-80gb"
_H100 = "nvidia-h100-80gb"
_MEGA = "nvidia-h100-mega-80gb"
_H200 = "nvidia-h200-141gb"
_B200 = "nvidia-b200"
_V5E, _V6E = "tpu-v5-lite-podslice", "tpu-v6e-slice"
_ULTRA = (224, 2952)

# A job that names no capacity takes any that has no taint of its own.
KINDS = (
    _make_node("n2-standard-32", (32, 128), _NONE, "cpu", GENERAL),
    _make_node(
        "n2-standard-32", (32, 128), _NONE, "cpu, cpu spot", SPOT, suffix="spot", labels=_SPOT
    ),
    _make_node(
        "n2-standard-32",
        (32, 128),
        _NONE,
        "cpu spot",
        SPOT,
        suffix="spot-tainted",
        labels=_SPOT,
        taints={f"{_CLOUD}/gke-spot": "true"},
    ),
    _make_node("c4a-standard-32", (32, 128), _ARM, "", ARM),
    _make_node("n1-standard-16", (16, 60), _gpu_labels("nvidia-tesla-t4", 4), "", GPUS),
    _make_node(
        "g4-standard-384", (384, 1440), _gpu_labels("nvidia-rtx-pro-6000", 8), "", ACCELERATED
    ),
    _make_node("g2-standard-12", (12, 48), _gpu_labels(_L4, 1), "l4", ACCELERATED),
    _make_node("g2-standard-96", (96, 384), _gpu_labels(_L4, 8), "l4, l4 x8", ACCELERATED),
    _make_node(
        "g2-standard-12",
        (12, 48),
        _gpu_labels(_L4, 1),
        "l4 spot",
        SPOT,
        suffix="spot",
        labels=_SPOT,
        taints={f"{_CLOUD}/gke-spot": "true"},
    ),
    _make_node("a2-highgpu-1g", (12, 85), _gpu_labels(_A100, 1), "a100 x1", ACCELERATED),
    _make_node(
        "a2-highgpu-8g",
        (96, 680),
        _gpu_labels(_A100, 8),
        "a100, a100 x1, a100 of 40 GB",
        ACCELERATED,
    ),
    _make_node(
        "a2-ultragpu-8g",
        (96, 1360),
        _gpu_labels(_A100_80, 8),
        "a100, a100 x1, a100 of 80 GB",
        ACCELERATED,
    ),
    _make_node("a3-highgpu-1g", (26, 234), _gpu_labels(_H100, 1), "h100 x1", ACCELERATED),
    _make_node(
        "a3-highgpu-8g",
        (208, 1872),
        _gpu_labels(_H100, 8),
        "h100, h100 x1, h100 of one pool",
        ACCELERATED,
    ),
    _make_node(
        "a3-megagpu-8g",
        (208, 1872),
        _gpu_labels(_MEGA, 8),
        "h100, h100 x1, h100 tcpxo",
        ACCELERATED,
    ),
    _make_node(
        "a3-megagpu-8g",
        (208, 1872),
        _gpu_labels(_MEGA, 8),
        "h100 flex-start",
        DWS,
        suffix="queued",
        labels=_FLEX | _QUEUED,
        taints=_QUEUED,
    ),
    _make_node("a3-ultragpu-8g", _ULTRA, _gpu_labels(_H200, 8), "h200, h200 gib", ACCELERATED),
    _make_node(
        "a3-ultragpu-8g",
        _ULTRA,
        _gpu_labels(_H200, 8),
        "h200 spot",
        SPOT,
        suffix="spot",
        labels=_SPOT,
        taints={f"{_CLOUD}/gke-spot": "true"},
    ),
    _make_node(
        "a3-ultragpu-8g",
        _ULTRA,
        _gpu_labels(_H200, 8),
        "h200, h200 gib, h200 bought",
        RESERVATIONS,
        suffix="reserved",
        labels=_BOUGHT,
    ),
    _make_node(
        "a3-ultragpu-8g",
        _ULTRA,
        _gpu_labels(_H200, 8),
        "h200, h200 gib, h200 bought, h200 bought by another",
        RESERVATIONS,
        suffix="shared",
        labels=_SHARED,
    ),
    _make_node(
        "a3-ultragpu-8g",
        _ULTRA,
        _gpu_labels(_H200, 8),
        "h200, h200 gib, h200 bought, h200 of a block",
        AUTOSCALER,
        suffix="block",
        labels=_BLOCK,
    ),
    _make_node("a4-highgpu-8g", (224, 3968), _gpu_labels(_B200, 8), "b200, b200 gib", ACCELERATED),
    _make_node(
        "a4-highgpu-8g",
        (224, 3968),
        _gpu_labels(_B200, 8),
        "b200, b200 gib, b200 flex-start",
        DWS,
        suffix="flex",
        labels=_FLEX,
    ),
    _make_node(
        "a4-highgpu-8g",
        (224, 3968),
        _gpu_labels(_B200, 8),
        "b200 flex-start",
        AUTOSCALER,
        suffix="flex-tainted",
        labels=_FLEX,
        taints={f"{_CLOUD}/gke-flex-start": "true"},
    ),
    _make_node(
        "a4x-highgpu-4g",
        (140, 884),
        _gpu_labels("nvidia-gb200", 4),
        "gb200",
        ARM,
        labels={"kubernetes.io/arch": "arm64"},
        taints={"kubernetes.io/arch": "arm64"},
    ),
    _make_node(
        "ct4p-hightpu-4t", (240, 400), _tpu_labels("tpu-v4-podslice", "2x2x4", 4), "v4", TPUS
    ),
    _make_node("ct5lp-hightpu-1t", (24, 48), _tpu_labels(_V5E, "1x1", 1), "v5e of one chip", TPUS),
    _make_node(
        "ct5lp-hightpu-4t",
        (112, 192),
        _tpu_labels(_V5E, "2x4", 4),
        "v5e of two hosts",
        TPUS,
        suffix="2x4",
    ),
    _make_node(
        "ct5lp-hightpu-8t", (224, 384), _tpu_labels(_V5E, "2x4", 8), "v5e of one host", TPUS
    ),
    _make_node(
        "ct5lp-hightpu-4t", (112, 192), _tpu_labels(_V5E, "4x8", 4), "v5e", TPUS, suffix="4x8"
    ),
    _make_node(
        "ct5p-hightpu-4t", (208, 448), _tpu_labels("tpu-v5p-slice", "2x2x4", 4), "v5p", TOOLKIT
    ),
    _make_node(
        "ct5p-hightpu-4t",
        (208, 448),
        _tpu_labels("tpu-v5p-slice", "2x2x4", 4),
        "v5p spot",
        SPOT,
        suffix="spot",
        labels=_SPOT,
        taints={f"{_CLOUD}/gke-spot": "true"},
    ),
    _make_node(
        "ct6e-standard-4t", (180, 720), _tpu_labels(_V6E, "4x4", 4), "v6e", TPUS, suffix="4x4"
    ),
    _make_node(
        "ct6e-standard-4t",
        (180, 720),
        _tpu_labels(_V6E, "2x4", 4),
        "v6e of two hosts",
        TPUS,
        suffix="2x4",
    ),
    _make_node(
        "ct6e-standard-8t", (180, 1440), _tpu_labels(_V6E, "2x4", 8), "v6e of one host", TPUS
    ),
    _make_node(
        "tpu7x-standard-4t",
        (224, 960),
        _tpu_labels("tpu7x", "2x2x4", 4),
        "7x, tpu7x",
        TPUS,
        suffix="2x2x4",
    ),
    _make_node("tpu7-standard-4t", (224, 960), _tpu_labels("tpu7", "2x2x4", 4), "tpu7", AUTOSCALER),
    _make_node(
        "tpu7x-standard-4t",
        (224, 960),
        _tpu_labels("tpu7x", "4x4x4", 4),
        "7x of a cube",
        TPUS,
        suffix="4x4x4",
    ),
)

_KIND = "node_selector: {cloud.google.com/gke-accelerator: %s}"
_CHOSEN = "capacity: {reservation: bought%s}"
JOBS = {
    "cpu": "accelerator: {type: cpu}",
    "cpu spot": "accelerator: {type: cpu}\ncapacity: spot",
    "l4": "accelerator: {type: l4}\nresources: {cpu: 6, memory: 24Gi}",
    "l4 x8": "accelerator: {type: l4, per_host: 8}\nresources: {cpu: 90, memory: 350Gi}",
    "l4 spot": "accelerator: {type: l4}\ncapacity: spot",
    "a100": "accelerator: {type: a100}\nresources: {cpu: 90, memory: 600Gi}",
    "a100 x1": "accelerator: {type: a100, per_host: 1}",
    "a100 of 40 GB": "accelerator: {type: a100}\nhosts: 2\n" + _KIND % _A100,
    "a100 of 80 GB": "accelerator: {type: a100}\nhosts: 2\n" + _KIND % _A100_80,
    "h100": "accelerator: {type: h100}\nresources: {cpu: 90, memory: 1500Gi}",
    "h100 x1": "accelerator: {type: h100, per_host: 1}",
    "h100 of one pool": "accelerator: {type: h100}\nhosts: 2\n" + _KIND % _H100,
    "h100 tcpxo": "accelerator: {type: h100}\nnetwork: gpudirect-tcpxo\nresources: {cpu: 180, "
    "memory: 1700Gi}",
    "h100 flex-start": "accelerator: {type: h100}\nhosts: 2\ncapacity: "
    f"flex-start\n{_KIND % _MEGA}",
    "h200": "accelerator: {type: h200}\nresources: {cpu: 200, memory: 2500Gi}",
    "h200 gib": "accelerator: {type: h200}\nhosts: 2\nnetwork: gpudirect-rdma",
    "h200 spot": "accelerator: {type: h200}\ncapacity: spot",
    "h200 bought": "accelerator: {type: h200}\nhosts: 2\n" + _CHOSEN % "",
    "h200 bought by another": "accelerator: {type: h200}\n" + _CHOSEN % ", project: owner",
    "h200 of a block": "accelerator: {type: h200}\n" + _CHOSEN % ", block: block-1",
    "b200": "accelerator: {type: b200}\nresources: {cpu: 200, memory: 3500Gi}",
    "b200 gib": "accelerator: {type: b200}\nhosts: 2\nnetwork: gpudirect-rdma",
    "b200 flex-start": "accelerator: {type: b200}\ncapacity: flex-start",
    "gb200": "accelerator: {type: gb200}\nresources: {cpu: 120, memory: 800Gi}",
    "v4": "accelerator: {type: v4, topology: 2x2x4}",
    "v5e": "accelerator: {type: v5e, topology: 4x8}",
    "v5e of one chip": "accelerator: {type: v5e, topology: 1x1}",
    "v5e of one host": "accelerator: {type: v5e, topology: 2x4, per_host: 8}",
    "v5e of two hosts": "accelerator: {type: v5e, topology: 2x4}",
    "v5p": "accelerator: {type: v5p, topology: 2x2x4}",
    "v5p spot": "accelerator: {type: v5p, topology: 2x2x4}\ncapacity: spot",
    "v6e": "accelerator: {type: v6e, topology: 4x4}",
    "v6e of one host": "accelerator: {type: v6e, topology: 2x4, per_host: 8}",
    "v6e of two hosts": "accelerator: {type: v6e, topology: 2x4}",
    "7x": "accelerator: {type: 7x, topology: 2x2x4}",
    "tpu7x": "accelerator: {type: tpu7x, topology: 2x2x4}",
    "tpu7": "accelerator: {type: tpu7, topology: 2x2x4}",
    "7x of a cube": "accelerator: {type: 7x, topology: 4x4x4}",
}
GKE = Platform(KINDS, JOBS, "tcpxo: {image: registry.example/rxdm:1}")
