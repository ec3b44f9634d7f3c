"""How often the kernel killed for want of memory in this container. It counts before it sends the signal."""

from __future__ import annotations

import re

# cgroup v2, and v1: a container sees its own.
FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def kills() -> int:
    """None yet, where nobody counts."""
    for path in FILES:
        try:
            with open(path) as file:
                found = _KILLS.search(file.read())
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0
