"""Which addresses a listening socket is reached at."""

from __future__ import annotations

import socket

import pytest

from jaxlaunch.launcher.agent.io.link import is_local_address, open_listener


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost"])
def test_listener_uses_only_its_address(host: str) -> None:
    with open_listener(host, 0) as listener:
        address, port = listener.getsockname()
        socket.create_connection((host, port)).close()
        assert address == socket.gethostbyname(host)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.9", port))


def test_listener_without_address_uses_every_interface() -> None:
    with open_listener("", 0) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "127.0.0.9"):
            socket.create_connection((address, port)).close()


@pytest.mark.parametrize(
    ("address", "is_local"), [("127.0.0.5", True), ("192.0.2.7", False), ("2001:db8::7", False)]
)
def test_address_of_another_machine_is_not_local(address: str, is_local: bool) -> None:
    assert is_local_address(address) is is_local
