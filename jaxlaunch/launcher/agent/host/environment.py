"""Environment variables of child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxlaunch import contract, isolated, regular_files
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.io.link import bracket_ipv6

MEMORY_SHARE, NEW_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
# Variables for the built-in trainer, by platform.
#
# cuda: O1 turns on the latency-hiding scheduler, which overlaps collectives with compute. This
# value and the memory fraction are from docs/GPU_performance.md of NVIDIA/JAX-Toolbox. XLA for TPU
# turns its scheduler on by default.
#
# cpu: XLA allocates its temporary memory with malloc at every step. By default, glibc returns that
# memory to the kernel after each step, and the kernel must map and zero it again. These variables
# make glibc keep it. Only the first arena can grow that large (HEAP_MAX_SIZE in malloc/arena.c).
TRAINER_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    },
    "cuda": {"JAX_OPTIMIZATION_LEVEL": "O1", MEMORY_SHARE: "0.9"},
}

# The wait for storage at a start delays a stop, so it must be shorter than the grace period.
STORAGE_WAIT_S = 30.0
# The kubelet writes the DNS domains of the namespace and of the cluster into this file.
RESOLVER_FILE, MAX_RESOLVER_BYTES = "/etc/resolv.conf", 16 * 1024
# Search paths that the system uses if a variable is not set.
_DEFAULT_PATHS = {"PATH": os.defpath}


def rank_variables(
    config: Config, base: Mapping[str, str], rank: int, site_folder: str
) -> dict[str, str]:
    """Return all variables of a rank that do not change between attempts.

    Args:
        config: Configuration of the agent.
        base: Variables of the agent, among them those of the job. They override the defaults for
            JAX's devices.
        rank: Rank of the process.
        site_folder: Folder of the site hook.
    """
    job, local_rank = config.job, rank % config.job.processes_per_host
    first_device = local_rank * job.devices_per_process
    environ = {}
    if job.platform == "cpu":
        environ = {"JAX_PLATFORMS": "cpu", contract.NUM_CPU_DEVICES: str(job.devices_per_process)}
    elif job.platform in ("cuda", "rocm") and job.processes_per_host > 1:
        devices = range(first_device, first_device + job.devices_per_process)
        environ = {contract.LOCAL_DEVICE_IDS: ",".join(map(str, devices))}
    if contract.TRAIN_SPEC in base:
        for name, value in TRAINER_VARIABLES.get(job.platform, {}).items():
            # JAX refuses to start if both names of the memory fraction are set.
            if name not in base and not (name == MEMORY_SHARE and NEW_MEMORY_SHARE in base):
                environ[name] = value
    proxy_exceptions = contract.bypass_proxies(
        base, contract.gang_hosts(base, _search_domain(base))
    )
    paths = {}
    for name, folder in job.search_paths.items():
        search_path = base.get(name) or _DEFAULT_PATHS.get(name)
        paths[name] = folder if not search_path else os.pathsep.join((folder, search_path))
    # For the built-in trainer, the job's code and PYTHONPATH come last on sys.path.
    folders = base.get(contract.CODE_ROOT), base.get("PYTHONPATH")
    user_path = os.pathsep.join(filter(None, folders))
    python_path = isolated.make_environ({}, site_folder, user_path)
    if job.command is not None:
        python_path = {"PYTHONPATH": os.pathsep.join(filter(None, (site_folder, user_path)))}
    timeouts_s = job.phase_timeouts_s
    start_timeouts_s = [timeouts_s[phase] for phase in ("init", "restore")]
    storage_wait_s = min(STORAGE_WAIT_S, *(limit_s / 2 for limit_s in start_timeouts_s if limit_s))
    return {
        **environ,
        **base,
        **paths,
        **python_path,
        **_mutual_tls_variables(config),
        **proxy_exceptions,
        **member_variables(config, rank, config.process_count),
        contract.INIT_TIMEOUT: str(int(timeouts_s["rendezvous"] or 24 * 3600)),
        contract.STORAGE_WAIT: f"{storage_wait_s:g}",
    }


def _search_domain(base: Mapping[str, str]) -> str:
    """Return the DNS domain of the pod's namespace, empty outside of Kubernetes."""
    if not base.get(contract.NODE):
        return ""
    try:
        text = regular_files.read_bounded(RESOLVER_FILE, MAX_RESOLVER_BYTES).decode(
            errors="replace"
        )
    except OSError:
        return ""
    rows = (line.split() for line in text.splitlines())
    return next((row[1] for row in rows if row[:1] == ["search"] and len(row) > 1), "")


def _mutual_tls_variables(config: Config) -> dict[str, str]:
    """Return the variables for mutual TLS of JAX's coordination service, from JAX 0.11.2 on."""
    folder = config.certificates
    if folder is None:
        return {}
    return {
        "JAX_MTLS_CERT_FILE": str(folder / contract.CERTIFICATE),
        "JAX_MTLS_KEY_FILE": str(folder / contract.CERTIFICATE_KEY),
        "JAX_MTLS_CA_FILE": str(folder / contract.AUTHORITY),
        # Without a URI prefix, JAX would compare the host names in the certificate with the
        # coordinator's IP address.
        "JAX_MTLS_PEER_URI_PREFIX": contract.PEER_URI,
    }


def member_variables(config: Config, rank: int, process_count: int) -> dict[str, str]:
    """Return the variables of a rank that change if the next attempt has other hosts."""
    variables = {contract.NUM_PROCESSES: str(process_count), contract.PROCESS_ID: str(rank)}
    if len(config.gang_sizes) == 1:
        return variables
    return variables | {contract.FULL_PROCESSES: str(config.process_count)}


def attempt_variables(
    attempt: int, coordinator: str, bind_address: str | None, saved_step: int | None = None
) -> dict[str, str]:
    """Return the variables that change with every attempt.

    Each attempt has a new coordinator port, so that processes of the previous attempt cannot join.

    Args:
        attempt: Number of the attempt.
        coordinator: Address of JAX's coordinator, as host:port.
        bind_address: Address at which the coordinator listens, if it runs on this host. Without
            it, JAX would listen on every interface.
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
