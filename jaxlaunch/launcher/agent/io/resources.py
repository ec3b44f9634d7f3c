"""The memory of this container: what it uses, its limit, and how often the OOM killer ended a process in it.

Limits of this process: on open files, since host 0 has a connection to every host and an image's default may be
1,024; and on the memory that programs pin for a network's adapters.

What a program would fail of on this host, before it starts: device files that its user cannot open, and pinned
memory for a fast network.

What this pod keeps on its node's disk, against the limits that the job gives: the kubelet evicts a pod beyond one.

Such a pod is told as any other is, by SIGTERM, but it has a second, and no condition of it says whose fault it was.
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
    """The files of one version of the kernel's memory controller."""

    mount: str
    line: str  # of /proc/self/cgroup: a pattern for the path below the mount
    usage: str
    limit: str
    cache: str  # key of memory.stat: cached file pages, which the kernel frees before it kills


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
    """Bytes `in_use`, counted like the kubelet's working set, and their `limit`; the machine's where no limit is set.

    Both are None where the kernel does not report them.
    """
    machine = _machine(root)
    container = next((found for found in (_container(root, each) for each in CONTROLLERS) if found), None)
    if container is None or (machine["limit"] is not None and container["limit"] >= machine["limit"]):
        return machine
    return dict(container)


def oom_kills() -> int:
    """How many processes of this container the OOM killer has ended; 0 where the kernel keeps no count."""
    for path in OOM_COUNTERS:
        if found := _OOM_KILLS.search(_text(Path(path))):
            return int(found[1])
    return 0


def _container(root: Path, of: Controller) -> Mapping[str, float] | None:
    """None where this version of the controller does not count this process, or sets no limit."""
    own = re.search(of.line, _text(root / "proc/self/cgroup"), re.MULTILINE)
    mount = root / of.mount.lstrip("/")
    for folder in (mount / own[1].lstrip("/") if own else mount, mount):  # a container may see its own as the mount
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


IPC_LOCK = 14  # linux/capability.h: without a limit on pinned memory
SPARE = 256  # descriptors beside the connections: the processes' pipes, logs, scrapes, connections not greeted yet


def allow_connections(count: int) -> int | None:
    """Raises this process's limit until it allows `count` connections; the limit, where that is not enough, else None.

    A process can raise its limit up to the one that its container was started with. `forget` undoes it for a child.
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
    """Raises the limit on memory that this process and its children pin, as far as it can; that in bytes, None: any."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return None if hard == resource.RLIM_INFINITY or _has_capability(IPC_LOCK) else hard


def _has_capability(number: int) -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # no Linux
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)


def restore_limits() -> None:
    """Restores the limit, in a child: a program that calls select(2) cannot use descriptors from 1,024 on."""
    if _before:
        resource.setrlimit(resource.RLIMIT_NOFILE, _before[0])


_before: list[tuple[int, int]] = []


DEV = Path("/dev")
# Limits on pinned memory that nobody chose for a fast network: Linux' own is 64 KiB, since 5.16 8 MiB, and 64 MiB is
# the most that a distribution sets for all containers (gardenlinux, pull request 170).
SMALL = 64 * 1024 * 1024


def find_fault(job: AgentJob, *, is_pod: bool, dev: Path = DEV) -> str | None:
    """What keeps the job's programs from their devices or their network on this host, with the fix; None: nothing.

    Files are not opened: a VFIO group is open once at a time. Raises this process's limit on pinned memory.
    """
    if job.platform == "tpu":
        allow_pinning()  # libtpu pins what its chips read
        for path in _tpu_files(dev):
            if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else os.W_OK)):
                return _closed(path, job.accelerator, is_pod)
    if job.pinning is not None:
        most = allow_pinning()
        if most is not None and most <= SMALL:
            return _small(job, most)
    return None


def _tpu_files(dev: Path) -> Iterator[Path]:
    """The files by which libtpu reaches chips: of VFIO, the folder first, or of Google's own driver."""
    vfio = dev / "vfio"
    if vfio.is_dir():
        yield vfio
        yield from sorted(path for path in vfio.iterdir() if re.fullmatch(r"vfio|\d+", path.name))
    yield from sorted(path for path in dev.glob("accel*") if re.fullmatch(r"accel\d+", path.name))


def _closed(path: Path, accelerator: str, is_pod: bool) -> str:
    """JAX itself says only that it found no TPU, or that the chip is in use."""
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


MEASURE_S = 0.4  # of the second that an evicted pod has


def find_excess(job: AgentJob, host: int) -> DiskExcess | None:
    """Return the limit that this host exceeds; None where it exceeds none that can be seen.

    Seen are its folders, not its log, and of a folder with very many files only a part.
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
    """Bytes that a folder takes on its own disk, as far as they are counted by `end`, in monotonic seconds; without
    the folders of `scratch` that are mounted in it."""
    total, left = 0, [folder]
    linked: set[int] = set()  # inodes that have several names
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
                        continue  # another volume is mounted there
                    is_dir = entry.is_dir(follow_symlinks=False)
                    if status.st_nlink > 1 and not is_dir:
                        if status.st_ino in linked:
                            continue
                        linked.add(status.st_ino)
                    total += 512 * status.st_blocks
                    if is_dir:
                        left.append(entry.path)
        except OSError:
            continue  # removed meanwhile, or not ours to read
    return total
