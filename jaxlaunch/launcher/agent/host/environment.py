"""Environment variables of child processes, as pure functions."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxlaunch import contract, isolated, regular_files
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.io.link import bracket_ipv6

MEMORY_SHARE, NEW_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
# Variables for the built-in trainer, by platform. O1 turns on the latency-hiding scheduler, which
# overlaps collectives with compute, without a list of flags; it and the memory fraction are from
# docs/GPU_performance.md of NVIDIA/JAX-Toolbox. XLA for TPU has its scheduler on by default. On
# CPU, XLA allocates its temporary memory with malloc at every step. glibc would return that memory
# to the kernel after each step, which would map and zero it again, so it is told to keep it. Only
# the first arena can grow that large (HEAP_MAX_SIZE in malloc/arena.c).
TRAINER_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    },
    "cuda": {"JAX_OPTIMIZATION_LEVEL": "O1", MEMORY_SHARE: "0.9"},
}

# The wait for storage at a start must be shorter than the grace period of a stop, which waits for
# it.
STORAGE_WAIT_S = 30.0
# The kubelet writes the domains of the namespace and of the cluster into it.
RESOLVER_FILE, MAX_RESOLVER_BYTES = "/etc/resolv.conf", 16 * 1024
# These paths are searched where the variable is not set.
_DEFAULT_PATHS = {"PATH": os.defpath}


def rank_variables(
    config: Config, base: Mapping[str, str], rank: int, site_folder: str
) -> dict[str, str]:
    """Return the variables of a rank that are equal in all attempts.

    Args:
        config: Configuration of the agent.
        base: Variables of the job. They override the defaults for JAX's devices.
        rank: Rank of the process.
        site_folder: Folder of the site hook.
    """
    job, local = config.job, rank % config.job.processes_per_host
    first = local * job.devices_per_process
    environ = {}
    if job.platform == "cpu":
        environ = {"JAX_PLATFORMS": "cpu", contract.NUM_CPU_DEVICES: str(job.devices_per_process)}
    elif job.platform in ("cuda", "rocm") and job.processes_per_host > 1:
        devices = range(first, first + job.devices_per_process)
        environ = {contract.LOCAL_DEVICE_IDS: ",".join(map(str, devices))}
    if contract.TRAIN_SPEC in base:
        for name, value in TRAINER_VARIABLES.get(job.platform, {}).items():
            # JAX rejects both names of the memory fraction at once.
            if name not in base and not (name == MEMORY_SHARE and NEW_MEMORY_SHARE in base):
                environ[name] = value
    proxy_exceptions = contract.bypass_proxies(
        base, contract.gang_hosts(base, _search_domain(base))
    )
    paths = {}
    for name, folder in job.search_paths.items():
        search_path = base.get(name) or _DEFAULT_PATHS.get(name)
        paths[name] = folder if not search_path else os.pathsep.join((folder, search_path))
    # For the built-in trainer, the job's code and PYTHONPATH come after everything else.
    folders = base.get(contract.CODE_ROOT), base.get("PYTHONPATH")
    user_path = os.pathsep.join(filter(None, folders))
    python_path = isolated.make_environ({}, site_folder, user_path)
    if job.command is not None:
        python_path = {"PYTHONPATH": os.pathsep.join(filter(None, (site_folder, user_path)))}
    timeouts = job.phase_timeouts_s
    timeout, waits = timeouts["rendezvous"], [timeouts[phase] for phase in ("init", "restore")]
    return {
        **environ,
        **base,
        **paths,
        **python_path,
        **_mutual_tls_variables(config),
        **proxy_exceptions,
        **member_variables(config, rank, config.processes),
        contract.INIT_TIMEOUT: str(int(timeout or 24 * 3600)),
        contract.STORAGE_WAIT: f"{min(STORAGE_WAIT_S, *(wait / 2 for wait in waits if wait)):g}",
    }


def _search_domain(base: Mapping[str, str]) -> str:
    """Return the domain of the pod's namespace, in which short names of pods are complete."""
    if not base.get(contract.NODE):
        return ""
    try:
        text = regular_files.read_bounded(RESOLVER_FILE, MAX_RESOLVER_BYTES).decode(
            errors="replace"
        )
    except OSError:
        return ""
    words = (line.split() for line in text.splitlines())
    return next((word[1] for word in words if word[:1] == ["search"] and len(word) > 1), "")


def _mutual_tls_variables(config: Config) -> dict[str, str]:
    """Return the variables for mutual TLS of JAX's coordination service, from JAX 0.11.2 on."""
    folder = config.certificates
    if folder is None:
        return {}
    return {
        "JAX_MTLS_CERT_FILE": str(folder / contract.CERTIFICATE),
        "JAX_MTLS_KEY_FILE": str(folder / contract.CERTIFICATE_KEY),
        "JAX_MTLS_CA_FILE": str(folder / contract.AUTHORITY),
        # Without a URI, JAX would compare the names in the certificate with the address, which is
        # an IP address.
        "JAX_MTLS_PEER_URI_PREFIX": contract.PEER_URI,
    }


def member_variables(config: Config, rank: int, processes: int) -> dict[str, str]:
    """Return the variables of a rank that a restart may change."""
    variables = {contract.NUM_PROCESSES: str(processes), contract.PROCESS_ID: str(rank)}
    if len(config.gang_sizes) == 1:
        return variables
    return variables | {contract.FULL_PROCESSES: str(config.processes)}


def attempt_variables(
    attempt: int, coordinator: str, bind_address: str | None, saved_step: int | None = None
) -> dict[str, str]:
    """Return the variables that change with every attempt.

    Each attempt has a new coordinator port, so that processes of the previous attempt cannot join.

    Args:
        attempt: Number of the attempt.
        coordinator: Address of JAX's coordinator, as host:port.
        bind_address: Address at which the coordinator listens, if it runs on this host. JAX would
            listen on every interface.
        saved_step: Newest step that earlier attempts saved; 0 if they trained and saved none, None
            if none trained.
    """
    variables = {contract.ATTEMPT: str(attempt), contract.COORDINATOR: coordinator}
    if bind_address is not None:
        variables[contract.COORDINATOR_BIND] = (
            f"{bracket_ipv6(bind_address)}:{coordinator.rpartition(':')[2]}"
        )
    if saved_step is not None:
        variables[contract.SAVED] = str(saved_step)
    return variables
