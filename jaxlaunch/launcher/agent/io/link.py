"""JSON lines over TCP between an agent and the leader: bounded, numbered, never blocking.

A line is one object with a `type`. Once both ends know the leader's epoch every line carries it and a counter; a line
from another epoch or out of order closes the connection, and the other side connects again.

TCP ports: choosing one that stays free until it is used, and listening on one.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop
from jaxlaunch.records import checked

if TYPE_CHECKING:
    from jaxlaunch.launcher.agent.io.tls import Channel


MAX_LINE = 256 * 1024  # bytes; the longest lines are one rank's stacks or traceback, bounded where they are made
MAX_FIRST = 16 * 1024  # ... until the epoch is known: whoever sends it may be a stranger
BEAT_S, SILENCE_S = 1.0, 10.0  # how often a host sends a message, and when either end counts as lost
MAX_UNSENT = 4 * 1024 * 1024  # bytes a peer may be behind before it counts as lost

Message = dict[str, Any]


def encoded(kind: str, /, **fields: Any) -> bytes:
    """A message of type `kind` as JSON without its closing brace, so that each link can add its own stamp to it."""
    text = json.dumps({"type": kind, **fields}, separators=(",", ":"), default=str)
    return text[:-1].encode("utf-8", "backslashreplace")


def secured(certificates: Path | None, *, is_server: bool) -> Channel | None:
    """The encryption of a new connection, by the folder of the gang's certificates; None where it has none."""
    if certificates is None:
        return None
    from jaxlaunch.launcher.agent.io import tls  # ssl takes longer to import than all else of an agent's connections

    known = tls.contexts(certificates)
    return tls.Channel(known.server if is_server else known.client, is_server=is_server)


class Link:
    """One connection. `on_close` is called once, with the reason, unless this side closed it."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[Link, Message], None],
        on_close: Callable[[Link, str], None],
        peer: str = "",
        channel: Channel | None = None,
    ) -> None:
        """Takes over `sock`; `peer` is the other side's address. Raises OSError where it is closed already.

        `channel` encrypts what is sent; nothing is until the other side has shown a certificate of this gang.

        `on_message` and `on_close` may be replaced later.
        """
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer  # as accept gave it: a connection that was reset since has no peer to ask for
        self.is_open = True  # until one of the sides closes
        self._epoch: str | None = None
        self._stamp = b""  # what begins the end of each message, once the epoch is known
        self._sent = self._received = 0
        self._longest = MAX_FIRST
        self._loop, self._sock = loop, sock
        self.on_message, self.on_close = on_message, on_close
        self._inbox, self._outbox = b"", bytearray()  # of a line, its beginning; what the system has not taken yet
        self._channel = channel
        if channel is not None:
            self._outbox += channel.begin()
        self._is_full = bool(self._outbox)  # the system takes no more for now, or was not asked yet
        loop.watch(sock.fileno(), READ | WRITE if self._is_full else READ, self._ready)

    @property
    def epoch(self) -> str | None:
        """The leader's epoch, once this end knows it."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: str) -> None:
        """Every message from now on, in both directions, carries the epoch and a number."""
        self._epoch, self._stamp, self._longest = epoch, b',"epoch":%b,"n":' % json.dumps(epoch).encode(), MAX_LINE

    def send(self, kind: str, /, **fields: Any) -> None:
        """Queues a message of type `kind`; does nothing once the connection is closed."""
        self.send_encoded(encoded(kind, **fields))

    def send_encoded(self, message: bytes) -> None:
        """Queues what `encoded` made: a message to thousands of hosts is encoded once."""
        if not self.is_open:
            return
        if self._epoch is None:
            line = message + b"}\n"
        else:
            line = b"%b%b%d}\n" % (message, self._stamp, self._sent)
            self._sent += 1
        if self._channel is not None:
            line = self._channel.sealed(line)
        if self._is_full:
            self._keep(line)
        else:
            self._write(line)

    def close(self) -> None:
        """Closes without calling `on_close`."""
        if self.is_open:
            self.is_open = False
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()

    def _lost(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self.on_close(self, reason)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._write_kept()
        if mask & READ and self.is_open:
            self._read()

    def _write(self, line: bytes) -> None:
        """Sends a message while none is kept: nearly always the system takes all of it at once."""
        if (sent := self._send(line)) < len(line) and self.is_open:
            self._set_full(True)
            self._keep(line[sent:])

    def _keep(self, unsent: bytes) -> None:
        self._outbox += unsent
        if len(self._outbox) > MAX_UNSENT:
            self._lost(f"it has not read the last {len(self._outbox)} bytes")

    def _write_kept(self) -> None:
        del self._outbox[: self._send(self._outbox)]
        if self.is_open and not self._outbox:
            self._set_full(False)

    def _send(self, data: bytes | bytearray) -> int:
        """How many bytes the system took."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(_reason(error))
        return 0

    def _set_full(self, is_full: bool) -> None:
        self._is_full = is_full
        self._loop.watch(self._sock.fileno(), READ | WRITE if is_full else READ, self._ready)

    def _read(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            return self._lost(_reason(error))
        if not data:
            return self._lost("connection closed")
        text = data if self._channel is None else self._opened(data, self._channel)
        lines = (self._inbox + text).split(b"\n")
        self._inbox = lines.pop()
        for line in lines:
            if len(line) > self._longest:
                self._too_long()
            elif self.is_open:
                self._take(line)
        if len(self._inbox) > self._longest:
            self._too_long()

    def _too_long(self) -> None:
        self._lost(f"it sent a line of more than {self._longest} bytes")

    def _opened(self, data: bytes, channel: Channel) -> bytes:
        """What was received in plain text; sends what the handshake answers, and why it failed."""
        from jaxlaunch.launcher.agent.io.tls import NotTrusted

        text, fault = b"", None
        try:
            text = channel.opened(data)
        except NotTrusted as error:
            fault = str(error)
        if answer := channel.sealed(b""):
            (self._keep if self._is_full else self._write)(answer)
        if fault is not None:
            self._lost(fault)
        return text

    def _take(self, line: bytes) -> None:
        try:
            message = checked.decode_line(line)
        except ValueError:
            return self._lost("it sent a line that is not JSON")
        if type(message) is not dict or type(message.get("type")) is not str:
            return self._lost("it sent a line that is not a message")
        if self._epoch is not None:
            epoch, number = message.get("epoch"), message.get("n")
            if epoch != self._epoch or number != self._received:
                due = f"message {self._received} of epoch {self._epoch}"
                return self._lost(f"it sent message {number} of epoch {epoch}, expected {due}")
            self._received += 1
        self.on_message(self, message)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


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
