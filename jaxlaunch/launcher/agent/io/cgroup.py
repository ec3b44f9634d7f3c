"""The memory of this container: what it uses, its limit, and how often the OOM killer ended a process in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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


def read(root: Path = Path("/")) -> dict[str, float | None]:
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
