"""Encryption between two agents, without the connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.io import tls
from jaxlaunch.launcher.agent.io.tls import Channel, UntrustedPeerError
from jaxlaunch.launcher.manifests import security

SECRET = b"what only the gang may read"


def write_certificates(folder: Path) -> tls.Contexts:
    """Write the certificates of a new gang, and load them."""
    folder.mkdir()
    for name, content in security.make_certificates("mine").items():
        (folder / name).write_bytes(content)
    return tls.load_contexts(folder)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tls.Contexts:
    return write_certificates(tmp_path_factory.mktemp("certificates") / "own")


def shake_hands(client: Channel, server: Channel) -> None:
    """Pass bytes until neither end has any to send."""
    to_server, to_client = client.start_handshake(), server.start_handshake()
    while to_server or to_client:
        assert server.decrypt(to_server) == b""
        to_client += server.encrypt(b"")
        assert client.decrypt(to_client) == b""
        to_server, to_client = client.encrypt(b""), b""


def test_texts_arrive_encrypted_and_whole(contexts: tls.Contexts) -> None:
    client = Channel(contexts.client, is_server=False)
    server = Channel(contexts.server, is_server=True)
    shake_hands(client, server)
    # More than one call reads, and more than one record of TLS holds.
    text = SECRET * (3 * tls.READ_CHUNK_BYTES // len(SECRET))
    for sender, receiver in ((client, server), (server, client)):
        data = sender.encrypt(text)
        assert SECRET not in data
        middle = len(data) // 2
        assert receiver.decrypt(data[:middle]) + receiver.decrypt(data[middle:]) == text


def test_text_of_the_handshake_is_sent_after_it(contexts: tls.Contexts) -> None:
    client = Channel(contexts.client, is_server=False)
    server = Channel(contexts.server, is_server=True)
    greeting = client.start_handshake() + client.encrypt(SECRET)
    assert SECRET not in greeting
    assert server.decrypt(greeting) == b""
    assert client.decrypt(server.encrypt(b"")) == b""
    assert server.decrypt(client.encrypt(b"")) == SECRET


def test_certificate_of_another_gang_is_not_trusted(contexts: tls.Contexts, tmp_path: Path) -> None:
    """The other gang has the same name, as the next job of that name has."""
    other = write_certificates(tmp_path / "other")
    client, server = (
        Channel(contexts.client, is_server=False),
        Channel(other.server, is_server=True),
    )
    with pytest.raises(UntrustedPeerError, match="its certificate is not of this job"):
        shake_hands(client, server)


@pytest.mark.parametrize(
    "data", [b'{"type": "hello"}\n' * 9, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 99]
)
def test_peer_without_tls_is_not_trusted(contexts: tls.Contexts, data: bytes) -> None:
    server = Channel(contexts.server, is_server=True)
    with pytest.raises(UntrustedPeerError, match="^TLS: "):
        server.decrypt(data)
