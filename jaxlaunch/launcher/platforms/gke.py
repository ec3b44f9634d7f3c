"""Nodes of Google Kubernetes Engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxlaunch.accelerators import Source
from jaxlaunch.launcher.platforms.facts import (
    ARM_TAINT,
    GKE_GPU,
    GKE_TPU,
    GPU_TAINT,
    RESERVATION_BLOCK,
    RESERVATION_NAME,
    RESERVATION_PROJECT,
    RESERVATION_SUB_BLOCK,
    TPU_TAINT,
    Fact,
    Nodes,
    PlatformFacts,
    toleration_for,
)

_DOCS = "cloud.google.com/kubernetes-engine/docs"
GPUS = Source("GKE: About GPUs", f"{_DOCS}/concepts/gpus")
TPUS = Source("GKE: Plan TPUs", f"{_DOCS}/concepts/plan-tpus")
SPOT = Source("GKE: Spot VMs", f"{_DOCS}/concepts/spot-vms")
FLEX_START = Source("GKE: About flex-start", f"{_DOCS}/concepts/dws")
RESERVATIONS = Source(
    "GKE: Consume reserved zonal resources", f"{_DOCS}/how-to/consuming-reservations"
)
RESERVATION_PART_LABELS = Source(
    "Cluster Toolkit: node selectors of GKE jobs",
    "github.com/GoogleCloudPlatform/cluster-toolkit, pkg/orchestrator/gke",
)
TCPXO = Source(
    "GKE: GPU networking with GPUDirect-TCPXO", f"{_DOCS}/how-to/gpu-bandwidth-gpudirect-tcpx"
)
GPU_PLUGIN = Source(
    "GKE's GPU device plugin",
    "github.com/GoogleCloudPlatform/container-engine-accelerators, cmd/nvidia_gpu",
)
MACHINE_TYPES = Source("Compute Engine: GPU machine types", "cloud.google.com/compute/docs/gpus")
BANDWIDTH = Source(
    "Compute Engine: networking and GPU machines",
    "cloud.google.com/compute/docs/gpus/gpu-network-bandwidth",
)
TCPXO_MEASUREMENT = Source(
    "NVIDIA: GKE TCPXO networking", "docs.nvidia.com/aicr/integrator-guide/gke-tcpxo-networking"
)
AUTOSCALER = Source(
    "GKE's cluster autoscaler: labels",
    "k8s.io/gke-autoscaling/cluster-autoscaler, cloudprovider/gke/labels",
)
TCPXO_RELEASE = Source(
    "GPUDirect-TCPXO: release of 9 January 2026",
    "github.com/GoogleCloudPlatform/container-engine-accelerators, gpudirect-tcpxo/README.md; "
    "github.com/google/nccl-plugin-gpudirect-tcpxo, tcpxo_scripts/nccl-env-profile.sh",
)
GIB_POD = Source(
    "GPUDirect RDMA: NCCL RDMA installer and test",
    "github.com/GoogleCloudPlatform/container-engine-accelerators, "
    "gpudirect-rdma/nccl-rdma-installer.yaml, nccl-test.yaml, nccl-test-a4.yaml",
)
GIB_NCCL = Source(
    "GKE: reinforcement learning with verl and with NeMo RL, NCCL variables",
    f"{_DOCS}/tutorials/scaling-rl-verl-gke, {_DOCS}/tutorials/nemo-rl-gke",
)
GIB_UNUSED = Source(
    "llm-d: NCCL tuner of gIB on GKE",
    "llm-d.ai/docs, guides/recipes/modelserver/components/disable-gke-nccl-tuner-patch",
)
COMPUTE_DOMAINS = Source(
    "NVIDIA: ComputeDomains of its DRA driver",
    "docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/dra-cds.html",
)
GIB_RELEASE = Source(
    "NCCL/gIB 1.1.2 of May 2026: NCCL versions",
    "docs.cloud.google.com/ai-hypercomputer/docs/nccl/release-notes-arm64",
)
DRANET = Source(
    "GKE: allocate network resources by managed DRANET; its NCCL test",
    f"{_DOCS}/how-to/allocate-network-resources-dra; "
    "github.com/GoogleCloudPlatform/container-engine-accelerators, "
    "gpudirect-rdma/nccl-test-managed-rdma.yaml",
)
A4X_MAX = Source(
    "GPUDirect RDMA on A4X Max: NCCL test as a JobSet, whose image brings gIB",
    "github.com/GoogleCloudPlatform/container-engine-accelerators, "
    "gpudirect-rdma/nccl-test-a4x-max-jobset.yaml; github.com/GoogleCloudPlatform/cluster-toolkit, "
    "examples/gke-a4x-max-bm/nccl-jobset-example.yaml",
)
RDMA_CLASS = Fact("mrdma.google.com", DRANET)
# GPUDirect RDMA by NCCL's plugin gIB.
GIB_FOLDER = Fact("/usr/local/gib", GIB_POD)
_GIB_PLUGIN = Fact("gIB", GIB_POD)


def _gpu_nodes(
    *values: str,
    plugins: Fact[str] | None = None,
    rdma: Fact[int] | None = None,
    gib_tuner: str | None = None,
) -> Nodes:
    tuner = None if gib_tuner is None else Fact(f"{GIB_FOLDER.value}/configs/{gib_tuner}", GIB_NCCL)
    return Nodes({GKE_GPU: values}, (GPU_TAINT,), GPUS, plugins, rdma, tuner)


def _tpu_nodes(value: str) -> Nodes:
    return Nodes({GKE_TPU: (value,)}, (TPU_TAINT,), TPUS)


NODES: Mapping[str, Nodes] = {
    "cpu": Nodes(source=GPUS),
    "gpu": Nodes({}, (GPU_TAINT,), GPUS),
    "plugin": Nodes(source=GPUS),
    "t4": _gpu_nodes("nvidia-tesla-t4"),
    "v100": _gpu_nodes("nvidia-tesla-v100"),
    "rtxpro6000": _gpu_nodes("nvidia-rtx-pro-6000"),
    "l4": _gpu_nodes("nvidia-l4"),
    "a100": _gpu_nodes("nvidia-tesla-a100", "nvidia-a100-80gb"),
    "h100": _gpu_nodes(
        "nvidia-h100-80gb", "nvidia-h100-mega-80gb", plugins=Fact("GPUDirect-TCPX or TCPXO", TCPXO)
    ),
    "h200": _gpu_nodes(
        "nvidia-h200-141gb",
        plugins=_GIB_PLUGIN,
        rdma=Fact(8, DRANET),
        gib_tuner="tuner_config_a3u.txtpb",
    ),
    "b200": _gpu_nodes(
        "nvidia-b200", plugins=_GIB_PLUGIN, rdma=Fact(8, DRANET), gib_tuner="tuner_config_a4.txtpb"
    ),
    "gb200": Nodes(
        {GKE_GPU: ("nvidia-gb200",)}, (GPU_TAINT, ARM_TAINT), GPUS, _GIB_PLUGIN, Fact(4, DRANET)
    ),
    "gb300": Nodes(
        {GKE_GPU: ("nvidia-gb300",)}, (GPU_TAINT, ARM_TAINT), GPUS, rdma=Fact(8, A4X_MAX)
    ),
    "v4": _tpu_nodes("tpu-v4-podslice"),
    "v5e": _tpu_nodes("tpu-v5-lite-podslice"),
    "v5p": _tpu_nodes("tpu-v5p-slice"),
    "v6e": _tpu_nodes("tpu-v6e-slice"),
    "7x": _tpu_nodes("tpu7x"),
    "tpu7x": _tpu_nodes("tpu7x"),
    "tpu7": Nodes({GKE_TPU: ("tpu7",)}, (TPU_TAINT,), AUTOSCALER),
}

# Memory of each variant of an accelerator that a label distinguishes.
MEMORY_GB: Mapping[str, Fact[float]] = {
    "nvidia-tesla-v100": Fact(16, MACHINE_TYPES),
    "nvidia-tesla-a100": Fact(40, MACHINE_TYPES),
    "nvidia-a100-80gb": Fact(80, MACHINE_TYPES),
    "nvidia-h100-80gb": Fact(80, MACHINE_TYPES),
    "nvidia-h100-mega-80gb": Fact(80, MACHINE_TYPES),
}

# GPUs of the largest machine, by the value of the label GKE_GPU.
LARGEST: Mapping[str, Fact[int]] = {
    "nvidia-tesla-t4": Fact(4, MACHINE_TYPES),
    "nvidia-tesla-v100": Fact(8, MACHINE_TYPES),
    "nvidia-rtx-pro-6000": Fact(8, MACHINE_TYPES),
    "nvidia-l4": Fact(8, MACHINE_TYPES),
    "nvidia-tesla-a100": Fact(16, MACHINE_TYPES),
    "nvidia-a100-80gb": Fact(8, MACHINE_TYPES),
    "nvidia-h100-80gb": Fact(8, MACHINE_TYPES),
    "nvidia-h100-mega-80gb": Fact(8, MACHINE_TYPES),
    "nvidia-h200-141gb": Fact(8, MACHINE_TYPES),
    "nvidia-b200": Fact(8, MACHINE_TYPES),
    "nvidia-gb200": Fact(4, MACHINE_TYPES),
    "nvidia-gb300": Fact(4, MACHINE_TYPES),
}

CAPACITY: Mapping[str, Nodes] = {
    "spot": Nodes(
        {"cloud.google.com/gke-spot": ("true",)},
        (toleration_for("cloud.google.com/gke-spot"),),
        SPOT,
    ),
    # Nodes of queued provisioning have the first taint; other pools may have the second.
    "flex-start": Nodes(
        {"cloud.google.com/gke-flex-start": ("true",)},
        (
            toleration_for("cloud.google.com/gke-queued"),
            toleration_for("cloud.google.com/gke-flex-start"),
        ),
        AUTOSCALER,
    ),
    "reservation": Nodes(
        {"cloud.google.com/reservation-name": (RESERVATION_NAME,)}, (), RESERVATIONS
    ),
}
# Labels for the parts of a reservation that a job may name in addition.
RESERVATION_PARTS: Mapping[str, Nodes] = {
    "project": Nodes(
        {
            "cloud.google.com/reservation-project": (RESERVATION_PROJECT,),
            "cloud.google.com/reservation-affinity": ("specific",),
        },
        (),
        RESERVATIONS,
    ),
    "block": Nodes(
        {"cloud.google.com/reservation-blocks": (RESERVATION_BLOCK,)}, (), RESERVATION_PART_LABELS
    ),
    "sub_block": Nodes(
        {"cloud.google.com/reservation-subblocks": (RESERVATION_SUB_BLOCK,)},
        (),
        RESERVATION_PART_LABELS,
    ),
}

# The label that nodes of one TPU slice share.
SLICE_LABEL = Fact("cloud.google.com/gke-nodepool", TPUS)

# The chips of a TPU node, by which a slice 2x4 of one host differs from one of two hosts.
CHIPS_LABEL = Fact("cloud.google.com/gke-accelerator-count", AUTOSCALER)

# GKE mounts the driver here, and does not add the folders to the search paths of containers.
DRIVER: Fact[Mapping[str, str]] = Fact(
    {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64", "PATH": "/usr/local/nvidia/bin"}, GPU_PLUGIN
)

LONGEST_FLEX_START_S = Fact(7 * 86_400, FLEX_START)
# Grace period of pods on a preempted spot node, and the largest one that a node pool may set.
# System pods have another.
SPOT_GRACE_S = Fact(15, SPOT)
LARGEST_SPOT_GRACE_S = Fact(120, SPOT)

# GPUDirect-TCPXO only exists on a3-megagpu-8g, with 8 GPUs and an interface for each in addition to
# eth0.
TCPXO_GPU = Fact("nvidia-h100-mega-80gb", TCPXO)
TCPXO_GPUS = Fact(8, TCPXO)
TCPXO_VARIABLES: Fact[Mapping[str, str]] = Fact(
    {
        "NCCL_FASTRAK_CTRL_DEV": "eth0",
        "NCCL_FASTRAK_IFNAME": "eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_CROSS_NIC": "0",
        "NCCL_PROTO": "Simple,LL128",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_NVLSTREE_MAX_CHUNKSIZE": "131072",
        "NCCL_P2P_NET_CHUNKSIZE": "524288",
        "NCCL_P2P_PCI_CHUNKSIZE": "524288",
        "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
        "NCCL_FASTRAK_NUM_FLOWS": "2",
        "NCCL_FASTRAK_ENABLE_CONTROL_CHANNEL": "0",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_FASTRAK_USE_SNAP": "1",
        "NCCL_FASTRAK_USE_LLCM": "1",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_FASTRAK_ENABLE_HOTPATH_LOGGING": "0",
        "NCCL_TUNER_PLUGIN": "libnccl-tuner.so",
        "NCCL_TUNER_CONFIG_PATH": "/usr/local/nvidia/lib64/a3plus_tuner_config.textproto",
        "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE": (
            "/usr/local/nvidia/lib64/a3plus_guest_config.textproto"
        ),
        "NCCL_FASTRAK_PLUGIN_ACCEPT_TIMEOUT_MS": "600000",
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV,COLL,GRAPH",
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        "NCCL_NVLS_ENABLE": "1",
        # JAX loads NCCL by its path in the image, unless another one is already loaded.
        "LD_PRELOAD": "/usr/local/nvidia/lib64/libnccl.so.2",
    },
    TCPXO_RELEASE,
)
# GPUDirect-TCPX of a3-highgpu-8g is not supported.
TCPX_GPU = Fact("nvidia-h100-80gb", TCPXO)

# gIB: 8 GPUs of a3-ultragpu-8g or a4-highgpu-8g, an interface for each from eth2 on.
GIB_GPUS = Fact(8, GIB_POD)
GIB_FIRST_INTERFACE = Fact(2, GIB_POD)
GIB_FOLDERS: Fact[Mapping[str, str]] = Fact(
    {
        "/home/kubernetes/bin/nvidia": "/usr/local/nvidia",
        "/home/kubernetes/bin/gib": GIB_FOLDER.value,
    },
    GIB_POD,
)
DRIVER_FOLDER: Fact[Mapping[str, str]] = Fact(
    {"/home/kubernetes/bin/nvidia": "/usr/local/nvidia"}, A4X_MAX
)
GIB_VARIABLES: Fact[Mapping[str, str]] = Fact(
    {
        "NCCL_NET": "gIB",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_CROSS_NIC": "0",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_P2P_NET_CHUNKSIZE": "131072",
        "NCCL_NVLS_CHUNKSIZE": "524288",
        "NCCL_IB_ADAPTIVE_ROUTING": "1",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_IB_TC": "52",
        "NCCL_IB_FIFO_TC": "84",
    },
    GIB_NCCL,
)
# Disables installed plugins: a tuner without a configuration ends the job.
WITHOUT_PLUGINS: Fact[Mapping[str, str]] = Fact(
    {"NCCL_TUNER_PLUGIN": "none", "NCCL_NET_PLUGIN": "none"}, GIB_UNUSED
)
# Prefixes of variables by which a job configures the plugins itself.
PLUGIN_VARIABLE_PREFIXES: Fact[Sequence[str]] = Fact(
    ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_"), TCPXO_RELEASE
)
# The version of NCCL in the installer of TCPXO, and the oldest version that gIB supports.
TCPXO_NCCL = Fact("2.28.7", TCPXO_RELEASE)
GIB_OLDEST_NCCL = Fact("2.25", GIB_RELEASE)

# A4X and A4X Max also connect hosts by NVLink, through a ComputeDomain (IMEX) of a DRA driver.
COMPUTE_DOMAIN_GPUS: Fact[Sequence[str]] = Fact(("nvidia-gb200", "nvidia-gb300"), COMPUTE_DOMAINS)

# Bandwidth of all interfaces for GPUs as a multiple of eth0's 200 Gbit/s, which plain TCP uses: 4 ×
# 200 Gbit/s of a3-highgpu-8g, 8 × 200 of a3-megagpu-8g, 8 × 400 of a3-ultragpu-8g and
# a4-highgpu-8g, 4 × 400 of a4x-highgpu-4g, 4 × 800 of a4x-maxgpu-4g-metal.
GPU_NETWORK_FACTOR: Mapping[str, Fact[int]] = {
    "nvidia-h100-80gb": Fact(4, BANDWIDTH),
    "nvidia-h100-mega-80gb": Fact(8, BANDWIDTH),
    "nvidia-h200-141gb": Fact(16, BANDWIDTH),
    "nvidia-b200": Fact(16, BANDWIDTH),
    "nvidia-gb200": Fact(8, BANDWIDTH),
    "nvidia-gb300": Fact(16, BANDWIDTH),
}
# GB/s of NCCL between hosts by TCP and by GPUDirect-TCPXO.
NCCL_GB_PER_S: Fact[tuple[int, int]] = Fact((4, 340), TCPXO_MEASUREMENT)

PLATFORM = PlatformFacts(
    NODES,
    CAPACITY,
    networks=("gpudirect-tcpxo", "gpudirect-rdma", "gpudirect-rdma-dra"),
    largest=LARGEST,
    memory_gb=MEMORY_GB,
    slice_label=SLICE_LABEL,
    search_paths={"cuda": DRIVER},
)
