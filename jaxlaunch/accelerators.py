"""The accelerators that a job can request, with the facts about each that need no cluster.

ACCELERATORS has one row for each value of `accelerator.type` in job.yaml. The chart's schema,
docs/platforms.md, the memory plan and the trainer's MFU are derived from the same rows. Node labels
are in launcher/platforms; machine types, prices and quotas are not part of jaxlaunch. The launcher
and the trainer both import this module, so it imports neither.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

Platform = Literal["cpu", "cuda", "rocm", "tpu", "plugin"]

TOPOLOGIES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# 3D topologies of less than a cube. A larger 3D slice consists of whole cubes.
SMALL_TOPOLOGIES_3D = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4")
# A cube has 4x4x4 chips.
CHIPS_PER_CUBE = 64
# Chips of a usual TPU VM.
CHIPS_PER_VM = 4

GPU_PLATFORMS = ("cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Source:
    """A page or file of the manufacturer, and the month in which it was read."""

    title: str
    location: str
    read_in: str = "2026-11"


NVIDIA_DRIVER = Source("NVIDIA's driver: name and memory of a GPU", "nvidia-smi")
CUDA_GUIDE = Source(
    "NVIDIA: CUDA programming guide, compute capabilities",
    "docs.nvidia.com/cuda/cuda-c-programming-guide",
)
DATA_SHEETS = Source("NVIDIA: dense bf16 FLOP/s, without sparsity", "the data sheet of each GPU")
AMD_DRIVER = Source("AMD's driver: memory of a GPU", "rocm-smi")
GKE_TPUS = Source("GKE: Plan TPUs", "cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus")
XPK = Source(
    "xpk: system characteristics, largest slices",
    "github.com/AI-Hypercomputer/xpk, system_characteristics.py",
)
TPU_PAGES = Source("Cloud TPU: v4 to TPU7x, peak of a chip", "cloud.google.com/tpu/docs")
AUTOSCALER = Source(
    "GKE's cluster autoscaler: hosts and topologies", "k8s.io/gke-autoscaling/cluster-autoscaler"
)
TPU_INFO = Source(
    "JAX: names and cores of TPUs", "github.com/jax-ml/jax, jax/_src/pallas/mosaic/tpu_info.py"
)
XLA_MEMORY = Source(
    "XLA for TPU: GiB that it lets a program use", "its error RESOURCE_EXHAUSTED: Used … of … hbm"
)
CUDA_COMPATIBILITY = Source(
    "NVIDIA: CUDA compatibility, minor versions",
    "docs.nvidia.com/deploy/cuda-compatibility, table 1",
)

GPU_NAMES = Source(
    "NVIDIA: names of GPUs by device id, Turing and newer",
    "github.com/NVIDIA/open-gpu-kernel-modules, README.md",
)
MODAL_MEMORY = Source(
    "Modal: memory of T4, A10, L4, L40S, A100 and H100, as reported by nvidia-smi",
    "github.com/modal-labs/modal-client, pull request 2797",
)
DATA_SHEET_COPIES = Source(
    "NVIDIA's data sheets of A10, A40, L40 and L40S, dense bf16 FLOP/s, as others print them",
    "github.com/Lightning-AI/pytorch-lightning, lightning/fabric/utilities/throughput.py; for L40S "
    "mullet.se, L40/L40S",
)
UNCONFIRMED_MEMORY = Source(
    "NVIDIA: memory, not confirmed on a page or a device", "none", "not yet"
)
UNCONFIRMED_PEAK = Source("NVIDIA: peak, not confirmed on a page", "none", "not yet")
RTX_PRO = Source(
    "NVIDIA: RTX PRO 6000 Blackwell, 125, 120 and 110 fp32 TFLOP/s; dense bf16 is four times that "
    "(503.8 and 125.95 of the Workstation Edition)",
    "nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000; "
    "nvidia.com/en-us/data-center/rtx-pro-6000-blackwell-server-edition; hmc-tech.com/gpu",
)
MLPERF = Source(
    "AMD: memory of MI350X and MI355X, in its systems of MLPerf Inference 6.0 and 6.1",
    "github.com/mlcommons/inference_results_v6.0, closed/AMD",
)
SCALING_BOOK = Source(
    "How to Scale Your Model: TPU specs, memory and links", "jax-ml.github.io/scaling-book/tpus"
)
DERIVED_CLOCK = Source(
    "Clock: peak FLOP/s over the multiply-adds of a cycle, v5e's 4 units of 128 x 128",
    "the row's peak",
)
NVIDIA_LINKS = Source(
    "NVIDIA: memory, half of NVLink both ways, a 400 Gbit/s port for each GPU",
    "the data sheet of each GPU",
)
_NVIDIA_SOURCES, _TPU_SOURCES = (
    (NVIDIA_DRIVER, CUDA_GUIDE, DATA_SHEETS),
    (GKE_TPUS, XPK, TPU_PAGES, XLA_MEMORY, SCALING_BOOK, DERIVED_CLOCK),
)
# The oldest compute capability in GPU_NAMES.
_TURING = 7.5

# By major version of CUDA, and so for the extras cuda12 and cuda13: the oldest NVIDIA driver that
# runs its programs (CUDA_COMPATIBILITY), and the oldest compute capability that it compiles for
# (CUDA_GUIDE).
OLDEST_DRIVER: Mapping[int, int] = {12: 525, 13: 580}
OLDEST_CAPABILITY: Mapping[int, float] = {12: 5.0, 13: 7.5}
# The version of NCCL that both extras install and JAX loads.
PINNED_NCCL = "2.32.3"


@dataclasses.dataclass(frozen=True)
class MachineSpeed:
    """Speeds other than FLOP/s: bytes per second of one JAX device in one direction."""

    # Clock of the cycles in the compiler's estimates, or None if it estimates no cycles.
    clock_hz: float | None
    hbm_bytes_per_s: float
    # Over all links of a device: both neighbours on each axis of the torus, or NVLink.
    links_bytes_per_s: float
    # Of a ring along one axis of the torus in both directions, or over NVLink.
    ring_bytes_per_s: float
    # Between slices, or between hosts.
    network_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """One of the device models that an accelerator type includes."""

    # The `device_kind` of JAX.
    name: str
    # Memory of one JAX device that a program may use.
    memory_gib: float
    # Dense bf16 FLOP/s of one JAX device. None for a GPU that does not compute in bf16. A device
    # without a row, such as a MIG slice or a new chip, has no peak either, rather than a wrong one.
    peak_flops: float | None = None


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device, as `accelerator.type` names it."""

    platform: Platform
    # Default of `accelerator.per_host`: the devices of a whole machine.
    per_host: int
    # Empty for cpu, which uses the memory of its host, and for gpu, amdgpu and plugin, whose model
    # depends on the node.
    models: tuple[DeviceModel, ...] = ()
    # JAX devices per chip.
    devices_per_chip: int = 1
    # Dimensions of a TPU topology.
    dimensions: int = 0
    # Cubes in the largest 3D slice.
    max_cubes: int = 0
    # Topologies that also exist as one machine.
    whole_host_topologies: tuple[str, ...] = ()
    # NUMA nodes among which the chips of a whole host are divided.
    numa_nodes: int = 1
    # Compute capability of an NVIDIA GPU.
    capability: str | None = None
    # The hosts of a gang may be nodes of different kinds, because these have equal memory and the
    # same fast network or none. An AMD GPU has another id in a virtual machine than on a machine.
    may_mix_kinds: bool = False
    machine: MachineSpeed | None = None
    # NVLink connects the GPUs of all hosts of a rack.
    has_multi_node_nvlink: bool = False
    # The hosts have Arm processors, which need images of their own.
    is_arm: bool = False
    sources: tuple[Source, ...] = ()

    @property
    def memory_gib(self) -> tuple[float, ...]:
        """Memory sizes that one JAX device may have, the smallest first."""
        return tuple(sorted({model.memory_gib for model in self.models}))

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s of one JAX device of the fastest model, or None if none is known."""
        peaks = [model.peak_flops for model in self.models if model.peak_flops is not None]
        return max(peaks, default=None)

    def listed_topologies(self) -> tuple[str, ...]:
        """Return the topologies that an error message lists, which are not all of them."""
        if self.dimensions == 2:
            return TOPOLOGIES_2D
        small = SMALL_TOPOLOGIES_3D if self.devices_per_chip == 2 else SMALL_TOPOLOGIES_3D[1:]
        return (*small, "4x4x4", "4x4x8")

    def accepts_topology(self, topology: str) -> bool:
        """Return whether slices of this shape exist.

        These are the listed shapes, and ascending multiples of 4 within the largest slice.
        """
        if topology in self.listed_topologies():
            return True
        sides = parse_topology(topology)
        if sides is None or len(sides) != 3 or self.dimensions != 3:
            return False
        has_whole_cubes = all(side % 4 == 0 for side in sides) and list(sides) == sorted(sides)
        return has_whole_cubes and math.prod(sides) <= self.max_cubes * CHIPS_PER_CUBE


# GPUs whose rows were compared with NVIDIA's own sources.
_VERIFIED_GPUS = {
    "NVIDIA L4",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA H100 PCIe",
    "NVIDIA H200",
    "NVIDIA B200",
    "NVIDIA B300 SXM6 AC",
    "NVIDIA GB200",
}
# GPUs whose memory was compared with MODAL_MEMORY.
_MEASURED_GPUS = {"Tesla T4", "NVIDIA A10", "NVIDIA L40S"}
_RTX_PRO_GPUS = {
    f"NVIDIA RTX PRO 6000 Blackwell {edition} Edition"
    for edition in ("Server", "Workstation", "Max-Q Workstation")
}
# GPUs whose peak was compared with a copy of their data sheet.
_COPIED_SHEET_GPUS = {"NVIDIA A10", "NVIDIA A40", "NVIDIA L40", "NVIDIA L40S"}


def _nvidia_gpu(
    capability: str,
    *models: DeviceModel,
    per_host: int = 1,
    may_mix_kinds: bool = False,
    is_arm: bool = False,
    has_multi_node_nvlink: bool = False,
    machine: MachineSpeed | None = None,
) -> Accelerator:
    return Accelerator(
        "cuda",
        per_host,
        models,
        capability=capability,
        may_mix_kinds=may_mix_kinds,
        has_multi_node_nvlink=has_multi_node_nvlink,
        is_arm=is_arm,
        machine=machine,
        sources=_nvidia_sources(capability, models, has_links=machine is not None),
    )


def _nvidia_sources(
    capability: str, models: Sequence[DeviceModel], *, has_links: bool
) -> tuple[Source, ...]:
    names = {model.name for model in models}
    links = [NVIDIA_LINKS] if has_links else []
    if names & _VERIFIED_GPUS:
        return (*_NVIDIA_SOURCES, *links)
    sources = [GPU_NAMES] if float(capability) >= _TURING else []
    sources.append(MODAL_MEMORY if names <= _MEASURED_GPUS else UNCONFIRMED_MEMORY)
    if any(model.peak_flops is not None for model in models):
        if names <= _RTX_PRO_GPUS:
            sources.append(RTX_PRO)
        else:
            is_copied = names <= _COPIED_SHEET_GPUS
            sources.append(DATA_SHEET_COPIES if is_copied else UNCONFIRMED_PEAK)
    return (*sources, *links)


_BLACKWELL = MachineSpeed(None, 8.0e12, 9e11, 9e11, 5e10)
_TPU7X = Accelerator(
    "tpu",
    CHIPS_PER_VM,
    (DeviceModel("TPU7x", 94.74, 2307e12 / 2),),
    # JAX has a device for each of the two chiplets.
    devices_per_chip=2,
    dimensions=3,
    max_cubes=144,
    numa_nodes=2,
    machine=MachineSpeed(2.2e9, 3.7e12, 3e11, 1e11, 6.25e9),
    sources=(AUTOSCALER, TPU_INFO, TPU_PAGES, XLA_MEMORY, SCALING_BOOK, DERIVED_CLOCK),
)

ACCELERATORS: Mapping[str, Accelerator] = {
    # `per_host` is a number of virtual devices.
    "cpu": Accelerator("cpu", 1),
    # Any NVIDIA GPU.
    "gpu": Accelerator("cuda", 1),
    # Any AMD GPU.
    "amdgpu": Accelerator("rocm", 1),
    # A device of any other vendor. The image must have a JAX plugin for it.
    "plugin": Accelerator("plugin", 1),
    "t4": _nvidia_gpu("7.5", DeviceModel("Tesla T4", 15.0), may_mix_kinds=True),
    "v100": _nvidia_gpu(
        "7.0",
        DeviceModel("Tesla V100-SXM2-16GB", 16.0),
        DeviceModel("Tesla V100-PCIE-16GB", 16.0),
        DeviceModel("Tesla V100-SXM2-32GB", 32.0),
        DeviceModel("Tesla V100-SXM3-32GB", 32.0),
        DeviceModel("Tesla V100-PCIE-32GB", 32.0),
        per_host=8,
    ),
    "a10": _nvidia_gpu("8.6", DeviceModel("NVIDIA A10", 22.5, 125e12)),
    "a10g": _nvidia_gpu("8.6", DeviceModel("NVIDIA A10G", 22.5, 70e12), may_mix_kinds=True),
    "a30": _nvidia_gpu("8.0", DeviceModel("NVIDIA A30", 24.0, 165e12)),
    "a40": _nvidia_gpu("8.6", DeviceModel("NVIDIA A40", 45.0, 149.7e12)),
    "a4000": _nvidia_gpu("8.6", DeviceModel("NVIDIA RTX A4000", 16.0)),
    "a5000": _nvidia_gpu("8.6", DeviceModel("NVIDIA RTX A5000", 24.0)),
    "a6000": _nvidia_gpu("8.6", DeviceModel("NVIDIA RTX A6000", 48.0, 154.8e12)),
    "rtx3090": _nvidia_gpu("8.6", DeviceModel("NVIDIA GeForce RTX 3090", 24.0, 71e12)),
    "rtx4090": _nvidia_gpu("8.9", DeviceModel("NVIDIA GeForce RTX 4090", 24.0, 165.2e12)),
    "rtx5090": _nvidia_gpu("12.0", DeviceModel("NVIDIA GeForce RTX 5090", 31.8, 209.5e12)),
    "rtx6000ada": _nvidia_gpu("8.9", DeviceModel("NVIDIA RTX 6000 Ada Generation", 48.0, 364.2e12)),
    "rtxpro6000": _nvidia_gpu(
        "12.0",
        DeviceModel("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, 480e12),
        DeviceModel("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, 503.8e12),
        DeviceModel("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 95.6, 440e12),
        may_mix_kinds=True,
    ),
    "l4": _nvidia_gpu("8.9", DeviceModel("NVIDIA L4", 22.5, 121e12), may_mix_kinds=True),
    "l40": _nvidia_gpu("8.9", DeviceModel("NVIDIA L40", 45.0, 181e12)),
    "l40s": _nvidia_gpu("8.9", DeviceModel("NVIDIA L40S", 45.0, 362e12), may_mix_kinds=True),
    "a100": _nvidia_gpu(
        "8.0",
        DeviceModel("NVIDIA A100-SXM4-40GB", 40.0, 312e12),
        DeviceModel("NVIDIA A100-SXM4-80GB", 80.0, 312e12),
        DeviceModel("NVIDIA A100-PCIE-40GB", 40.0, 312e12),
        DeviceModel("NVIDIA A100 80GB PCIe", 80.0, 312e12),
        per_host=8,
        machine=MachineSpeed(None, 2.0e12, 3e11, 3e11, 2.5e10),
    ),
    "a800": _nvidia_gpu("8.0", DeviceModel("NVIDIA A800-SXM4-80GB", 80.0, 312e12), per_host=8),
    "h100": _nvidia_gpu(
        "9.0",
        DeviceModel("NVIDIA H100 80GB HBM3", 79.6, 989.4e12),
        DeviceModel("NVIDIA H100 PCIe", 79.6, 756e12),
        DeviceModel("NVIDIA H100 NVL", 93.6, 835e12),
        per_host=8,
        machine=MachineSpeed(None, 3.35e12, 4.5e11, 4.5e11, 5e10),
    ),
    "h800": _nvidia_gpu("9.0", DeviceModel("NVIDIA H800", 79.6, 989.4e12), per_host=8),
    "h20": _nvidia_gpu("9.0", DeviceModel("NVIDIA H20", 95.6, 148e12), per_host=8),
    "h200": _nvidia_gpu(
        "9.0",
        DeviceModel("NVIDIA H200", 140.4, 989.4e12),
        DeviceModel("NVIDIA H200 NVL", 140.4, 835.5e12),
        per_host=8,
        machine=MachineSpeed(None, 4.8e12, 4.5e11, 4.5e11, 5e10),
    ),
    "gh200": _nvidia_gpu("9.0", DeviceModel("NVIDIA GH200 480GB", 95.6, 989.4e12), is_arm=True),
    "b200": _nvidia_gpu(
        "10.0", DeviceModel("NVIDIA B200", 178.3, 2250e12), per_host=8, machine=_BLACKWELL
    ),
    "b300": _nvidia_gpu("10.3", DeviceModel("NVIDIA B300 SXM6 AC", 268.6, 2250e12), per_host=8),
    "gb200": _nvidia_gpu(
        "10.0",
        DeviceModel("NVIDIA GB200", 184.0, 2500e12),
        per_host=4,
        is_arm=True,
        has_multi_node_nvlink=True,
        machine=_BLACKWELL,
    ),
    "gb300": _nvidia_gpu(
        "10.3",
        DeviceModel("NVIDIA GB300", 277.0, 2500e12),
        per_host=4,
        is_arm=True,
        has_multi_node_nvlink=True,
    ),
    "mi300x": Accelerator(
        "rocm",
        8,
        (DeviceModel("AMD Instinct MI300X", 192.0),),
        may_mix_kinds=True,
        sources=(AMD_DRIVER,),
    ),
    "mi325x": Accelerator(
        "rocm",
        8,
        (DeviceModel("AMD Instinct MI325X", 256.0),),
        may_mix_kinds=True,
        sources=(AMD_DRIVER,),
    ),
    "mi350x": Accelerator(
        "rocm", 8, (DeviceModel("AMD Instinct MI350X", 288.0),), sources=(MLPERF,)
    ),
    "mi355x": Accelerator(
        "rocm", 8, (DeviceModel("AMD Instinct MI355X", 288.0),), sources=(MLPERF,)
    ),
    # JAX combines the two cores of a v4 or v5p chip into one device (megacore). On v4 this leaves
    # programs less of the 32 GiB.
    "v4": Accelerator(
        "tpu",
        CHIPS_PER_VM,
        (DeviceModel("TPU v4", 30.5, 275e12),),
        dimensions=3,
        max_cubes=64,
        machine=MachineSpeed(1.05e9, 1.2e12, 2.7e11, 9e10, 6.25e9),
        sources=_TPU_SOURCES,
    ),
    "v5e": Accelerator(
        "tpu",
        CHIPS_PER_VM,
        (DeviceModel("TPU v5 lite", 15.75, 197e12), DeviceModel("TPU v5e", 15.75, 197e12)),
        dimensions=2,
        machine=MachineSpeed(1.5e9, 8.2e11, 1.8e11, 9e10, 6.25e9),
        whole_host_topologies=("2x4",),
        sources=_TPU_SOURCES,
    ),
    "v5p": Accelerator(
        "tpu",
        CHIPS_PER_VM,
        (DeviceModel("TPU v5", 95.73, 459e12), DeviceModel("TPU v5p", 95.73, 459e12)),
        dimensions=3,
        max_cubes=140,
        machine=MachineSpeed(1.75e9, 2.8e12, 5.4e11, 1.8e11, 6.25e9),
        sources=_TPU_SOURCES,
    ),
    "v6e": Accelerator(
        "tpu",
        CHIPS_PER_VM,
        (DeviceModel("TPU v6 lite", 31.24, 918e12), DeviceModel("TPU v6e", 31.24, 918e12)),
        dimensions=2,
        machine=MachineSpeed(1.75e9, 1.6e12, 3.6e11, 1.8e11, 6.25e9),
        whole_host_topologies=("2x4",),
        sources=_TPU_SOURCES,
    ),
    "7x": _TPU7X,
    # The same chip under its name in GKE's label and in JAX.
    "tpu7x": _TPU7X,
    # Other machines than TPU7x: their peak is not published, and their largest slice is smaller.
    "tpu7": dataclasses.replace(
        _TPU7X, models=(DeviceModel("TPU7", 94.74),), max_cubes=4, sources=(AUTOSCALER, TPU_INFO)
    ),
}

# Peak FLOP/s by `device_kind`.
PEAK_FLOPS: Mapping[str, float] = {
    model.name: model.peak_flops
    for accelerator in ACCELERATORS.values()
    for model in accelerator.models
    if model.peak_flops is not None
}


def describe_per_host_defaults() -> str:
    """Return the defaults of `per_host` for all but TPUs: "gb200, gb300 4, …, all others 1"."""
    names_by_count: dict[int, list[str]] = {}
    for name, accelerator in ACCELERATORS.items():
        if accelerator.platform != "tpu":
            names_by_count.setdefault(accelerator.per_host, []).append(name)
    usual_count = max(names_by_count, key=lambda count: len(names_by_count[count]))
    del names_by_count[usual_count]
    defaults = [f"{', '.join(names)} {count}" for count, names in sorted(names_by_count.items())]
    return ", ".join([*defaults, f"all others {usual_count}"])


def parse_topology(topology: str) -> tuple[int, ...] | None:
    """Return the sides of a topology such as `2x2x4`, or None if the text is not a topology."""
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", topology):
        return None
    return tuple(int(side) for side in topology.split("x"))


def chips_per_host(accelerator_type: str, topology: str) -> tuple[int, ...]:
    """Return the numbers of chips that a host of this slice may have, the usual number first.

    A host usually has 4 chips, or all chips of a smaller slice. Some slices also exist as a single
    larger host.
    """
    chips = math.prod(parse_topology(topology) or (1,))
    usual_chips = min(chips, CHIPS_PER_VM)
    if topology in ACCELERATORS[accelerator_type].whole_host_topologies:
        return (usual_chips, chips)
    return (usual_chips,)
