"""The way to a port of a pod, against a server that speaks as the kubelet does."""

from __future__ import annotations

import base64
import hashlib
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import ApiError, UnreachableError
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.kubernetes.client import Cluster
from tests.launcher import apiserver

PORT = struct.pack("<H", 9400)
Answers = Callable[["Pod"], None]


class Pod(socketserver.StreamRequestHandler):
    """One connection: the handshake, then what the test says."""

    server: Server

    def handle(self) -> None:
        self.head = b"".join(iter(self.rfile.readline, b"\r\n")).decode()
        self.server.heads.append(self.head)
        self.server.answers(self)

    def accept(self) -> bytes:
        """Opens the tunnel and reads one message: the request, without its channel."""
        fields = dict(line.split(": ", 1) for line in self.head.splitlines()[1:])
        key = (
            fields["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        )  # RFC 6455, 4.2.2
        accepted = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.wfile.write(
            f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nSec-WebSocket-Accept: "
            f"{accepted}\r\n\r\n".encode()
        )
        for channel in (0, 1):
            self.say(channel, PORT)
        _, length = self.rfile.read(2)
        length = (
            length & 0x7F if length & 0x7F < 126 else struct.unpack(">H", self.rfile.read(2))[0]
        )
        mask = self.rfile.read(4)
        data = bytes(byte ^ mask[place % 4] for place, byte in enumerate(self.rfile.read(length)))
        assert data[0] == 0
        return data[1:]

    def say(self, channel: int, data: bytes) -> None:
        self.wfile.write(bytes([0x82, len(data) + 1, channel]) + data)

    def close(self) -> None:
        self.wfile.write(b"\x88\x02\x03\xe8")


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answers: Answers) -> None:
        super().__init__(("127.0.0.1", 0), Pod)
        self.answers, self.heads = answers, list[str]()


@contextmanager
def send_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answers: Answers
) -> Iterator[tuple[Cluster, Server]]:
    with Server(answers) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        config = apiserver.write_kubeconfig(folder, url, token="canary", **{"as": "ann"})
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield Cluster.connect(), server
        server.shutdown()


def test_request_reaches_port_and_answer_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(pod: Pod) -> None:
        requests.append(pod.accept())
        pod.say(0, b"one, ")
        pod.say(0, b"two")
        pod.close()

    requests: list[bytes] = []
    with send_request(tmp_path, monkeypatch, answers) as (cluster, server):
        assert streams.exchange_bytes(cluster, "team-a", "lm-w-0-0", 9400, b"hello") == b"one, two"
    assert requests == [b"hello"]
    (head,) = server.heads
    assert head.startswith(
        "GET /api/v1/namespaces/team-a/pods/lm-w-0-0/portforward?ports=9400 HTTP/1.1\r\n"
    )
    assert "bearer canary" in head.lower() and "Impersonate-User: ann" in head


def test_closed_port_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(pod: Pod) -> None:
        pod.accept()
        pod.say(1, b"connection refused")
        pod.close()

    with (
        send_request(tmp_path, monkeypatch, answers) as (cluster, _),
        pytest.raises(UnreachableError, match="The pod did not answer: connection refused"),
    ):
        streams.exchange_bytes(cluster, "team-a", "lm-w-0-0", 9400, b"hello")


def test_refusal_keeps_server_message_and_names_missing_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(pod: Pod) -> None:
        body = b'{"kind": "Status", "message": "pods is forbidden"}'
        pod.wfile.write(
            b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )

    with (
        send_request(tmp_path, monkeypatch, answers) as (cluster, _),
        pytest.raises(ApiError, match="pods is forbidden") as refused,
    ):
        streams.exchange_bytes(cluster, "team-a", "lm-w-0-0", 9400, b"hello")
    assert refused.value.status == 403
    assert "pods/portforward" in refused.value.message and refused.value.hint is None


def test_broken_connection_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        send_request(tmp_path, monkeypatch, lambda pod: None) as (cluster, _),
        pytest.raises(UnreachableError, match="did not open a port-forward to the pod"),
    ):
        streams.exchange_bytes(cluster, "team-a", "lm-w-0-0", 9400, b"hello")
