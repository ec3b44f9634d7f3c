"""How a process below the agent joins the others."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest

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


def test_pauses_between_connections_grow_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that listens a moment later is not waited for long, by thousands of hosts."""
    now_s, pauses_s = [0.0], list[float]()

    def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)
        now_s[0] += pause_s

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        wait_for_listener(f"127.0.0.1:{server.getsockname()[1]}", 4.0)
    assert sum(pauses_s) == pytest.approx(4.0)
    # A pause is at most half of the time before it, and a few milliseconds.
    waits_s = [0.0, *itertools.accumulate(pauses_s)]
    assert all(
        pause_s <= wait_s / 2 + 0.01 for wait_s, pause_s in zip(waits_s[:-1], pauses_s, strict=True)
    )
    assert max(pauses_s) <= 0.25 and len(pauses_s) < 50
