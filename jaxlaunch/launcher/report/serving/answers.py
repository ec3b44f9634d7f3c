"""How a server of pages answers: headers that let a browser do little, a status line always, streams that end.

It writes no log: an address or a header may have a token in it.
"""

from __future__ import annotations

import hashlib
import http.server
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.report import page

IDLE_S = 15.0  # after which a stream says something, which ends those that nobody reads
HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
Headers = Sequence[tuple[str, str]]


class Listening(http.server.ThreadingHTTPServer):
    """Answers until it is shut down. Raises UserError where the port is taken."""

    daemon_threads = True

    def __init__(self, address: str, port: int, handler: type[Answers], most_streams: int) -> None:
        self.streams = threading.BoundedSemaphore(most_streams)
        self.is_closing = threading.Event()
        try:
            super().__init__((address, port), handler)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UserError(
                f"Port {port} cannot be used: {why}.", "choose another with --port, or leave it out."
            ) from None

    def server_bind(self) -> None:
        """Takes the port, without asking a name server what the address is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that left; any other exception is a fault of ours, whose traceback is printed."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def shutdown(self) -> None:
        """Ends the streams too."""
        self.is_closing.set()
        super().shutdown()


class Answers(http.server.BaseHTTPRequestHandler):
    """One request, and the ways to answer it."""

    server: Listening
    protocol_version = "HTTP/1.1"
    timeout = 30
    server_version, sys_version = "jaxlaunch", ""

    def target(self) -> urllib.parse.SplitResult | None:
        """The address that is asked for; None where it is none, as with half a bracket."""
        try:
            return urllib.parse.urlsplit(self.path)
        except ValueError:
            return None

    def show(self, text: str, status: HTTPStatus = HTTPStatus.OK, more: Headers = ()) -> None:
        """Answers with a page."""
        self.answer(status, HTML, text.encode("utf-8", "backslashreplace"), more)

    def refuse(self, status: HTTPStatus, text: str) -> None:
        """Answers with a sentence, and closes the connection."""
        self.close_connection = True
        self.answer(status, TEXT, f"{text}\n".encode())

    def answer(self, status: HTTPStatus, kind: str, body: bytes, more: Headers = ()) -> None:
        """Answers with a body and with `more` headers, which count before ours."""
        self.send_response(status)
        ends = [("Connection", "close")] * self.close_connection  # else a browser asks again where nobody listens
        self._head(kind, [("Content-Length", str(len(body))), *ends, *more])
        self.wfile.write(body)

    def stream(self, read: Callable[[], dict[str, Any] | None], period_s: float, longest_s: float) -> None:
        """Sends what `read` returns whenever it has changed, until it is None or the client leaves.

        After `longest_s` seconds the stream ends, and a browser that still shows the page asks again.
        """
        if not self.server.streams.acquire(blocking=False):
            return self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
        try:
            self.close_connection = True
            self.send_response(HTTPStatus.OK)
            self._head("text/event-stream", [("Connection", "close")])
            self._send_changes(read, period_s, time.monotonic() + longest_s)
        finally:
            self.server.streams.release()

    def _send_changes(self, read: Callable[[], dict[str, Any] | None], period_s: float, end: float) -> None:
        before, said = b"", time.monotonic()
        while not self.server.is_closing.is_set() and time.monotonic() < end and (found := read()) is not None:
            text = page.written(found)
            if (now := hashlib.blake2b(text.encode()).digest()) != before:
                before, said = now, time.monotonic()
                self.wfile.write(f"event: run\ndata: {text}\n\n".encode())
            elif time.monotonic() - said > IDLE_S:
                said = time.monotonic()
                self.wfile.write(b": nothing new\n\n")
            self.server.is_closing.wait(period_s)

    def _head(self, kind: str, more: Headers) -> None:
        own = {
            "Content-Type": kind,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        for name, value in [*((name, own[name]) for name in own.keys() - dict(more).keys()), *more]:
            self.send_header(name, value)
        self.end_headers()

    def send_response_only(self, code: int, message: str | None = None) -> None:
        """Begins every answer with a status line, which one to a request of HTTP/0.9, or of no version, has not."""
        self.request_version = self.protocol_version
        super().send_response_only(code, message)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""
