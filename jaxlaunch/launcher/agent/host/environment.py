"""The environment variables of a child process. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxlaunch import contract, isolated
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import phase_timeouts
from jaxlaunch.launcher.agent.io.link import bracketed

MEMORY_SHARE, NEW_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
# Variables for the built-in trainer, by platform. O1 turns on the latency-hiding scheduler, which overlaps collectives
# with compute, without a list of flags (NVIDIA/JAX-Toolbox, docs/GPU_performance.md, as is the memory fraction). XLA
# for TPU has its scheduler on. On CPU it takes its temporary memory from malloc at every step; glibc would return that
# to the kernel after each step, to be mapped and zeroed again; it is set to keep it. Only its first arena can grow so
# far (HEAP_MAX_SIZE in its malloc/arena.c).
TRAINER: Mapping[str, Mapping[str, str]] = {
    "cpu": {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
    "cuda": {"JAX_OPTIMIZATION_LEVEL": "O1", MEMORY_SHARE: "0.9"},
}

STORAGE_WAIT_S = 30.0  # at a start: less than the grace of a stop, which waits for it
_EMPTY = {"PATH": os.defpath}  # what is searched where the variable is not set


def of_rank(config: Config, base: Mapping[str, str], rank: int, site: str) -> dict[str, str]:
    """The variables of `rank` that are equal in all attempts. What `base`, the job's own, sets for JAX's devices wins.

    `site` is the folder of the site hook.
    """
    job, local = config.job, rank % config.job.processes_per_host
    first = local * job.devices_per_process
    environ = {}
    if job.platform == "cpu":
        environ = {"JAX_PLATFORMS": "cpu", contract.NUM_CPU_DEVICES: str(job.devices_per_process)}
    elif job.platform in ("cuda", "rocm") and job.processes_per_host > 1:
        environ = {contract.LOCAL_DEVICE_IDS: ",".join(map(str, range(first, first + job.devices_per_process)))}
    if contract.TRAIN_SPEC in base:
        environ |= {name: value for name, value in TRAINER.get(job.platform, {}).items() if not _is_set(base, name)}
    paths = {name: _before(folder, base.get(name) or _EMPTY.get(name)) for name, folder in job.search_paths.items()}
    timeouts = phase_timeouts(job.timeouts_s)
    timeout, waits = timeouts["rendezvous"], [timeouts[phase] for phase in ("init", "restore")]
    return {
        **environ,
        **base,
        **paths,
        **_python_path(config, base, site),
        **_mutual_tls(config),
        **of_member(config, rank, config.processes),
        contract.TIMEOUT: str(int(timeout or 24 * 3600)),
        contract.STORAGE_WAIT: f"{min(STORAGE_WAIT_S, *(each / 2 for each in waits if each)):g}",
    }


def _mutual_tls(config: Config) -> dict[str, str]:
    """JAX's coordinator and its clients show the gang's certificate (from JAX 0.11.2 on; an older one reads none)."""
    folder = config.certificates
    if folder is None:
        return {}
    return {
        "JAX_MTLS_CERT_FILE": str(folder / contract.CERTIFICATE),
        "JAX_MTLS_KEY_FILE": str(folder / contract.CERTIFICATE_KEY),
        "JAX_MTLS_CA_FILE": str(folder / contract.AUTHORITY),
        "JAX_MTLS_PEER_URI_PREFIX": contract.PEER_URI,  # the address in place of it is an IP, which no name is
    }


def _python_path(config: Config, base: Mapping[str, str], site: str) -> dict[str, str]:
    """The site hook first, then the job's code and its own PYTHONPATH: for our trainer behind everything else."""
    own = os.pathsep.join(filter(None, (config.code and config.code[1], base.get("PYTHONPATH"))))
    if config.job.command is None:
        return isolated.environ({}, site, own)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (site, own)))}


def _before(folder: str, path: str | None) -> str:
    """A search path with this folder first; the image's own stays behind it."""
    return folder if not path else os.pathsep.join((folder, path))


def _is_set(base: Mapping[str, str], name: str) -> bool:
    """Whether the job sets it itself; JAX refuses both names of the memory fraction at once."""
    return name in base or (name == MEMORY_SHARE and NEW_MEMORY_SHARE in base)


def of_member(config: Config, rank: int, processes: int) -> dict[str, str]:
    """The variables of a rank that a restart may change: another host may take it, and the gang may shrink."""
    found = {contract.NUM_PROCESSES: str(processes), contract.PROCESS_ID: str(rank)}
    return found if len(config.sizes) == 1 else found | {contract.FULL: str(config.processes)}


def of_attempt(attempt: int, coordinator: str, listens: str | None, saved: int | None = None) -> dict[str, str]:
    """The variables that change with every attempt: a new port keeps processes of the last one out.

    `saved` is the newest step that earlier attempts saved, 0 where they only trained; None: none of them did.
    `listens` is the address of this host at which JAX's coordinator listens, where it is on this host: JAX would listen
    on every interface.
    """
    found = {contract.ATTEMPT: str(attempt), contract.COORDINATOR: coordinator}
    if listens is not None:
        found[contract.BIND] = f"{bracketed(listens)}:{coordinator.rpartition(':')[2]}"
    if saved is not None:
        found[contract.SAVED] = str(saved)
    return found
