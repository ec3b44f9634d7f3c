"""Devices that are not present, for which the compilers of TPUs and GPUs can compile."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax
from jax.experimental import topologies

from jaxlaunch import installation
from jaxlaunch.accelerators import ACCELERATORS, parse_topology
from jaxlaunch.trainer.errors import SpecError

# Without these, libtpu queries a cloud's metadata server, writes logs, and cannot be loaded by two
# processes of a machine.
_LIBTPU_ENVIRON = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}
_CUDA_ENVIRON = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# libtpu's names of TPU types that differ from ours. Sources: MaxText's accelerator_to_spec_map.py,
# read 2026-11, and libtpu 0.0.42.1, which refuses other names.
_LIBTPU_TYPES: Mapping[str, str] = {"7x": "tpu7x", "tpu7": "tpu7x"}
# Types whose chips have two cores that form one device.
_MEGACORE = ("v4", "v5p")


@dataclasses.dataclass(frozen=True)
class Chips:
    """The chips of a job, as the launcher passes them to the planner.

    Attributes:
        type: Type of the accelerator, a name in ACCELERATORS.
        hosts: Number of hosts.
        per_host: Chips on each host.
        slices: Number of TPU slices.
        topology: Topology of a TPU slice, such as `4x4`; None for other types.
    """

    type: str
    hosts: int
    per_host: int
    slices: int = 1
    topology: str | None = None

    @classmethod
    def from_json(cls, text: str) -> Chips:
        """Parse the launcher's JSON object."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        """Return text for people: `2 slices of v5e 4x4`, `16 × h100`."""
        if self.topology is None:
            return f"{self.hosts * self.per_host} × {self.type}"
        slices = f"{self.slices} slices of " if self.slices > 1 else ""
        return f"{slices}{self.type} {self.topology}"

    @property
    def compiler_version(self) -> str:
        """Name and version of the package that compiles for these chips."""
        platforms = {"cpu": "jaxlib", "tpu": "libtpu"}
        name = platforms.get(ACCELERATORS[self.type].platform, _cuda_plugin().replace("_", "-"))
        return f"{name} {metadata.version(name)}"

    def make_devices(self) -> list[jax.Device]:
        """Return the devices to compile for. Only those of CPUs exist and can hold arrays.

        Raises SpecError if the compiler is not installed or does not support the chips.
        """
        match ACCELERATORS[self.type].platform:
            case "cpu":
                return jax.devices()
            case "tpu":
                return self._tpu_devices()
            case "cuda":
                return self._gpu_devices()
        raise SpecError(
            f"no compiler for {self.type} works without the device; use a machine that has it"
        )

    def _tpu_devices(self) -> list[jax.Device]:
        if importlib.util.find_spec("libtpu") is None:
            hint = installation.install_hint("train", "plan-tpu")
            raise SpecError(f"the compiler of TPUs, libtpu, is not installed here: {hint}")
        assert self.topology is not None, "the schema requires it of TPUs"
        os.environ.update(_LIBTPU_ENVIRON)
        sides = parse_topology(self.topology) or ()
        bounds = (*sides, 1)[:3]
        # One host may have all chips of a slice.
        is_one_host = self.per_host == math.prod(sides)
        options: dict[str, Any] = {
            "chips_per_host_bounds": bounds if is_one_host else (2, 2, 1),
            "num_slices": self.slices,
            # An axis wraps around if it consists of whole cubes, or of 16 chips in a 2D slice.
            "wrap": tuple(side == 16 if len(sides) == 2 else side % 4 == 0 for side in bounds),
        }
        if self.type in _MEGACORE:
            options["chip_config_name"] = "megacore"
        name = f"{_LIBTPU_TYPES.get(self.type, self.type)}:{self.topology}"
        devices = self._topology_devices("tpu", topology_name=name, **options)
        expected = math.prod(sides) * self.slices * ACCELERATORS[self.type].devices_per_chip
        if len(devices) != expected:
            raise SpecError(f"libtpu makes {len(devices)} devices of {self}, which has {expected}")
        return devices

    def _gpu_devices(self) -> list[jax.Device]:
        if self.type not in GPU_TARGETS:
            raise SpecError(
                f"accelerator.type: {self.type}: XLA's compiler has no description of this GPU "
                f"here, only of {', '.join(GPU_TARGETS)}; after the job file, "
                "accelerator.type=NAME compiles for one of these"
            )
        if not _cuda_plugin():
            hint = installation.install_hint("train", "plan-cuda")
            raise SpecError(f"the compiler of CUDA devices is not installed here: {hint}")
        os.environ.update(_CUDA_ENVIRON)
        # NVLink domains, hosts, and GPUs of a host.
        shape = f"1x{self.hosts}x{self.per_host}"
        target = render_gpu_target(GPU_TARGETS[self.type])
        return self._topology_devices("cuda", target_config=target, topology=shape)

    def _topology_devices(self, platform: str, **options: Any) -> list[jax.Device]:
        try:
            return list(topologies.get_topology_desc(platform=platform, **options).devices)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            raise SpecError(
                f"{self.compiler_version} does not compile for {self} with jax "
                f"{jax.__version__}: {reason}"
            ) from None


def _cuda_plugin() -> str:
    """Return the module name of the installed CUDA plugin, or an empty string."""
    return next((name for name in _CUDA_PLUGINS if importlib.util.find_spec(name) is not None), "")


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """The properties in which GPUs differ in XLA's description of a device.

    Attributes:
        name: The name that the driver reports.
        capability: CUDA's compute capability, (major, minor).
        processors: Number of streaming multiprocessors.
        clock_ghz: Clock rate.
        memory_bytes: Size of the memory.
        bytes_per_s: Bandwidth of the memory.
        l2_bytes: Size of the L2 cache.
        shared_bytes: Shared memory of a multiprocessor, of which a block can use all but 1 KiB.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    clock_ghz: float
    memory_bytes: int
    bytes_per_s: float
    l2_bytes: int
    shared_bytes: int


# Sources, read 2026-11: NVIDIA's data sheets and the tables of the CUDA programming guide; for the
# format of the text, github.com/jax-ml/jax issue 28376 and XLA's tools/hlo_opt/gpu_specs.
GPU_TARGETS: Mapping[str, GpuTarget] = {
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 85_094_825_984, 2.039e12, 41_943_040, 167_936
    ),
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 84_929_347_584, 3.352e12, 52_428_800, 233_472
    ),
    "h200": GpuTarget(
        "NVIDIA H200", (9, 0), 132, 1.98, 150_754_820_096, 4.8e12, 52_428_800, 233_472
    ),
    "b200": GpuTarget(
        "NVIDIA B200", (10, 0), 148, 1.965, 191_503_138_816, 8.0e12, 132_644_864, 233_472
    ),
}


def render_gpu_target(target: GpuTarget) -> str:
    """Return the description of a GPU in XLA's text format."""
    major, minor = target.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_bytes}
  threads_per_core_limit: 2048
  core_count: {target.processors}
  fpus_per_core: {64 if target.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {target.bytes_per_s:.0f}
  l2_cache_size: {target.l2_bytes}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {target.memory_bytes}
  shared_memory_per_block_optin: {target.shared_bytes - 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{target.name}"
"""
