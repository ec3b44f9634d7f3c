"""How a process below the agent joins the others."""

from __future__ import annotations

import socket
import threading

from jaxlaunch.launcher.agent.site.jaxhook import wait_for_listener


def test_process_waits_for_the_coordinator_within_a_limit() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # refuses connections until it listens
        address = f"127.0.0.1:{server.getsockname()[1]}"
        wait_for_listener(address, 0.1)
        wait_for_listener("of no port", 600.0)
        waits = threading.Thread(target=wait_for_listener, args=(address, 600.0), daemon=True)
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        server.listen()
        server.accept()[0].close()
        waits.join(60.0)
        assert not waits.is_alive()
