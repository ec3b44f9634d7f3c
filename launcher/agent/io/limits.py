"""The limit on open files: host 0 has a connection to every host, and an image's default may be 1,024."""

from __future__ import annotations

import resource

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


def forget() -> None:
    """Restores the limit, in a child: a program that calls select(2) cannot use descriptors from 1,024 on."""
    if _before:
        resource.setrlimit(resource.RLIMIT_NOFILE, _before[0])


_before: list[tuple[int, int]] = []
