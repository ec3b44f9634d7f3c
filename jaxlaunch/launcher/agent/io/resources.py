"""Limits of this container: memory, open files, pinned memory, device files and disk.

Host 0 raises its limit on open files, because it has a connection to every host and the default of
an image may be 1,024. Before a program starts, `find_fault` looks for reasons why it would fail:
device files that its user cannot open, and too little pinned memory for a fast network. The kubelet
evicts a pod that exceeds a disk limit. Such a pod receives SIGTERM like any other, but has only one
second, and its conditions do not show the cause, so `find_excess` measures the disk usage.
"""

from __future__ import annotations

import os
import posixpath
import re
import resource
import stat
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from jaxlaunch.contract import AgentJob
from jaxlaunch.records.verdict import DiskExcess

# Counters of the OOM killer in cgroup v2 and v1. A container sees only its own cgroup. The kernel
# increments the counter before it sends SIGKILL.
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_oom_kills() -> int:
    """Return the number of processes of this container that the OOM killer has ended."""
    for path in OOM_COUNTERS:
        if match := _OOM_KILLS.search(_read_text(Path(path))):
            return int(match[1])
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Capability that removes the limit on pinned memory, from linux/capability.h.
CAP_IPC_LOCK = 14
# Descriptors in addition to the connections: pipes of processes, logs, scrapes, connections without
# a hello.
SPARE_DESCRIPTORS = 256
# Soft and hard limit on open files before `allow_connections` raised it; empty if it did not.
_original_limits: list[tuple[int, int]] = []


def allow_connections(connection_count: int) -> int | None:
    """Raise the limit on open files, and return the new limit if it is too low.

    A process can raise its soft limit up to the hard limit of its container. `restore_limits`
    undoes this in a child.
    """
    needed_limit = connection_count + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed_limit:
        return None
    new_limit = needed_limit if hard == resource.RLIM_INFINITY else min(needed_limit, hard)
    _original_limits.append((soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
    return None if new_limit == needed_limit else new_limit


def allow_pinning() -> int | None:
    """Raise the limit on pinned memory of this process and its children as far as possible.

    Returns:
        The limit in bytes, or None without a limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return None if hard == resource.RLIM_INFINITY or _has_capability(CAP_IPC_LOCK) else hard


def _has_capability(bit: int) -> bool:
    # The file does not exist on systems other than Linux.
    match = re.search(r"^CapEff:\s*(\w+)", _read_text(Path("/proc/self/status")), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> bit & 1)


def restore_limits() -> None:
    """Restore the limit on open files in a child. With a high limit, select(2) may fail there."""
    if _original_limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, _original_limits[0])


DEV = Path("/dev")
# A limit on pinned memory of at most this size is a default that was not chosen for a fast network.
# The default of Linux is 64 KiB, and 8 MiB since 5.16. The highest default of a distribution for
# all containers is 64 MiB (gardenlinux, pull request 170).
SMALL_PINNING_BYTES = 64 * 1024 * 1024


def find_fault(job: AgentJob, *, is_pod: bool, dev: Path = DEV) -> str | None:
    """Return the reason why programs cannot use their devices or network here, with the fix.

    This opens no device files, because a VFIO group can be open only once at a time. It raises the
    limit on pinned memory.
    """
    if job.platform == "tpu":
        # libtpu pins the memory that its chips read.
        allow_pinning()
        for path in _tpu_files(dev):
            if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else os.W_OK)):
                return _closed_device_message(path, job.accelerator, is_pod)
    if job.pinning is not None:
        limit_bytes = allow_pinning()
        if limit_bytes is not None and limit_bytes <= SMALL_PINNING_BYTES:
            return _small_pinning_message(job, limit_bytes)
    return None


def _tpu_files(dev: Path) -> Iterator[Path]:
    """Yield the files that libtpu opens: those of VFIO and those of Google's driver."""
    vfio = dev / "vfio"
    if vfio.is_dir():
        yield vfio
        yield from sorted(path for path in vfio.iterdir() if re.fullmatch(r"vfio|\d+", path.name))
    yield from sorted(path for path in dev.glob("accel*") if re.fullmatch(r"accel\d+", path.name))


def _closed_device_message(path: Path, accelerator: str, is_pod: bool) -> str:
    """Explain that a device file cannot be opened. JAX would only say that it found no TPU."""
    status, uid = path.stat(), os.geteuid()
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    problem = f"cannot open {path} as uid {uid}: its owner is uid {status.st_uid}, its mode {mode}"
    if not is_pod:
        return f"{problem}; run as that user, or give uid {uid} the file"
    setting = "device_ownership_from_security_context = true"
    return (
        f"{problem}; set users: {{{accelerator}: root}} in the cluster defaults, or {setting} "
        "in the configuration of the nodes' containerd"
    )


def _small_pinning_message(job: AgentJob, limit_bytes: int) -> str:
    limit = f"{limit_bytes / 1024:g} KiB"
    if limit_bytes >= 1024**2:
        limit = f"{limit_bytes // 1024**2} MiB"
    return (
        f"network = {job.pinning} needs memory that programs pin, and this pod may pin {limit} "
        "(ulimit -l); set LimitMEMLOCK=infinity in the unit of the nodes' containerd, or users: "
        f"{{{job.accelerator}: root}} in the cluster defaults"
    )


# The measurement must be short, because an evicted pod has about one second.
MEASURE_TIMEOUT_S = 0.4


def find_excess(job: AgentJob, host: int) -> DiskExcess | None:
    """Return the disk limit that this host exceeds, or None if its folders exceed none.

    The log of the pod is not measured. A folder with very many files is measured only in part.
    """
    deadline, total_bytes = time.monotonic() + MEASURE_TIMEOUT_S, 0
    scratch = {posixpath.normpath(folder): limit for folder, limit in job.scratch.items()}
    for folder, limit_bytes in scratch.items():
        if limit_bytes is None and job.ephemeral_bytes is None:
            continue
        used_bytes = _measure_disk_usage(folder, scratch, deadline)
        total_bytes += used_bytes
        if limit_bytes is not None and used_bytes > limit_bytes:
            return DiskExcess(host, used_bytes, limit_bytes, folder)
    limit_bytes = job.ephemeral_bytes
    if limit_bytes is None or total_bytes <= limit_bytes:
        return None
    return DiskExcess(host, total_bytes, limit_bytes)


def _measure_disk_usage(folder: str, scratch: Collection[str], deadline: float) -> int:
    """Return the bytes of a folder, without other volumes and scratch folders below it.

    The measurement stops at the deadline, in monotonic seconds.
    """
    total_bytes, pending_folders = 0, [folder]
    # Inodes with several hard links that were counted already.
    counted_inodes: set[int] = set()
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return 0
    while pending_folders and time.monotonic() < deadline:
        try:
            with os.scandir(pending_folders.pop()) as entries:
                for entry in entries:
                    if time.monotonic() >= deadline:
                        return total_bytes
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != device or entry.path in scratch:
                        # Another volume is mounted there.
                        continue
                    is_dir = entry.is_dir(follow_symlinks=False)
                    if status.st_nlink > 1 and not is_dir:
                        if status.st_ino in counted_inodes:
                            continue
                        counted_inodes.add(status.st_ino)
                    total_bytes += 512 * status.st_blocks
                    if is_dir:
                        pending_folders.append(entry.path)
        except OSError:
            # The folder has been removed, or is not readable.
            continue
    return total_bytes
