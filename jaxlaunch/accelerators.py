"""What is known of accelerators without a cluster: one row each, in KNOWN.

job.yaml's keys, the chart's values, docs/platforms.md, the plan of memory and the trainer's MFU are made from these
rows; which labels the nodes of a platform have is said in launcher/manifests/platforms. Machine types, prices and
quotas are not here. The launcher and the trainer both read this file, so it imports neither.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Literal

Platform = Literal["cpu", "cuda", "rocm", "tpu"]

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_CUBES = ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4")
CHIPS_OF_A_CUBE = 64  # a larger 3D slice is made of whole 4x4x4 cubes
CHIPS_PER_VM = 4

GPUS = ("cuda", "rocm")  # platforms whose devices a fast network joins


@dataclasses.dataclass(frozen=True)
class Source:
    """A page or file of whoever makes the thing, and the month in which it was read."""

    title: str
    where: str
    read: str = "2026-11"


DRIVER = Source("NVIDIA's driver: memory of a GPU", "nvidia-smi")
GUIDE = Source("NVIDIA: CUDA programming guide, compute capabilities", "docs.nvidia.com/cuda/cuda-c-programming-guide")
SHEETS = Source("NVIDIA: dense bf16 FLOP/s, without sparsity", "the data sheet of each GPU")
AMD_DRIVER = Source("AMD's driver: memory of a GPU", "rocm-smi")
GKE_TPUS = Source("GKE: Plan TPUs", "cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus")
XPK = Source(
    "xpk: system characteristics, largest slices", "github.com/AI-Hypercomputer/xpk, system_characteristics.py"
)
TPU_PAGES = Source("Cloud TPU: v4 to TPU7x, HBM and peak of a chip", "cloud.google.com/tpu/docs")
AUTOSCALER = Source("GKE's cluster autoscaler: hosts and topologies", "k8s.io/gke-autoscaling/cluster-autoscaler")
TPU_INFO = Source("JAX: cores and memory of TPU7x", "github.com/jax-ml/jax, jax/_src/pallas/mosaic/tpu_info.py")

_NVIDIA, _TPU = (DRIVER, GUIDE, SHEETS), (GKE_TPUS, XPK, TPU_PAGES)


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device, as `accelerator.type` names it."""

    platform: Platform
    per_host: int  # the default: a whole machine
    memory_gib: tuple[float, ...] = ()  # of one JAX device, the smallest make first; cpu: its host's
    # Dense bf16 FLOP/s of one device by its exact `device_kind`. A name that is not listed (a MIG slice, a new chip)
    # has no peak, rather than a wrong one.
    peak_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    devices_per_chip: int = 1  # JAX devices
    dimensions: int = 0  # of a TPU topology
    cubes: int = 0  # in the largest 3D slice
    whole_host: tuple[str, ...] = ()  # topologies that also exist as one machine
    capability: str | None = None  # NVIDIA's compute capability of a GPU
    sources: tuple[Source, ...] = ()

    def topologies(self) -> tuple[str, ...]:
        """The topologies a message may offer."""
        if self.dimensions == 2:
            return FLAT
        small = SMALL_CUBES if self.devices_per_chip == 2 else SMALL_CUBES[1:]
        return (*small, "4x4x4", "4x4x8")

    def accepts(self, topology: str) -> bool:
        """Whether slices of this shape are made: listed ones, or ascending multiples of 4 within the largest slice."""
        if topology in self.topologies():
            return True
        sides = sides_of(topology)
        if sides is None or len(sides) != 3 or self.dimensions != 3:
            return False
        whole_cubes = all(side % 4 == 0 for side in sides) and list(sides) == sorted(sides)
        return whole_cubes and math.prod(sides) <= self.cubes * CHIPS_OF_A_CUBE


_SEVENTH = Accelerator(
    "tpu",
    CHIPS_PER_VM,
    (96.0,),
    devices_per_chip=2,  # JAX sees chiplets
    dimensions=3,
    cubes=144,
    sources=(AUTOSCALER, TPU_INFO),
)

KNOWN: Mapping[str, Accelerator] = {
    "cpu": Accelerator("cpu", 1),  # per_host counts virtual devices
    "l4": Accelerator("cuda", 1, (22.5,), {"NVIDIA L4": 121e12}, capability="8.9", sources=_NVIDIA),
    "a100": Accelerator(
        "cuda",
        8,
        (40.0, 80.0),
        {
            "NVIDIA A100-SXM4-40GB": 312e12,
            "NVIDIA A100-SXM4-80GB": 312e12,
            "NVIDIA A100-PCIE-40GB": 312e12,
            "NVIDIA A100 80GB PCIe": 312e12,
        },
        capability="8.0",
        sources=_NVIDIA,
    ),
    "h100": Accelerator(
        "cuda",
        8,
        (79.6, 93.6),
        {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12},
        capability="9.0",
        sources=_NVIDIA,
    ),
    "h200": Accelerator("cuda", 8, (140.4,), {"NVIDIA H200": 989.4e12}, capability="9.0", sources=_NVIDIA),
    "b200": Accelerator("cuda", 8, (178.3,), {"NVIDIA B200": 2250e12}, capability="10.0", sources=_NVIDIA),
    "b300": Accelerator("cuda", 8, (268.6,), capability="10.3", sources=_NVIDIA),
    "gb200": Accelerator("cuda", 4, (184.0,), {"NVIDIA GB200": 2500e12}, capability="10.0", sources=_NVIDIA),
    "mi300x": Accelerator("rocm", 8, (192.0,), sources=(AMD_DRIVER,)),
    "mi325x": Accelerator("rocm", 8, (256.0,), sources=(AMD_DRIVER,)),
    "v4": Accelerator("tpu", CHIPS_PER_VM, (32.0,), {"TPU v4": 275e12}, dimensions=3, cubes=64, sources=_TPU),
    "v5e": Accelerator(
        "tpu",
        CHIPS_PER_VM,
        (16.0,),
        {"TPU v5 lite": 197e12, "TPU v5e": 197e12},
        dimensions=2,
        whole_host=("2x4",),
        sources=_TPU,
    ),
    "v5p": Accelerator(
        "tpu", CHIPS_PER_VM, (95.0,), {"TPU v5": 459e12, "TPU v5p": 459e12}, dimensions=3, cubes=140, sources=_TPU
    ),
    "v6e": Accelerator(
        "tpu",
        CHIPS_PER_VM,
        (32.0,),
        {"TPU v6 lite": 918e12, "TPU v6e": 918e12},
        dimensions=2,
        whole_host=("2x4",),
        sources=_TPU,
    ),
    "7x": _SEVENTH,
    "tpu7x": _SEVENTH,  # as GKE's label and JAX name it
    "tpu7": _SEVENTH,
}

# By `device_kind`, as `peak_flops`: those of every row, and of a device that no row names.
PEAK_FLOPS: Mapping[str, float] = {
    **{name: peak for one in KNOWN.values() for name, peak in one.peak_flops.items()},
    "NVIDIA GH200 480GB": 989.4e12,
}


def usual_hosts() -> str:
    """Says the default of `per_host` for all but TPUs: "cpu and l4 1, gb200 4, other GPUs 8"."""
    kinds: dict[int, list[str]] = {}
    for name, one in KNOWN.items():
        if one.platform != "tpu":
            kinds.setdefault(one.per_host, []).append(name)
    most = max(kinds, key=lambda number: len(kinds[number]))
    others = [f"{' and '.join(names)} {number}" for number, names in sorted(kinds.items()) if number != most]
    return ", ".join([*others, f"other GPUs {most}"])


def sides_of(topology: str) -> tuple[int, ...] | None:
    """The sides of a topology such as `2x2x4`; None when it is none."""
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", topology):
        return None
    return tuple(int(side) for side in topology.split("x"))


def chips_per_host(kind: str, topology: str) -> tuple[int, ...]:
    """The chips a host of this slice may have, the usual first: 4, or all of them where one machine holds the slice."""
    chips = math.prod(sides_of(topology) or (1,))
    usual = min(chips, CHIPS_PER_VM)
    return (usual, chips) if topology in KNOWN[kind].whole_host else (usual,)
