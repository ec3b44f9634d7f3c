"""Nodes of Google Kubernetes Engine."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.manifests.platforms.facts import (
    ARM_TAINT,
    BLOCK,
    GKE_GPU,
    GKE_TPU,
    GPU_TAINT,
    NAME,
    PROJECT,
    SUB_BLOCK,
    TPU_TAINT,
    Fact,
    Nodes,
    Source,
    tolerate,
)

_DOCS = "cloud.google.com/kubernetes-engine/docs"
GPUS = Source("GKE: About GPUs", f"{_DOCS}/concepts/gpus")
TPUS = Source("GKE: Plan TPUs", f"{_DOCS}/concepts/plan-tpus")
SPOT = Source("GKE: Spot VMs", f"{_DOCS}/concepts/spot-vms")
FLEX_START = Source("GKE: About flex-start", f"{_DOCS}/concepts/dws")
RESERVATIONS = Source("GKE: Consume reserved zonal resources", f"{_DOCS}/how-to/consuming-reservations")
BLOCKS = Source(
    "Cluster Toolkit: node selectors of GKE jobs",
    "github.com/GoogleCloudPlatform/cluster-toolkit, pkg/orchestrator/gke",
)
TCPXO = Source("GKE: GPU networking with GPUDirect-TCPXO", f"{_DOCS}/how-to/gpu-bandwidth-gpudirect-tcpx")
PLUGIN = Source(
    "GKE's GPU device plugin", "github.com/GoogleCloudPlatform/container-engine-accelerators, cmd/nvidia_gpu"
)
MACHINES = Source("Compute Engine: GPU machine types", "cloud.google.com/compute/docs/gpus")


def _gpu(*values: str) -> Nodes:
    return Nodes({GKE_GPU: values}, (GPU_TAINT,), GPUS)


def _tpu(value: str) -> Nodes:
    return Nodes({GKE_TPU: (value,)}, (TPU_TAINT,), TPUS)


NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=GPUS),
    "l4": _gpu("nvidia-l4"),
    "a100": _gpu("nvidia-tesla-a100", "nvidia-a100-80gb"),
    "h100": _gpu("nvidia-h100-80gb", "nvidia-h100-mega-80gb"),
    "h200": _gpu("nvidia-h200-141gb"),
    "b200": _gpu("nvidia-b200"),
    "gb200": Nodes({GKE_GPU: ("nvidia-gb200",)}, (GPU_TAINT, ARM_TAINT), GPUS),
    "v4": _tpu("tpu-v4-podslice"),
    "v5e": _tpu("tpu-v5-lite-podslice"),
    "v5p": _tpu("tpu-v5p-slice"),
    "v6e": _tpu("tpu-v6e-slice"),
    "7x": _tpu("tpu7x"),
}

CAPACITY: Mapping[str, Nodes] = {
    "spot": Nodes({"cloud.google.com/gke-spot": ("true",)}, (tolerate("cloud.google.com/gke-spot"),), SPOT),
    "flex-start": Nodes(
        {"cloud.google.com/gke-flex-start": ("true",)}, (tolerate("cloud.google.com/gke-queued"),), FLEX_START
    ),
    "reservation": Nodes({"cloud.google.com/reservation-name": (NAME,)}, (), RESERVATIONS),
}
# What a job adds that names more of a reservation than its name.
IN_RESERVATION: Mapping[str, Nodes] = {
    "project": Nodes(
        {
            "cloud.google.com/reservation-project": (PROJECT,),
            "cloud.google.com/reservation-affinity": ("specific",),
        },
        (),
        RESERVATIONS,
    ),
    "block": Nodes({"cloud.google.com/reservation-blocks": (BLOCK,)}, (), BLOCKS),
    "sub_block": Nodes({"cloud.google.com/reservation-subblocks": (SUB_BLOCK,)}, (), BLOCKS),
}

# The label that nodes of one TPU slice share.
SLICE_LABEL = Fact("cloud.google.com/gke-nodepool", TPUS)

# The driver is mounted here, and nothing adds it to the search paths of a container.
DRIVER: Fact[Mapping[str, str]] = Fact(
    {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64", "PATH": "/usr/local/nvidia/bin"}, PLUGIN
)

LONGEST_FLEX_START_S = Fact(7 * 86_400, FLEX_START)
SPOT_GRACE_S = Fact(15, SPOT)  # for pods that are no system's, where the node pool says nothing else
LARGEST_SPOT_GRACE_S = Fact(120, SPOT)

# GPUDirect-TCPXO exists on a3-megagpu-8g alone: 8 GPUs, and an interface for each beside eth0.
TCPXO_GPU = Fact("nvidia-h100-mega-80gb", TCPXO)
TCPXO_GPUS = Fact(8, TCPXO)
# Bandwidth of all interfaces for GPUs as a multiple of eth0's, which plain TCP uses: 8 × 200 Gbit/s of
# a3-megagpu-8g, 8 × 400 of a3-ultragpu-8g and a4-highgpu-8g, beside 200.
GPU_NETWORK_FACTOR: Mapping[str, Fact[int]] = {
    "nvidia-h100-mega-80gb": Fact(8, MACHINES),
    "nvidia-h200-141gb": Fact(16, MACHINES),
    "nvidia-b200": Fact(16, MACHINES),
}
