"""Nodes of any other cluster, as NVIDIA's GPU feature discovery and AMD's node labeller label them."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch.accelerators import DRIVER, KNOWN, Accelerator, Source
from jaxlaunch.launcher.platforms.facts import (
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

DRIVER_LABEL = Fact("nvidia.com/cuda.driver.major", DISCOVERY)  # on GKE and EKS too, where the discovery is installed


def _amd(*ids: str) -> Nodes:
    """The id of the card, and of its virtual function, by which a virtual machine has it."""
    return Nodes({AMD_DEVICE: ids}, (tolerate(AMD_RESOURCE.value),), AMD_IDS)


AMD_RESOURCE = Fact("amd.com/gpu", AMD)
# A node's own group, by whose number alone a user other than root opens the devices.
AMD_DEVICES = Fact("/dev/kfd and /dev/dri/renderD*, of root and group render, mode 0660", AMD_GROUP)

# GiB of the makes of each GPU, by the name that the discovery gives it: the device's own, without spaces.
_MEMORY_GB: Mapping[str, Fact[float]] = {
    make.name.replace(" ", "-"): Fact(make.memory_gib, DRIVER)
    for one in KNOWN.values()
    if one.platform == "cuda"
    for make in one.makes
}


def _nvidia(one: Accelerator) -> Nodes:
    """A GPU of whatever name is asked for by its resource alone."""
    products = tuple(make.name.replace(" ", "-") for make in one.makes)
    return Nodes({GPU_PRODUCT: products} if products else {}, (GPU_TAINT,), DISCOVERY)


NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=DISCOVERY),
    **{name: _nvidia(one) for name, one in KNOWN.items() if one.platform == "cuda"},
    "mi300x": _amd("74a1", "74b5"),
    "mi325x": _amd("74a5", "74b9"),
}

PLATFORM = PlatformFacts(NODES, memory_gb=_MEMORY_GB)
