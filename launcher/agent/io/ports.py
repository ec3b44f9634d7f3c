"""Ports that nobody takes between choosing and listening."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range (32768 on) and Kubernetes' node ports (30000 on): no outgoing connection and no bind to
# port 0 can take one of these first, and a client that dials too early cannot connect to itself.
RANGE = range(20_000, 30_000)
TRIES = 1_000


def free_port() -> int:
    """A TCP port that is free on every IPv4 interface. Raises OSError when none is found."""
    chosen = random.SystemRandom()
    for _ in range(TRIES):
        port = chosen.choice(RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {RANGE.start} and {RANGE.stop}")
