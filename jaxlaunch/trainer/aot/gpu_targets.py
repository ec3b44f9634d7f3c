"""GPUs as XLA's compiler is told of them where there is none: stream_executor's GpuTargetConfigProto, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Target:
    """What differs between GPUs that can be compiled for."""

    name: str  # as the driver says it
    capability: tuple[int, int]
    processors: int  # streaming multiprocessors
    clock_ghz: float
    memory: int  # bytes
    bandwidth: float  # bytes a second
    l2: int  # bytes
    shared: int  # bytes of a processor; a block may use 1 KiB less


# Sources, read 2026-11: NVIDIA's data sheets, the tables of the CUDA programming guide, and for the form of the text
# github.com/jax-ml/jax issue 28376 and XLA's tools/hlo_opt/gpu_specs.
KNOWN: Mapping[str, Target] = {
    "a100": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 85_094_825_984, 2.039e12, 41_943_040, 167_936),
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 84_929_347_584, 3.352e12, 52_428_800, 233_472),
    "h200": Target("NVIDIA H200", (9, 0), 132, 1.98, 150_754_820_096, 4.8e12, 52_428_800, 233_472),
    "b200": Target("NVIDIA B200", (10, 0), 148, 1.965, 191_503_138_816, 8.0e12, 132_644_864, 233_472),
}


def text(kind: str) -> str:
    """The text of a GPU in KNOWN."""
    of = KNOWN[kind]
    major, minor = of.capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {of.shared}
  threads_per_core_limit: 2048
  core_count: {of.processors}
  fpus_per_core: {64 if of.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {of.bandwidth:.0f}
  l2_cache_size: {of.l2}
  clock_rate_ghz: {of.clock_ghz}
  device_memory_size: {of.memory}
  shared_memory_per_block_optin: {of.shared - 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{of.name}"
"""
