"""Nodes of any other cluster, as NVIDIA's GPU feature discovery labels them."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.manifests.platforms.facts import GPU_PRODUCT, GPU_TAINT, Fact, Nodes, Source

DISCOVERY = Source(
    "NVIDIA: GPU feature discovery, generated labels",
    "github.com/NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery",
)

DRIVER_LABEL = Fact("nvidia.com/cuda.driver.major", DISCOVERY)  # on GKE and EKS too, where the discovery is installed


def _gpu(*products: str) -> Nodes:
    return Nodes({GPU_PRODUCT: products}, (GPU_TAINT,), DISCOVERY)


NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=DISCOVERY),
    "l4": _gpu("NVIDIA-L4"),
    "a100": _gpu("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-80GB-PCIe"),
    "h100": _gpu("NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-PCIe", "NVIDIA-H100-NVL"),
    "h200": _gpu("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "b200": _gpu("NVIDIA-B200"),
    "b300": _gpu("NVIDIA-B300-SXM6-AC"),
    "gb200": _gpu("NVIDIA-GB200"),
}
