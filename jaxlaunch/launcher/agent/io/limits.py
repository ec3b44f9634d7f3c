"""Limits of this process: on open files, since host 0 has a connection to every host and an image's default may be
1,024; and on the memory that programs pin for a network's adapters."""

from __future__ import annotations

import resource
from pathlib import Path

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


def forget() -> None:
    """Restores the limit, in a child: a program that calls select(2) cannot use descriptors from 1,024 on."""
    if _before:
        resource.setrlimit(resource.RLIMIT_NOFILE, _before[0])


_before: list[tuple[int, int]] = []
