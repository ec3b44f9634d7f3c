"""Nodes of other clusters as NVIDIA's and AMD's labellers leave them: no taint, a GPU label."""

from __future__ import annotations

from collections.abc import Mapping

from tests.cluster.node_kinds.kind import Kind, Platform, cpu_left, split_names

# The labels' keys are in github.com/NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery/README.md.
_OPERATOR = "docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest"
# What they make of a product's name.
MIG, SHARING = (f"{_OPERATOR}/gpu-operator-mig.html", f"{_OPERATOR}/gpu-sharing.html")
# nvidia.com/gpu.product of each make.
PRODUCTS = "docs.nvidia.com/nim, supported models: verified GPUs"
AMD = "instinct.docs.amd.com/projects/k8s-device-plugin"  # amd.com/gpu.product-name, amd.com/gpu
# The resource's name is its owner's choice.
NETWORK = "docs.nvidia.com/networking, k8s-rdma-shared-dev-plugin"
NODES = "kubernetes.io/docs/reference/labels-annotations-taints"


def _make_node(
    name: str,
    labels: Mapping[str, str],
    resources: Mapping[str, int],
    takes: str,
    source: str,
    arch: str = "amd64",
) -> Kind:
    common = {"kubernetes.io/arch": arch, "kubernetes.io/os": "linux"}
    counts = {key: str(count) for key, count in resources.items()}
    allocatable = {"cpu": cpu_left(112), "memory": "1900Gi", **counts}
    return Kind(
        f"generic-{name}", source, common | dict(labels), {}, allocatable, split_names(takes)
    )


def _nvidia_node(
    product: str,
    count: int,
    takes: str,
    source: str = PRODUCTS,
    *,
    arch: str = "amd64",
    ib: int = 0,
) -> Kind:
    labels = {
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.count": str(count),
        "nvidia.com/gpu.product": product,
    }
    resources = {"nvidia.com/gpu": count, **({"rdma/ib": ib} if ib else {})}
    name = (
        product.lower().replace(".", "-")
        + (f"-x{count}" if count != 8 else "")
        + ("-ib" if ib else "")
    )
    return _make_node(name, labels, resources, f"cpu, {takes}", source, arch)


def _amd_node(product: str, device: str, takes: str) -> Kind:
    labels = {
        "amd.com/gpu.product-name": product,
        "amd.com/gpu.device-id": device,
        "amd.com/gpu.family": "AI",
    }
    name = product.lower().replace("_", "-")
    return _make_node(name, labels, {"amd.com/gpu": 8}, f"cpu, {takes}", AMD)


KINDS = (
    _make_node("cpu", {}, {}, "cpu", NODES),
    _nvidia_node("NVIDIA-L4", 8, "l4"),
    _nvidia_node("NVIDIA-L40S", 8, ""),
    _nvidia_node("NVIDIA-A100-SXM4-40GB", 8, "a100"),
    _nvidia_node("NVIDIA-A100-SXM4-80GB", 8, "a100, a100 of one kind", ib=8),
    _nvidia_node("NVIDIA-A100-PCIE-40GB", 4, ""),
    _nvidia_node("NVIDIA-A100-80GB-PCIe", 8, "a100"),
    _nvidia_node("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 56, "", MIG),
    _nvidia_node("NVIDIA-H100-80GB-HBM3", 8, "h100", ib=8),
    _nvidia_node("NVIDIA-H100-80GB-HBM3-SHARED", 80, "", SHARING),
    _nvidia_node("NVIDIA-H100-PCIe", 8, "h100"),
    _nvidia_node("NVIDIA-H100-NVL", 8, "h100"),
    _nvidia_node("NVIDIA-H200", 8, "h200, h200 rdma", NETWORK, ib=8),
    _nvidia_node("NVIDIA-H200-NVL", 8, "h200"),
    _nvidia_node("NVIDIA-B200", 8, "b200"),
    _nvidia_node("NVIDIA-B300-SXM6-AC", 8, "b300"),
    _nvidia_node("NVIDIA-GB200", 4, "gb200", arch="arm64"),
    _amd_node("AMD_Instinct_MI300X_OAM", "74a1", "mi300x"),
    _amd_node("AMD_Instinct_MI325_OAM", "74a5", "mi325x"),
)
_RDMA = "network: {profile: rdma, resource: rdma/ib, count: 8}"
JOBS = {
    "cpu": "accelerator: {type: cpu}",
    "l4": "accelerator: {type: l4}",
    "a100": "accelerator: {type: a100}",
    "a100 of one kind": f"accelerator: {{type: a100}}\nhosts: 2\n{_RDMA}\n"
    "node_selector: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-80GB}",
    "h100": "accelerator: {type: h100}",
    "h200": "accelerator: {type: h200}\nresources: {cpu: 96, memory: 1500Gi}",
    "h200 rdma": "accelerator: {type: h200}\n" + _RDMA,
    "b200": "accelerator: {type: b200}",
    "b300": "accelerator: {type: b300}",
    "gb200": "accelerator: {type: gb200}",
    "mi300x": "accelerator: {type: mi300x}\nhosts: 2",
    "mi325x": "accelerator: {type: mi325x}",
}
GENERIC = Platform(KINDS, JOBS)
