"""Why an agent does not reach its leader, as it says it."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from jaxlaunch.launcher.agent.host import leader_connection
from jaxlaunch.launcher.agent.host.leader_connection import Dialer
from jaxlaunch.launcher.agent.io.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    signal.set_wakeup_fd(-1)
    for item in (loop._wake_read, loop._wake_write):
        item.close()
    loop._epoll.close()


def answer_names(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
    """Let every name resolve to these answers of getaddrinfo."""
    numeric = socket.getaddrinfo

    def look_up(host: str, port: int, **options: Any) -> Any:
        return list(answers) if not options.get("flags") else numeric(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def address_of(family: int, host: str, port: int) -> tuple[Any, ...]:
    return (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))


# Linux gives no socket of this family, as for IPv6 on a host without it.
NO_FAMILY = 999


@pytest.mark.parametrize(
    "dead_address",
    [
        address_of(NO_FAMILY, "::1", 9401),
        # Nothing listens on this port, and the connection is refused while it is established.
        address_of(socket.AF_INET, "127.0.0.1", 1),
        # A connection to a broadcast address fails at once.
        address_of(socket.AF_INET, "255.255.255.255", 9401),
    ],
    ids=["family", "refused", "unreachable"],
)
def test_next_address_is_tried_after_a_dead_one(
    monkeypatch: pytest.MonkeyPatch, loop: Loop, dead_address: tuple[Any, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        answer_names(monkeypatch, dead_address, address_of(socket.AF_INET, "127.0.0.1", port))
        connected: list[socket.socket] = []

        def on_connected(sock: socket.socket) -> None:
            connected.append(sock)
            loop.stop()

        dialer = Dialer(loop, ("lm-w-0-0.lm", port), say=pytest.fail, on_connected=on_connected)
        dialer.dial()
        loop.call_later(5.0, loop.stop)
        loop.run()
        dialer.stop()
        assert [sock.getpeername()[1] for sock in connected] == [port]
        connected[0].close()


def test_next_address_is_tried_after_a_silent_one(
    monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    monkeypatch.setattr(leader_connection, "CONNECT_TIMEOUT_S", 0.05)
    # A full queue of a listener drops further connections without an answer.
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(silent.getsockname())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports = [item.getsockname()[1] for item in (silent, listener)]
            answers = [address_of(socket.AF_INET, "127.0.0.1", port) for port in ports]
            answer_names(monkeypatch, *answers)
            connected: list[socket.socket] = []

            def on_connected(sock: socket.socket) -> None:
                connected.append(sock)
                loop.stop()

            dialer = Dialer(loop, ("lm-w-0-0.lm", 9401), say=pytest.fail, on_connected=on_connected)
            dialer.dial()
            loop.call_later(5.0, loop.stop)
            loop.run()
            dialer.stop()
            assert [sock.getpeername()[1] for sock in connected] == [ports[1]]
            connected[0].close()


def test_reasons_of_all_addresses_are_logged(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    refused = address_of(socket.AF_INET, "127.0.0.1", 1)
    answer_names(monkeypatch, address_of(NO_FAMILY, "::1", 1), refused, refused)
    dialer = Dialer(loop, ("lm-w-0-0.lm", 1), say=pytest.fail, on_connected=pytest.fail)
    dialer.dial()

    def check_text() -> None:
        if "connection refused" in dialer.failure_text:
            loop.stop()

    loop.call_every(0.01, check_text)
    loop.call_later(5.0, loop.stop)
    loop.run()
    text = dialer.failure_text
    dialer.stop()
    assert text.startswith("address family not supported by protocol, connection refused for ")


def test_name_that_dns_does_not_allow_is_not_resolved(loop: Loop) -> None:
    name = "a" * 64 + ".lm"
    dialer = Dialer(loop, (name, 9401), say=pytest.fail, on_connected=pytest.fail)
    dialer.dial()

    def check_text() -> None:
        if dialer.failure_text.startswith("name not resolved"):
            loop.stop()

    loop.call_every(0.01, check_text)
    loop.call_later(5.0, loop.stop)
    loop.run()
    text = dialer.failure_text
    dialer.stop()
    assert text.startswith("name not resolved for ")


def test_missing_answer_of_the_name_server_is_logged(
    monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    is_over, numeric = threading.Event(), socket.getaddrinfo

    def look_up(host: str, port: int, **options: Any) -> Any:
        if not options.get(
            "flags"
        ):  # no number: a resolver tries each of its servers for some seconds
            is_over.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return numeric(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    messages = list[str]()
    address = ("lm-w-0-0.lm", 9401)
    dialer = Dialer(loop, address, say=messages.append, on_connected=lambda sock: None)
    dialer.dial()

    def check_text() -> None:
        messages.append(dialer.failure_text)
        if len(messages) == 1:
            is_over.set()
        elif messages[-1].startswith("name not resolved"):
            loop.stop()

    loop.call_every(0.05, check_text)
    loop.run()
    dialer.stop()
    assert messages[0].startswith("the name server has not answered for ")
    assert messages[-1].startswith("name not resolved for ")
