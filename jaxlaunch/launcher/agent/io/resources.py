"""Resources of this container and their limits: memory, open files, pinned memory, device files and disk.

Host 0 raises its limit on open files, because it has a connection to every host and an image's default may be 1,024.
Before a program starts, `find_fault` looks for reasons why it would fail: device files that its user cannot open, and
too little pinned memory for a fast network. The kubelet evicts a pod that exceeds a disk limit. Such a pod receives
SIGTERM like any other, but it has only a second, and none of its conditions gives the cause, so `find_excess` measures
the disk usage.
"""

from __future__ import annotations

import os
import posixpath
import re
import resource
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxlaunch.contract import AgentJob
from jaxlaunch.records.verdict import DiskExcess

# Counters of the OOM killer in cgroup v2 and v1; a container sees its own. The kernel counts before it sends SIGKILL.
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class Controller(NamedTuple):
    """Files of one version of the kernel's memory controller.

    Attributes:
        mount: Folder where the controller is mounted.
        cgroup_pattern: Pattern of the line of /proc/self/cgroup with the path below the mount.
        usage: File with the bytes in use.
        limit: File with the limit.
        cache_key: Key in memory.stat of cached file pages, which the kernel frees before it kills.
    """

    mount: str
    line: str
    usage: str
    limit: str
    cache: str


CONTROLLERS = (
    Controller("/sys/fs/cgroup", r"^0::(.*)$", "memory.current", "memory.max", "inactive_file"),
    Controller(
        "/sys/fs/cgroup/memory",
        r"^\d+:memory:(.*)$",
        "memory.usage_in_bytes",
        "memory.limit_in_bytes",
        "total_inactive_file",
    ),
)


def read_memory(root: Path = Path("/")) -> dict[str, float | None]:
    """Return the bytes `in_use`, counted like the kubelet's working set, and their `limit`.

    Without a limit, both are those of the machine. Both are None if the kernel does not report them.
    """
    machine = _machine(root)
    container = next(filter(None, (_container(root, controller) for controller in CONTROLLERS)), None)
    if container is None or (machine["limit"] is not None and container["limit"] >= machine["limit"]):
        return machine
    return dict(container)


def oom_kills() -> int:
    """Return how many processes of this container the OOM killer has ended, 0 if the kernel keeps no count."""
    for path in OOM_COUNTERS:
        if found := _OOM_KILLS.search(_text(Path(path))):
            return int(found[1])
    return 0


def _container(root: Path, of: Controller) -> Mapping[str, float] | None:
    """Return the memory of the container, or None if this controller does not count it or sets no limit."""
    own = re.search(of.line, _text(root / "proc/self/cgroup"), re.MULTILINE)
    mount = root / of.mount.lstrip("/")
    # A container may see its own cgroup as the mount.
    for folder in (mount / own[1].lstrip("/") if own else mount, mount):
        usage, limit = _text(folder / of.usage).strip(), _text(folder / of.limit).strip()
        if usage.isdecimal() and limit.isdecimal():
            cache = re.search(rf"^{of.cache} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            return {"in_use": max(0.0, float(usage) - float(cache[1] if cache else 0)), "limit": float(limit)}
    return None


def _machine(root: Path) -> dict[str, float | None]:
    kib = {name: float(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", _text(root / "proc/meminfo"), re.M)}
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return {"in_use": None, "limit": None}
    return {"in_use": 1024 * (kib["MemTotal"] - kib["MemAvailable"]), "limit": 1024 * kib["MemTotal"]}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Number of the capability in linux/capability.h that removes the limit on pinned memory.
IPC_LOCK = 14
# Descriptors in addition to the connections: pipes of processes, logs, scrapes, connections without a hello.
SPARE = 256


def allow_connections(count: int) -> int | None:
    """Raise the limit on open files for `count` connections, and return the new limit if it is too low.

    A process can raise its limit up to the one that its container was started with. `restore_limits` undoes this in a
    child.
    """
    wanted = count + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    _before.append((soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return None if most == wanted else most


def allow_pinning() -> int | None:
    """Raise the limit on pinned memory of this process and its children as far as possible.

    Returns:
        The limit in bytes, or None if there is none.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return None if hard == resource.RLIM_INFINITY or _has_capability(IPC_LOCK) else hard


def _has_capability(number: int) -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        # The system is not Linux.
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)


def restore_limits() -> None:
    """Restore the limit on open files in a child: programs that call select(2) cannot use descriptors from 1,024."""
    if _before:
        resource.setrlimit(resource.RLIMIT_NOFILE, _before[0])


_before: list[tuple[int, int]] = []


DEV = Path("/dev")
# A limit on pinned memory up to this was not chosen for a fast network. The default of Linux is 64 KiB, and 8 MiB since
# 5.16. The highest that a distribution sets for all containers is 64 MiB (gardenlinux, pull request 170).
SMALL = 64 * 1024 * 1024


def find_fault(job: AgentJob, *, is_pod: bool, dev: Path = DEV) -> str | None:
    """Return why programs of the job could not use their devices or network on this host, with the fix.

    This opens no files, because a VFIO group can be open only once at a time. It raises the limit on pinned memory.
    """
    if job.platform == "tpu":
        # libtpu pins the memory that its chips read.
        allow_pinning()
        for path in _tpu_files(dev):
            if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else os.W_OK)):
                return _closed(path, job.accelerator, is_pod)
    if job.pinning is not None:
        most = allow_pinning()
        if most is not None and most <= SMALL:
            return _small(job, most)
    return None


def _tpu_files(dev: Path) -> Iterator[Path]:
    """Yield the files that libtpu opens: those of VFIO, the folder first, and those of Google's own driver."""
    vfio = dev / "vfio"
    if vfio.is_dir():
        yield vfio
        yield from sorted(path for path in vfio.iterdir() if re.fullmatch(r"vfio|\d+", path.name))
    yield from sorted(path for path in dev.glob("accel*") if re.fullmatch(r"accel\d+", path.name))


def _closed(path: Path, accelerator: str, is_pod: bool) -> str:
    """Explain a closed device file, because JAX reports only that it found no TPU or that the chip is in use."""
    found, uid = path.stat(), os.geteuid()
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    what = f"cannot open {path} as uid {uid}: its owner is uid {found.st_uid}, its mode {mode}"
    if not is_pod:
        return f"{what}; run as that user, or give uid {uid} the file"
    return (
        f"{what}; set users: {{{accelerator}: root}} in the cluster defaults, or "
        "device_ownership_from_security_context = true in the configuration of the nodes' containerd"
    )


def _small(job: AgentJob, most: int) -> str:
    return (
        f"network = {job.pinning} needs memory that programs pin, and this pod may pin {_amount(most)} (ulimit -l); "
        f"set LimitMEMLOCK=infinity in the unit of the nodes' containerd, or users: {{{job.accelerator}: root}} in "
        "the cluster defaults"
    )


def _amount(size: int) -> str:
    return f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size / 1024:g} KiB"


# An evicted pod has about one second.
MEASURE_S = 0.4


def find_excess(job: AgentJob, host: int) -> DiskExcess | None:
    """Return the disk limit that this host exceeds, or None if its folders exceed none.

    The log of the pod is not measured, and of a folder with very many files only a part.
    """
    end, total = time.monotonic() + MEASURE_S, 0
    scratch = {posixpath.normpath(folder): limit for folder, limit in job.scratch.items()}
    for folder, limit in scratch.items():
        if limit is None and job.ephemeral_bytes is None:
            continue
        used = _used(folder, scratch, end)
        total += used
        if limit is not None and used > limit:
            return DiskExcess(host, used, limit, folder)
    limit = job.ephemeral_bytes
    if limit is None or total <= limit:
        return None
    return DiskExcess(host, total, limit)


def _used(folder: str, scratch: Collection[str], end: float) -> int:
    """Return the bytes of a folder on its own disk, without the scratch folders that are mounted in it.

    Counting stops at the deadline, in monotonic seconds.
    """
    total, left = 0, [folder]
    # Inodes with several names.
    linked: set[int] = set()
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return 0
    while left and time.monotonic() < end:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if time.monotonic() >= end:
                        return total
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != device or entry.path in scratch:
                        # Another volume is mounted there.
                        continue
                    is_dir = entry.is_dir(follow_symlinks=False)
                    if status.st_nlink > 1 and not is_dir:
                        if status.st_ino in linked:
                            continue
                        linked.add(status.st_ino)
                    total += 512 * status.st_blocks
                    if is_dir:
                        left.append(entry.path)
        except OSError:
            # The folder was removed meanwhile, or is not readable.
            continue
    return total
