"""What nodes are called where: accelerator × platform → labels, taints and resources, as data.

Sources: GKE's documentation of TPUs, GPUs, Spot VMs and reservations; AWS's pages of instance types and of EFA;
Karpenter's well-known labels; the product names that NVIDIA's GPU feature discovery writes. A cluster that calls its
nodes otherwise says so in its profile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Where = Literal["gke", "eks", "generic"]
ANYWHERE: Where = "generic"

RESOURCE: Mapping[str, str] = {"cuda": "nvidia.com/gpu", "tpu": "google.com/tpu"}
EFA_RESOURCE = "vpc.amazonaws.com/efa"
EFA_HUGEPAGES = "5120Mi"  # of 2 MiB, which libfabric's EFA provider takes when it starts

INSTANCE = "node.kubernetes.io/instance-type"
GKE_GPU = "cloud.google.com/gke-accelerator"
GKE_TPU = "cloud.google.com/gke-tpu-accelerator"
GKE_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
GPU_PRODUCT = "nvidia.com/gpu.product"


@dataclasses.dataclass(frozen=True)
class Nodes:
    """A kind of node: what it may be labelled, one of several values for a key, and the taints to put up with."""

    labels: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


def _tolerate(key: str) -> Mapping[str, Any]:
    return {"key": key, "operator": "Exists", "effect": "NoSchedule"}


_GPU_TAINT = _tolerate("nvidia.com/gpu")
_TPU_TAINT = _tolerate("google.com/tpu")
_ARM_TAINT = {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}


def _gpu(label: str, *values: str) -> Nodes:
    return Nodes({label: values}, (_GPU_TAINT,))


def _tpu(value: str) -> Nodes:
    return Nodes({GKE_TPU: (value,)}, (_TPU_TAINT,))


NODES: Mapping[Where, Mapping[str, Nodes]] = {
    "gke": {
        "cpu": Nodes(),
        "l4": _gpu(GKE_GPU, "nvidia-l4"),
        "a100": _gpu(GKE_GPU, "nvidia-tesla-a100", "nvidia-a100-80gb"),
        "h100": _gpu(GKE_GPU, "nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
        "h200": _gpu(GKE_GPU, "nvidia-h200-141gb"),
        "b200": _gpu(GKE_GPU, "nvidia-b200"),
        "gb200": Nodes({GKE_GPU: ("nvidia-gb200",)}, (_GPU_TAINT, _ARM_TAINT)),
        "v4": _tpu("tpu-v4-podslice"),
        "v5e": _tpu("tpu-v5-lite-podslice"),
        "v5p": _tpu("tpu-v5p-slice"),
        "v6e": _tpu("tpu-v6e-slice"),
        "7x": _tpu("tpu7x"),
    },
    "eks": {
        "cpu": Nodes(),
        "l4": _gpu(INSTANCE, *(f"g6.{size}xlarge" for size in ("", 2, 4, 8, 16, 12, 24, 48))),
        "a100": _gpu(INSTANCE, "p4d.24xlarge", "p4de.24xlarge"),
        "h100": _gpu(INSTANCE, "p5.48xlarge", "p5.4xlarge"),
        "h200": _gpu(INSTANCE, "p5e.48xlarge", "p5en.48xlarge"),
        "b200": _gpu(INSTANCE, "p6-b200.48xlarge"),
        "gb200": _gpu(INSTANCE, "p6e-gb200.36xlarge"),
    },
    "generic": {
        "cpu": Nodes(),
        "l4": _gpu(GPU_PRODUCT, "NVIDIA-L4"),
        "a100": _gpu(
            GPU_PRODUCT,
            "NVIDIA-A100-SXM4-40GB",
            "NVIDIA-A100-SXM4-80GB",
            "NVIDIA-A100-PCIE-40GB",
            "NVIDIA-A100-80GB-PCIe",
        ),
        "h100": _gpu(GPU_PRODUCT, "NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
        "h200": _gpu(GPU_PRODUCT, "NVIDIA-H200", "NVIDIA-H200-NVL"),
        "b200": _gpu(GPU_PRODUCT, "NVIDIA-B200"),
        "gb200": _gpu(GPU_PRODUCT, "NVIDIA-GB200"),
    },
}

# Kind of capacity → the nodes that are of it. NAME stands for the reservation's.
NAME = "NAME"
CAPACITY: Mapping[Where, Mapping[str, Nodes]] = {
    "gke": {
        "spot": Nodes({"cloud.google.com/gke-spot": ("true",)}, (_tolerate("cloud.google.com/gke-spot"),)),
        "flex-start": Nodes(
            {"cloud.google.com/gke-flex-start": ("true",)}, (_tolerate("cloud.google.com/gke-queued"),)
        ),
        "reservation": Nodes({"cloud.google.com/reservation-name": (NAME,)}),
    },
    "eks": {
        "spot": Nodes({"karpenter.sh/capacity-type": ("spot",)}),
        "reservation": Nodes(
            {"karpenter.sh/capacity-type": ("reserved",), "karpenter.k8s.aws/capacity-reservation-id": (NAME,)}
        ),
    },
    "generic": {},
}

# The label that nodes of one TPU slice share.
SLICE_LABEL: Mapping[Where, str] = {"gke": "cloud.google.com/gke-nodepool"}

# Instance type → its EFA interfaces.
EFA: Mapping[str, int] = {
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
}

# GPUDirect-TCPXO exists on a3-megagpu-8g alone: 8 GPUs, and an interface for each beside eth0.
TCPXO_GPU = "nvidia-h100-mega-80gb"
TCPXO_GPUS = 8
