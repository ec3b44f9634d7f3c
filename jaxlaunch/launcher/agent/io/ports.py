"""TCP ports: choosing one that stays free until it is used, and listening on one."""

from __future__ import annotations

import random
import socket

# Below Linux's ephemeral range (32768 on) and Kubernetes' node ports (30000 on): no outgoing connection and no bind to
# port 0 can take one of these first, and a client that dials too early cannot connect to itself.
RANGE = range(20_000, 30_000)
TRIES = 1_000
BACKLOG = 4_096  # all hosts of a job connect at once; the system caps it at net.core.somaxconn


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


def bracketed(host: str) -> str:
    """The host as it stands before `:port`: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: on the address `host` alone, or on every interface, IPv6 included, where it is empty.

    Port 0 is any free one. Raises OSError when the port is in use, or the address not this machine's.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)
