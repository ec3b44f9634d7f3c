"""Nodes of any other cluster, as NVIDIA's GPU feature discovery and AMD's node labeller label them."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch.accelerators import Source
from jaxlaunch.launcher.manifests.platforms.facts import (
    AMD_DEVICE,
    GPU_PRODUCT,
    GPU_TAINT,
    Fact,
    Nodes,
    PlatformFacts,
    tolerate,
)

DISCOVERY = Source(
    "NVIDIA: GPU feature discovery, generated labels",
    "github.com/NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery",
)
AMD = Source(
    "AMD GPU device plugin: its resource, and the labels of its node labeller",
    "instinct.docs.amd.com/projects/k8s-device-plugin, installation",
)
AMD_IDS = Source("vLLM: PCI ids of AMD Instinct GPUs", "github.com/vllm-project/vllm, vllm/platforms/rocm.py")
AMD_GROUP = Source("AMD GPU device plugin: as another user than root", "github.com/ROCm/k8s-device-plugin, issue 39")
MAKERS = Source(
    "NVIDIA: MIG user guide, memory of supported GPUs",
    "docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-gpus.html",
)

DRIVER_LABEL = Fact("nvidia.com/cuda.driver.major", DISCOVERY)  # on GKE and EKS too, where the discovery is installed


def _gpu(*products: str) -> Nodes:
    return Nodes({GPU_PRODUCT: products}, (GPU_TAINT,), DISCOVERY)


def _amd(*ids: str) -> Nodes:
    """The id of the card, and of its virtual function, by which a virtual machine has it."""
    return Nodes({AMD_DEVICE: ids}, (tolerate(AMD_RESOURCE.value),), AMD_IDS)


AMD_RESOURCE = Fact("amd.com/gpu", AMD)
# A node's own group, by whose number alone a user other than root opens the devices.
AMD_DEVICES = Fact("/dev/kfd and /dev/dri/renderD*, of root and group render, mode 0660", AMD_GROUP)

# GB of the makes of an accelerator that comes in several, where a label tells them apart.
MEMORY_GB: Mapping[str, Fact[int]] = {
    "NVIDIA-A100-SXM4-40GB": Fact(40, MAKERS),
    "NVIDIA-A100-PCIE-40GB": Fact(40, MAKERS),
    "NVIDIA-A100-SXM4-80GB": Fact(80, MAKERS),
    "NVIDIA-A100-80GB-PCIe": Fact(80, MAKERS),
    "NVIDIA-H100-80GB-HBM3": Fact(80, MAKERS),
    "NVIDIA-H100-PCIe": Fact(80, MAKERS),
    "NVIDIA-H100-NVL": Fact(94, MAKERS),
}

NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=DISCOVERY),
    "l4": _gpu("NVIDIA-L4"),
    "a100": _gpu("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-80GB-PCIe"),
    "h100": _gpu("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
    "h200": _gpu("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "b200": _gpu("NVIDIA-B200"),
    "b300": _gpu("NVIDIA-B300-SXM6-AC"),
    "gb200": _gpu("NVIDIA-GB200"),
    "mi300x": _amd("74a1", "74b5"),
    "mi325x": _amd("74a5", "74b9"),
}

PLATFORM = PlatformFacts(NODES, memory_gb=MEMORY_GB)
