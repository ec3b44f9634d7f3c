"""The agent's HTTP: GET /metrics and what is asked of profiles. Never makes the loop wait.

Metrics are asked of the children's sockets, and joined as far as they come in time.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from launcher.agent.loop import READ, WRITE, Loop, Timer

MAX_REQUEST, MAX_EXPOSITION = 8 * 1024, 4 * 1024 * 1024  # bytes
MAX_CONNECTIONS = 16
PATIENCE_S, CHILD_PATIENCE_S = 5.0, 1.0
LAST_READ_S = 75.0  # Prometheus reads every minute unless it is told otherwise

PLAIN, JSON = "text/plain; version=0.0.4; charset=utf-8", "application/json"

Answer = Callable[[Sequence[str]], str]  # the children's texts in, ours out
Profile = Callable[[str, str, bool], tuple[HTTPStatus, Mapping[str, Any]]]  # of a method and query, from this machine?


class MetricsServer:
    """Listens until the agent ends. Raises OSError when the port is taken."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        sockets: Callable[[], Sequence[str]],
        answer: Answer,
        profile: Profile,
    ) -> None:
        self._loop, self._sockets, self._answer, self._profile = loop, sockets, answer, profile
        self._open = 0
        self._read_at: float | None = None
        self._once_read: Callable[[], None] = lambda: None
        if host:
            self._listener = socket.create_server((host, port))
        elif socket.has_dualstack_ipv6():
            self._listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._listener = socket.create_server(("", port))
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), READ, lambda mask: self._accept())

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def when_read(self, call: Callable[[], None]) -> None:
        """Calls after the next answer, within LAST_READ_S; at once where nobody came to read within as long before."""
        if self._read_at is None or time.monotonic() - self._read_at > LAST_READ_S:
            return call()
        self._once_read = call
        self._loop.after(LAST_READ_S, call)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left before it was taken
        if self._open >= MAX_CONNECTIONS:
            return sock.close()
        self._open += 1
        Request(self._loop, sock, self._sockets, self._answer, self._profile, self._was_read, self._closed)

    def _was_read(self) -> None:
        self._read_at = time.monotonic()
        self._once_read()

    def _closed(self) -> None:
        self._open -= 1


class Request:
    """One connection: one request, one answer."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        sockets: Callable[[], Sequence[str]],
        answer: Answer,
        profile: Profile,
        was_read: Callable[[], None],
        closed: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._loop, self._sock = loop, sock
        self._sockets, self._answer, self._profile = sockets, answer, profile
        self._was_read, self._closed = was_read, closed
        self._request, self._response = bytearray(), bytearray()
        self._is_found = False
        self._patience = loop.after(PATIENCE_S, self._close)
        loop.watch(sock.fileno(), READ, lambda mask: self._read())

    def _read(self) -> None:
        try:
            data = self._sock.recv(MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._request += data
        if not data or len(self._request) > MAX_REQUEST:
            return self._close()
        if b"\r\n\r\n" not in self._request:
            return
        self._loop.unwatch(self._sock.fileno())
        method, _, target = bytes(self._request).split(b"\r\n", 1)[0].decode(errors="replace").partition(" ")
        path, _, query = target.partition(" ")[0].partition("?")
        self._route(method, path, query)

    def _route(self, method: str, path: str, query: str) -> None:
        if path == "/profile":
            status, found = self._profile(method, query, self._is_from_here())
            self._respond(status, json.dumps(found) + "\n", JSON)
        elif method == "GET" and path in ("/metrics", "/metrics/"):
            self._is_found = True
            Gather(self._loop, self._sockets(), lambda texts: self._respond(HTTPStatus.OK, self._answer(texts)))
        else:
            self._respond(HTTPStatus.NOT_FOUND, "GET /metrics and /profile are all there is\n")

    def _is_from_here(self) -> bool:
        try:
            address = str(self._sock.getpeername()[0])
        except OSError:
            return False  # it left
        return address.removeprefix("::ffff:") in ("127.0.0.1", "::1")  # a proxy beside us is 127.0.0.6

    def _respond(self, status: HTTPStatus, text: str, kind: str = PLAIN) -> None:
        body = text.encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._response += head.encode() + body
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock.fileno(), WRITE, lambda mask: self._write())

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._response)
        except BlockingIOError:
            return
        except OSError:
            return self._close()
        del self._response[:sent]
        if not self._response:
            self._close()
            if self._is_found:
                self._was_read()

    def _close(self) -> None:
        self._patience.cancel()
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._closed()


class Gather:
    """Reads every Unix socket to its end at the same time; what has not ended in time is left out."""

    def __init__(self, loop: Loop, paths: Sequence[str], done: Callable[[Sequence[str]], None]) -> None:
        self._loop, self._done = loop, done
        self._open: dict[socket.socket, bytearray] = {}
        self._texts: list[str] = []
        self._patience: Timer = loop.after(CHILD_PATIENCE_S, self._finish)
        for path in paths:
            self._connect(path)
        if not self._open:
            self._finish()

    def _connect(self, path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:  # it serves none (yet), or it is as busy as can be
            return sock.close()
        self._open[sock] = bytearray()
        self._loop.watch(sock.fileno(), READ, lambda mask: self._read(sock))

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            return self._end(sock, is_whole=False)
        if not data:
            return self._end(sock, is_whole=True)
        self._open[sock] += data
        if len(self._open[sock]) > MAX_EXPOSITION:
            self._end(sock, is_whole=False)

    def _end(self, sock: socket.socket, is_whole: bool) -> None:
        self._loop.unwatch(sock.fileno())
        sock.close()
        text = self._open.pop(sock)
        if is_whole:
            self._texts.append(text.decode(errors="replace"))
        if not self._open:
            self._finish()

    def _finish(self) -> None:
        self._patience.cancel()
        for sock in list(self._open):
            self._loop.unwatch(sock.fileno())
            sock.close()
        self._open.clear()
        done, self._done = self._done, lambda texts: None
        done(self._texts)
