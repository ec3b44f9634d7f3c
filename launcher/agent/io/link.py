"""JSON lines over TCP between an agent and the leader: bounded, stamped, never blocking.

A line is one object with a `type`. Once both ends know the leader's epoch every line carries it and a counter; a line
from another epoch or out of order closes the connection, and the other side says hello again.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from launcher.agent.loop import READ, WRITE, Loop

MAX_LINE = 256 * 1024  # bytes; the longest lines are one rank's stacks or traceback, bounded where they are made
BEAT_S, SILENCE_S = 1.0, 10.0  # how often each end speaks, and when the other counts as lost
MAX_UNSENT = 4 * 1024 * 1024  # bytes a peer may be behind before it counts as gone

Message = dict[str, Any]


class Link:
    """One connection. `on_close` is called once, with the reason, unless this side closed it."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_message: Callable[[Link, Message], None],
        on_close: Callable[[Link, str], None],
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer: str = sock.getpeername()[0]
        self.epoch: str | None = None
        self._sent = self._received = 0
        self._loop, self._sock = loop, sock
        self._on_message, self._on_close = on_message, on_close
        self._inbox, self._outbox = bytearray(), bytearray()
        loop.watch(sock.fileno(), READ, self._ready)

    @property
    def is_open(self) -> bool:
        return self._sock.fileno() >= 0

    def send(self, kind: str, /, **fields: Any) -> None:
        if not self.is_open:
            return
        message: Message = {"type": kind, **fields}
        if self.epoch is not None:
            message |= {"epoch": self.epoch, "n": self._sent}
            self._sent += 1
        self._outbox += json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"
        if len(self._outbox) > MAX_UNSENT:
            return self._lost(f"it read nothing of the last {len(self._outbox)} bytes")
        self._write()

    def close(self) -> None:
        """Closes without telling the owner, who knows."""
        if self.is_open:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()

    def _lost(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self._on_close(self, reason)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._write()
        if mask & READ and self.is_open:
            self._read()

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._outbox)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return self._lost(_reason(error))
        del self._outbox[:sent]
        self._loop.watch(self._sock.fileno(), READ | WRITE if self._outbox else READ, self._ready)

    def _read(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            return self._lost(_reason(error))
        if not data:
            return self._lost("connection closed")
        self._inbox += data
        while self.is_open and (end := self._inbox.find(b"\n")) >= 0:
            line = bytes(self._inbox[:end])
            del self._inbox[: end + 1]
            self._take(line)
        if len(self._inbox) > MAX_LINE:
            self._lost(f"a line of more than {MAX_LINE} bytes")

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return self._lost("a line that is not JSON")
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            return self._lost("a line that is not a message")
        if self.epoch is not None:
            stamp, due = (message.get("epoch"), message.get("n")), (self.epoch, self._received)
            if stamp != due:
                return self._lost(f"a message of epoch {stamp[0]} number {stamp[1]}, not {due[0]} number {due[1]}")
            self._received += 1
        self._on_message(self, message)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: on `host` alone when it names this machine, else on every interface, IPv6 included.

    Raises OSError when the port is taken.
    """
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)
