"""What a child finds in its environment. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.agent.config import Config
from launcher.agent.progress import budgets
from trainer import contract

MEMORY_SHARE, NEW_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
# What a train block gets by platform. O1 turns on what overlaps collectives with compute, the latency-hiding scheduler
# above all, and needs no list of flags (NVIDIA/JAX-Toolbox, docs/GPU_performance.md, as is the share of the memory).
# XLA for TPU has its scheduler on. On CPU it takes its temporary memory from malloc at every step; glibc, which would
# give that back to the kernel after each and have it mapped and zeroed again, is told to keep it. Only its first arena
# can grow that far (HEAP_MAX_SIZE in its malloc/arena.c).
TRAINER: Mapping[str, Mapping[str, str]] = {
    "cpu": {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
    "cuda": {"JAX_OPTIMIZATION_LEVEL": "O1", MEMORY_SHARE: "0.9"},
}


def of_rank(config: Config, base: Mapping[str, str], rank: int, site: str) -> dict[str, str]:
    """The environment of `rank` that no attempt changes. What the job's own environment says of JAX's devices wins."""
    job, local = config.job, rank % config.job.processes_per_host
    first = local * job.devices_per_process
    environ = {}
    if job.platform == "cpu":
        environ = {"JAX_PLATFORMS": "cpu", contract.NUM_CPU_DEVICES: str(job.devices_per_process)}
    elif job.platform == "cuda" and job.processes_per_host > 1:
        environ = {contract.LOCAL_DEVICE_IDS: ",".join(map(str, range(first, first + job.devices_per_process)))}
    if contract.TRAIN_SPEC in base:
        environ |= {name: value for name, value in TRAINER.get(job.platform, {}).items() if not _says(base, name)}
    timeout = budgets(job.budgets_s)["rendezvous"]
    return {
        **environ,
        **base,
        "PYTHONPATH": os.pathsep.join(filter(None, (site, config.code and config.code[1], base.get("PYTHONPATH")))),
        contract.NUM_PROCESSES: str(config.processes),
        contract.PROCESS_ID: str(rank),
        contract.TIMEOUT: str(int(timeout or 24 * 3600)),
    }


def _says(base: Mapping[str, str], name: str) -> bool:
    """Whether the job sets it itself; JAX refuses to be told both names of the share."""
    return name in base or (name == MEMORY_SHARE and NEW_MEMORY_SHARE in base)


def of_attempt(attempt: int, coordinator: str) -> dict[str, str]:
    """What is new with every attempt: a fresh port keeps the dead of the last one out."""
    return {contract.ATTEMPT: str(attempt), contract.COORDINATOR: coordinator}
