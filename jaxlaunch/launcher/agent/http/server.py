"""The agent's HTTP server: GET /metrics, /profile and, in a pod, /output. Never blocks the loop.

Metrics are read from the sockets of this host's processes; a process that does not answer in time is left out.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop, Timer
from jaxlaunch.launcher.agent.io.ports import listen

MAX_REQUEST, MAX_EXPOSITION = 8 * 1024, 4 * 1024 * 1024  # bytes
MAX_CONNECTIONS = 16  # a further one takes the place of the oldest that waits for its client
TIMEOUT_S, CHILD_TIMEOUT_S = 5.0, 1.0
SCRAPE_INTERVAL_S = 75.0  # Prometheus scrapes every minute by default

PLAIN, JSON = "text/plain; version=0.0.4; charset=utf-8", "application/json"

Exposition = Callable[[Sequence[str]], str]  # of the texts of this host's processes
Reply = Callable[[str, str, bool], tuple[HTTPStatus, Mapping[str, Any]]]  # to method, query, is_local


class MetricsServer:
    """Listens until the agent ends. Raises OSError when the port is in use."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        sockets: Callable[[], Sequence[str]],
        exposition: Exposition,
        replies: Mapping[str, Reply],
    ) -> None:
        """`replies` are in JSON, by path."""
        self._loop, self._sockets, self._exposition, self._replies = loop, sockets, exposition, replies
        self._open: dict[Request, None] = {}  # the oldest first
        self._scraped_at: float | None = None
        self._on_scrape: Callable[[], None] = lambda: None
        self._listener = listen(host, port)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), READ, lambda mask: self._accept())

    @property
    def port(self) -> int:
        """The port that it listens on, also where any free one was requested."""
        return int(self._listener.getsockname()[1])

    def after_scrape(self, call: Callable[[], None]) -> None:
        """Calls back after the next scrape, or SCRAPE_INTERVAL_S later; at once if nobody scraped for that long."""
        if self._scraped_at is None or time.monotonic() - self._scraped_at > SCRAPE_INTERVAL_S:
            return call()
        self._on_scrape = call
        self._loop.after(SCRAPE_INTERVAL_S, call)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # the client closed before it was accepted
        if len(self._open) >= MAX_CONNECTIONS:
            slow = next((one for one in self._open if one.waits_for_client), None)
            if slow is None:
                return sock.close()
            slow.close()
        one = Request(self._loop, sock, self._sockets, self._exposition, self._replies, self._scraped, self._closed)
        self._open[one] = None

    def _scraped(self) -> None:
        self._scraped_at = time.monotonic()
        self._on_scrape()

    def _closed(self, one: Request) -> None:
        del self._open[one]


class Request:
    """One connection: one request, one response."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        sockets: Callable[[], Sequence[str]],
        exposition: Exposition,
        replies: Mapping[str, Reply],
        scraped: Callable[[], None],
        closed: Callable[[Request], None],
    ) -> None:
        sock.setblocking(False)
        self.waits_for_client = True  # to send its request, or to read the response
        self._loop, self._sock = loop, sock
        self._sockets, self._exposition, self._replies = sockets, exposition, replies
        self._scraped, self._closed = scraped, closed
        self._request, self._response = bytearray(), bytearray()
        self._is_scrape = False
        self._timeout = loop.after(TIMEOUT_S, self.close)
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
            return self.close()
        if b"\r\n\r\n" not in self._request:
            return
        self._loop.unwatch(self._sock.fileno())
        self.waits_for_client = False
        first, *headers = bytes(self._request).decode(errors="replace").split("\r\n")
        method, _, target = first.partition(" ")
        path, _, query = target.partition(" ")[0].partition("?")
        self._route(method, path, query, any(line.lower().startswith("origin:") for line in headers))

    def _route(self, method: str, path: str, query: str, is_from_page: bool) -> None:
        if path in self._replies and is_from_page:
            self._respond(HTTPStatus.FORBIDDEN, json.dumps({"error": f"web pages may not ask for {path}"}) + "\n", JSON)
        elif path in self._replies:
            status, found = self._replies[path](method, query, self._is_local())
            self._respond(status, json.dumps(found) + "\n", JSON)
        elif method == "GET" and path in ("/metrics", "/metrics/"):
            self._is_scrape = True
            Gather(self._loop, self._sockets(), lambda texts: self._respond(HTTPStatus.OK, self._exposition(texts)))
        else:
            self._respond(
                HTTPStatus.NOT_FOUND, f"not found: this server has {', '.join(('/metrics', *self._replies))}\n"
            )

    def _is_local(self) -> bool:
        try:
            address = str(self._sock.getpeername()[0])
        except OSError:
            return False  # it has closed
        return address.removeprefix("::ffff:") in ("127.0.0.1", "::1")  # a service mesh's sidecar is 127.0.0.6

    def _respond(self, status: HTTPStatus, text: str, kind: str = PLAIN) -> None:
        body = text.encode(errors="backslashreplace")
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._response += head.encode() + body
        self.waits_for_client = True
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock.fileno(), WRITE, lambda mask: self._write())

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._response)
        except BlockingIOError:
            return
        except OSError:
            return self.close()
        del self._response[:sent]
        if not self._response:
            self.close()
            if self._is_scrape:
                self._scraped()

    def close(self) -> None:
        """Closes the connection, answered or not."""
        self._timeout.cancel()
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._closed(self)


class Gather:
    """Reads every Unix socket to its end at the same time; one that has not ended in CHILD_TIMEOUT_S is left out."""

    def __init__(self, loop: Loop, paths: Sequence[str], done: Callable[[Sequence[str]], None]) -> None:
        self._loop, self._done = loop, done
        self._open: dict[socket.socket, bytearray] = {}
        self._texts: list[str] = []
        self._timeout: Timer = loop.after(CHILD_TIMEOUT_S, self._finish)
        for path in paths:
            self._connect(path)
        if not self._open:
            self._finish()

    def _connect(self, path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:  # it serves no metrics (yet), or its backlog is full
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
        self._timeout.cancel()
        for sock in list(self._open):
            self._loop.unwatch(sock.fileno())
            sock.close()
        self._open.clear()
        done, self._done = self._done, lambda texts: None
        done(self._texts)
