"""Memory and load of this container or machine, and the memory of a process.

With these numbers a process that ran out of memory can be distinguished from one that a person has
killed, because the memory in use came close to its limit. The module needs only the standard
library and Python >= 3.10.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

GIB = 2**30


class MemoryController(NamedTuple):
    """The files of one version of cgroups for the memory of a container.

    Attributes:
        mount: Folder where the controller is mounted.
        cgroup_pattern: Pattern of the line in /proc/self/cgroup with the path below the mount.
        usage: Name of the file with the bytes in use.
        limit: Name of the file with the limit.
        cache_key: Key in memory.stat of cached file pages, which the kernel frees before it kills.
    """

    mount: str
    cgroup_pattern: str
    usage: str
    limit: str
    cache_key: str


CONTROLLERS = (
    MemoryController(
        "/sys/fs/cgroup", r"^0::(.*)$", "memory.current", "memory.max", "inactive_file"
    ),
    MemoryController(
        "/sys/fs/cgroup/memory",
        r"^\d+:memory:(.*)$",
        "memory.usage_in_bytes",
        "memory.limit_in_bytes",
        "total_inactive_file",
    ),
)


def read_memory(root: Path = Path("/")) -> dict[str, float | None]:
    """Return the bytes `in_use`, counted like the kubelet's working set, and their `limit`.

    They are those of the container if it has a limit below the memory of the machine, or else those
    of the machine. Both are None if the kernel does not report them.
    """
    machine = _read_machine_memory(root)
    for controller in CONTROLLERS:
        if (container := _read_container_memory(root, controller)) is not None:
            is_limited = machine["limit"] is None or container["limit"] < machine["limit"]
            return dict(container) if is_limited else machine
    return machine


def _read_container_memory(root: Path, controller: MemoryController) -> Mapping[str, float] | None:
    """Return the memory of the container, or None if it has no limit."""
    cgroups = _read_text(root / "proc/self/cgroup")
    cgroup = re.search(controller.cgroup_pattern, cgroups, re.MULTILINE)
    mount = root / controller.mount.lstrip("/")
    # In a container, the mount may be its own cgroup.
    for folder in (mount / cgroup[1].lstrip("/") if cgroup else mount, mount):
        usage = _read_text(folder / controller.usage).strip()
        limit = _read_text(folder / controller.limit).strip()
        if usage.isdecimal() and limit.isdecimal():
            statistics = _read_text(folder / "memory.stat")
            cache = re.search(rf"^{controller.cache_key} (\d+)$", statistics, re.MULTILINE)
            in_use = max(0.0, float(usage) - float(cache[1] if cache else 0))
            return {"in_use": in_use, "limit": float(limit)}
    return None


def _read_machine_memory(root: Path) -> dict[str, float | None]:
    text = _read_text(root / "proc/meminfo")
    sizes = {key: 1024 * float(kib) for key, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
    if "MemTotal" not in sizes or "MemAvailable" not in sizes:
        return {"in_use": None, "limit": None}
    return {"in_use": sizes["MemTotal"] - sizes["MemAvailable"], "limit": sizes["MemTotal"]}


def read_resident_bytes() -> float | None:
    """Return the resident memory of this process, or None without /proc."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def read_peak_bytes(pid: int, root: Path = Path("/")) -> float | None:
    """Return the most resident memory that a running process has had, or None if it is unknown."""
    match = re.search(r"^VmHWM:\s+(\d+) kB$", _read_text(root / f"proc/{pid}/status"), re.MULTILINE)
    return None if match is None else 1024.0 * float(match[1])


class HostLoad:
    """Memory of the host and load of its processors, for the lines of metrics.jsonl."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._ticks = self._read_ticks()

    def read_numbers(self) -> dict[str, float | None]:
        """Return GiB in use and their limit, and the share of busy processors since the last call.

        In a container, the memory is its own, but the processors are those of the whole machine.
        """
        memory = read_memory(self._root)
        sizes = {"host_gib": memory["in_use"], "host_limit_gib": memory["limit"]}
        (last_total, last_idle), self._ticks = self._ticks, self._read_ticks()
        total, idle = self._ticks[0] - last_total, self._ticks[1] - last_idle
        busy_share = None if total <= 0 else round(1 - idle / total, 3)
        return {name: to_gib(size) for name, size in sizes.items()} | {"host_cpu": busy_share}

    def _read_ticks(self) -> tuple[int, int]:
        """Return the ticks of all processors since the machine started, and the idle ones."""
        line = _read_text(self._root / "proc/stat").split("\n")[0]
        ticks = [int(text) for text in line.split()[1:9]]
        # The first fields are user, nice, system, idle and iowait (proc_stat(5)).
        return sum(ticks), sum(ticks[3:5])


def to_gib(size_bytes: float | None) -> float | None:
    """Convert bytes to GiB, rounded to four decimals."""
    return None if size_bytes is None else round(size_bytes / GIB, 4)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
