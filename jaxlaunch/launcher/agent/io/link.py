"""JSON lines over TCP between an agent and the leader: bounded, numbered, never blocking.

A line is one JSON object with a `type`. Once both ends know the leader's epoch, every line carries
the epoch and a counter. A line from another epoch or out of order closes the connection, and the
host connects again. The module also chooses and opens TCP ports.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop
from jaxlaunch.records import codec

if TYPE_CHECKING:
    from jaxlaunch.launcher.agent.io.tls import Channel


# The longest lines are the stacks or the traceback of one rank, which are cut before they are sent.
MAX_LINE_BYTES = 256 * 1024
# Until the epoch is known, the sender may be a stranger.
MAX_GREETING_BYTES = 16 * 1024
# Interval at which a host sends messages, and silence after which either end counts as lost.
HEARTBEAT_S, SILENCE_TIMEOUT_S = 1.0, 10.0
# A peer with more unread bytes counts as lost.
MAX_UNSENT_BYTES = 4 * 1024 * 1024

Message = dict[str, Any]


def encode_message(kind: str, /, **fields: Any) -> bytes:
    """Encode a message as JSON without the closing brace, which links add after their stamp."""
    text = json.dumps({"type": kind, **fields}, separators=(",", ":"), default=str)
    return text[:-1].encode("utf-8", "backslashreplace")


def create_channel(certificates: Path | None, *, is_server: bool) -> Channel | None:
    """Create the encryption of a new connection, or return None for a gang without certificates."""
    if certificates is None:
        return None
    # The import of ssl takes longer than everything else that concerns an agent's connections.
    from jaxlaunch.launcher.agent.io import tls

    contexts = tls.load_contexts(certificates)
    return tls.Channel(contexts.server if is_server else contexts.client, is_server=is_server)


class Link:
    """One connection. It calls `on_close` once, with the reason, unless `close` was called."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[Link, Message], None],
        on_close: Callable[[Link, str], None],
        peer: str = "",
        channel: Channel | None = None,
    ) -> None:
        """Take over a connected socket.

        Args:
            loop: Event loop.
            sock: The socket.
            on_message: Callback for each message. It may be replaced later.
            on_close: Callback for the end of the connection. It may be replaced later.
            peer: Address of the other side.
            channel: Encryption, which sends nothing until the other side has shown a certificate of
                this gang.

        Raises:
            OSError: The other side has closed the socket already.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The caller passes the address, because a connection that was reset no longer has one.
        self.peer = peer
        self.is_open = True
        self._epoch: str | None = None
        # First part of the stamp at the end of each message, once the epoch is known.
        self._stamp = b""
        self._sent_count = self._received_count = 0
        self._max_line_bytes = MAX_GREETING_BYTES
        self._loop, self._sock = loop, sock
        self.on_message, self.on_close = on_message, on_close
        # The beginning of an incomplete line, and data that the system has not accepted yet.
        self._inbox, self._outbox = b"", bytearray()
        self._channel = channel
        if channel is not None:
            self._outbox += channel.start_handshake()
        # Whether data must wait in the outbox until the socket is writable.
        self._is_full = bool(self._outbox)
        loop.watch(sock.fileno(), READ | WRITE if self._is_full else READ, self._on_ready)

    @property
    def epoch(self) -> str | None:
        """Epoch of the leader, once this end knows it."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: str) -> None:
        """Set the epoch that every message carries from now on, in both directions."""
        self._epoch = epoch
        self._stamp = b',"epoch":%b,"n":' % json.dumps(epoch).encode()
        self._max_line_bytes = MAX_LINE_BYTES

    def send(self, kind: str, /, **fields: Any) -> None:
        """Queue a message, unless the connection is closed."""
        self.send_encoded(encode_message(kind, **fields))

    def send_encoded(self, message: bytes) -> None:
        """Queue an encoded message. A message to thousands of hosts is encoded only once."""
        if not self.is_open:
            return
        if self._epoch is None:
            line = message + b"}\n"
        else:
            line = b"%b%b%d}\n" % (message, self._stamp, self._sent_count)
            self._sent_count += 1
        if self._channel is not None:
            line = self._channel.encrypt(line)
        self._write_data(line)

    def close(self) -> None:
        """Close the connection without calling `on_close`."""
        if self.is_open:
            self.is_open = False
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()

    def _fail(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self.on_close(self, reason)

    def _on_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush_outbox()
        if mask & READ and self.is_open:
            self._receive_lines()

    def _write_data(self, data: bytes) -> None:
        """Send data, and queue what the system does not accept. It nearly always accepts all."""
        if self._is_full:
            self._queue_unsent(data)
        elif (sent_bytes := self._send_bytes(data)) < len(data) and self.is_open:
            self._set_full(True)
            self._queue_unsent(data[sent_bytes:])

    def _queue_unsent(self, unsent: bytes) -> None:
        self._outbox += unsent
        if len(self._outbox) > MAX_UNSENT_BYTES:
            self._fail(f"it has not read the last {len(self._outbox)} bytes")

    def _flush_outbox(self) -> None:
        del self._outbox[: self._send_bytes(self._outbox)]
        if self.is_open and not self._outbox:
            self._set_full(False)

    def _send_bytes(self, data: bytes | bytearray) -> int:
        """Return the number of bytes that the system has accepted."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(_error_reason(error))
        return 0

    def _set_full(self, is_full: bool) -> None:
        self._is_full = is_full
        self._loop.watch(self._sock.fileno(), READ | WRITE if is_full else READ, self._on_ready)

    def _receive_lines(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(_error_reason(error))
            return
        if not data:
            self._fail("connection closed")
            return
        plaintext = data if self._channel is None else self._decrypt(data, self._channel)
        lines = (self._inbox + plaintext).split(b"\n")
        self._inbox = lines.pop()
        for line in lines:
            if len(line) > self._max_line_bytes:
                self._reject_long_line()
            elif self.is_open:
                self._take_line(line)
        if len(self._inbox) > self._max_line_bytes:
            self._reject_long_line()

    def _reject_long_line(self) -> None:
        self._fail(f"it sent a line of more than {self._max_line_bytes} bytes")

    def _decrypt(self, data: bytes, channel: Channel) -> bytes:
        """Return the plaintext of received data, and send what the handshake answers."""
        from jaxlaunch.launcher.agent.io.tls import UntrustedPeerError

        plaintext, fault = b"", None
        try:
            plaintext = channel.decrypt(data)
        except UntrustedPeerError as error:
            fault = str(error)
        if answer := channel.encrypt(b""):
            self._write_data(answer)
        if fault is not None:
            self._fail(fault)
        return plaintext

    def _take_line(self, line: bytes) -> None:
        try:
            message = codec.parse_json(line)
        except ValueError:
            self._fail("it sent a line that is not JSON")
            return
        if type(message) is not dict or type(message.get("type")) is not str:
            self._fail("it sent a line that is not a message")
            return
        if self._epoch is not None:
            epoch, number = message.get("epoch"), message.get("n")
            if epoch != self._epoch or number != self._received_count:
                expected = f"message {self._received_count} of epoch {self._epoch}"
                self._fail(f"it sent message {number} of epoch {epoch}, expected {expected}")
                return
            self._received_count += 1
        self.on_message(self, message)


def _error_reason(error: OSError) -> str:
    return error.strerror or str(error)


# The range is below the ephemeral ports of Linux (from 32768) and the node ports of Kubernetes
# (from 30000). No outgoing connection and no bind to port 0 can therefore take one of these ports,
# and a client that connects too early cannot connect to itself.
PORT_RANGE = range(20_000, 30_000)
MAX_PORT_TRIES = 1_000
# All hosts of a job connect at once. The system limits this to net.core.somaxconn.
LISTEN_BACKLOG = 4_096


def choose_free_port(ports: range = PORT_RANGE) -> int:
    """Return a TCP port that is free on every IPv4 interface. Raises OSError if it finds none."""
    generator = random.SystemRandom()
    for _ in range(MAX_PORT_TRIES):
        port = generator.choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(
        f"none of {MAX_PORT_TRIES} ports between {ports.start} and {ports.stop - 1} is free; "
        "end programs that listen on them"
    )


def bracket_ipv6(host: str) -> str:
    """Return the host in the form for `host:port`, which has an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Args:
        host: Address to listen on. Empty for every interface, IPv6 included.
        port: Port, or 0 for any free one.

    Raises:
        OSError: The port is in use, or the address is not one of this machine.
    """
    is_dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, dualstack_ipv6=is_dual, backlog=LISTEN_BACKLOG
    )


def is_local_address(host: str) -> bool:
    """Return whether a socket of this machine, or of this pod, can listen on an address."""
    try:
        open_listener(host, 0).close()
    except OSError:
        return False
    return True
