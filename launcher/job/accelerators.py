"""What is known of accelerators without a cluster: how many devices a host and a slice have, and their memory.

Machine types, prices and quotas are not here. Sources: GKE's TPU documentation ("Plan TPUs in GKE"), and
xpk's table of system characteristics for the largest slices. Memory: Cloud TPU's pages of v4 to TPU7x, HBM per chip;
for GPUs what their driver reports (nvidia-smi, rocm-smi), which is less than the name says. Compute capabilities:
NVIDIA's CUDA programming guide. TPU7 as TPU7x: GKE's cluster autoscaler for hosts and topologies, JAX's tpu_info.py
for cores and memory.
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
class Accelerator:
    """One kind of device, as `accelerator.type` names it."""

    platform: Platform
    per_host: int  # the default: a whole machine
    memory_gib: tuple[float, ...] = ()  # of one JAX device, the smallest make first; cpu: its host's
    devices_per_chip: int = 1  # JAX devices
    dimensions: int = 0  # of a TPU topology
    cubes: int = 0  # in the largest 3D slice
    whole_host: tuple[str, ...] = ()  # topologies that also exist as one machine
    capability: str | None = None  # NVIDIA's compute capability of a GPU

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
    devices_per_chip=2,
    dimensions=3,
    cubes=144,  # JAX sees chiplets
)

KNOWN: Mapping[str, Accelerator] = {
    "cpu": Accelerator("cpu", 1),  # per_host counts virtual devices
    "l4": Accelerator("cuda", 1, (22.5,), capability="8.9"),
    "a100": Accelerator("cuda", 8, (40.0, 80.0), capability="8.0"),
    "h100": Accelerator("cuda", 8, (79.6, 93.6), capability="9.0"),
    "h200": Accelerator("cuda", 8, (140.4,), capability="9.0"),
    "b200": Accelerator("cuda", 8, (178.3,), capability="10.0"),
    "b300": Accelerator("cuda", 8, (268.6,), capability="10.3"),
    "gb200": Accelerator("cuda", 4, (184.0,), capability="10.0"),
    "mi300x": Accelerator("rocm", 8, (192.0,)),
    "mi325x": Accelerator("rocm", 8, (256.0,)),
    "v4": Accelerator("tpu", CHIPS_PER_VM, (32.0,), dimensions=3, cubes=64),
    "v5e": Accelerator("tpu", CHIPS_PER_VM, (16.0,), dimensions=2, whole_host=("2x4",)),
    "v5p": Accelerator("tpu", CHIPS_PER_VM, (95.0,), dimensions=3, cubes=140),
    "v6e": Accelerator("tpu", CHIPS_PER_VM, (32.0,), dimensions=2, whole_host=("2x4",)),
    "7x": _SEVENTH,
    "tpu7x": _SEVENTH,  # as GKE's label and JAX name it
    "tpu7": _SEVENTH,
}


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
