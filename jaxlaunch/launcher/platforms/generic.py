"""Nodes of any other cluster, labelled by NVIDIA's GPU feature discovery or AMD's node labeller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxlaunch.accelerators import ACCELERATORS, NVIDIA_DRIVER, Accelerator, Source
from jaxlaunch.launcher.platforms.facts import (
    AMD_DEVICE,
    GPU_PRODUCT,
    GPU_TAINT,
    Fact,
    Nodes,
    PlatformFacts,
    toleration_for,
)

DISCOVERY = Source(
    "NVIDIA: GPU feature discovery, generated labels",
    "github.com/NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery",
)
AMD = Source(
    "AMD GPU device plugin: its resource, and the labels of its node labeller",
    "instinct.docs.amd.com/projects/k8s-device-plugin, installation",
)
AMD_IDS = Source(
    "vLLM: PCI ids of AMD Instinct GPUs", "github.com/vllm-project/vllm, vllm/platforms/rocm.py"
)
AMD_GROUP = Source(
    "AMD GPU device plugin: as another user than root",
    "github.com/ROCm/k8s-device-plugin, issue 39",
)

# Labels that nodes have only if one of these components runs. They are not required if a job
# selects a machine type or another label of KIND_LABELS: CoreWeave's nodes have other labels.
DISCOVERED_LABELS: Fact[Sequence[str]] = Fact((GPU_PRODUCT, AMD_DEVICE), DISCOVERY)
# Nodes of GKE and EKS have this label too, if GPU feature discovery is installed.
DRIVER_LABEL = Fact("nvidia.com/cuda.driver.major", DISCOVERY)


def _amd_nodes(*ids: str) -> Nodes:
    """Return the nodes with these PCI ids: that of the card, and that of its virtual function."""
    return Nodes({AMD_DEVICE: ids}, (toleration_for(AMD_RESOURCE.value),), AMD_IDS)


AMD_RESOURCE = Fact("amd.com/gpu", AMD)
# A user other than root needs the number of this group to open the devices. It differs by node.
AMD_DEVICES = Fact("/dev/kfd and /dev/dri/renderD*, of root and group render, mode 0660", AMD_GROUP)

# Memory of each variant of a GPU. GPU feature discovery writes dashes instead of the spaces of its
# name.
_MEMORY_GB: Mapping[str, Fact[float]] = {
    model.name.replace(" ", "-"): Fact(model.memory_gib, NVIDIA_DRIVER)
    for accelerator in ACCELERATORS.values()
    if accelerator.platform == "cuda"
    for model in accelerator.models
}


def _nvidia_nodes(accelerator: Accelerator) -> Nodes:
    """Return the nodes of a GPU. One without model names is selected by its resource alone."""
    products = tuple(model.name.replace(" ", "-") for model in accelerator.models)
    return Nodes({GPU_PRODUCT: products} if products else {}, (GPU_TAINT,), DISCOVERY)


NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=DISCOVERY),
    **{
        name: _nvidia_nodes(accelerator)
        for name, accelerator in ACCELERATORS.items()
        if accelerator.platform == "cuda"
    },
    "amdgpu": Nodes({}, (toleration_for(AMD_RESOURCE.value),), AMD),
    "plugin": Nodes(source=AMD),
    "mi300x": _amd_nodes("74a1", "74b5"),
    "mi325x": _amd_nodes("74a5", "74b9"),
    "mi350x": _amd_nodes("75a0"),
    "mi355x": _amd_nodes("75a3"),
}

PLATFORM = PlatformFacts(NODES, memory_gb=_MEMORY_GB)
