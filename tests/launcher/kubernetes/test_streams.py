"""The streams of a command, from messages as the API server sends them."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import websocket

from jaxlaunch.launcher.errors import ClusterError, UnreachableError
from jaxlaunch.launcher.kubernetes.streams import STDERR, STDOUT, CommandStream

FAILED: dict[str, Any] = {"status": "Failure", "reason": "NonZeroExitCode"}
CAUSES = {"causes": [{"reason": "ExitCode", "message": "7"}]}


class Tunnel:
    """A WebSocket with these messages. A None closes it."""

    def __init__(self, *messages: bytes | None) -> None:
        self._messages = list(messages)
        self.sent: list[bytes] = []

    def recv_data_frame(self, control_frame: bool) -> tuple[int, Any]:
        if not self._messages:
            raise websocket.WebSocketConnectionClosedException("lost")
        data = self._messages.pop(0)
        opcode = websocket.ABNF.OPCODE_CLOSE if data is None else websocket.ABNF.OPCODE_BINARY
        return opcode, types.SimpleNamespace(data=data)

    def send_binary(self, data: bytes) -> None:
        self.sent.append(data)

    def getsubprotocol(self) -> str:
        return "v4.channel.k8s.io"


def status_message(**status: Any) -> bytes:
    return b"\x03" + json.dumps(status).encode()


@pytest.mark.parametrize(
    ("status", "code"), [({"status": "Success"}, 0), (FAILED | {"details": CAUSES}, 7)]
)
def test_command_ends_with_its_exit_code(status: dict[str, Any], code: int) -> None:
    stream = CommandStream(Tunnel(b"\x01out", b"\x02err", b"\x01", status_message(**status)))
    assert [stream.receive() for _ in range(3)] == [
        (STDOUT, b"out"),
        (STDERR, b"err"),
        (STDOUT, b""),
    ]
    assert stream.exit_code is None
    stream.receive()
    assert stream.exit_code == code


def test_command_that_cannot_start_and_cuts_are_errors() -> None:
    stream = CommandStream(Tunnel(status_message(status="Failure", message="no such\n file")))
    with pytest.raises(ClusterError, match=r"cannot run in the pod: no such file\."):
        stream.receive()
    with pytest.raises(UnreachableError, match="closed before the command ended"):
        CommandStream(Tunnel(None)).receive()
    with pytest.raises(UnreachableError, match=r"was cut: lost\."):
        CommandStream(Tunnel()).receive()


def test_size_is_sent_and_only_a_newer_server_is_asked_to_close_the_input() -> None:
    tunnel = Tunnel()
    stream = CommandStream(tunnel)
    stream.resize(80, 24)
    stream.close_stdin()
    assert tunnel.sent == [b'\x04{"Width": 80, "Height": 24}']
