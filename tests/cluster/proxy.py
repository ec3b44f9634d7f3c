"""A proxy for a real API server that answers requests of a test's choice with faults.

It speaks plain HTTP on loopback and uses the rights of the test's own kubeconfig. Faults of
ordinary requests are those of tests.launcher.apiserver; below are those of watches.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path

from tests.cluster.harness.api import Api
from tests.launcher import apiserver
from tests.launcher.apiserver import Handler, Server

FORWARDED = ("Content-Type", "Accept")
RETURNED = ("Content-Type", "Retry-After", "Date")


class Proxy(Server):
    """A proxy for the server of a kubeconfig."""

    def __init__(self, behind: Api) -> None:
        super().__init__(Forwarding)
        self.behind = behind

    def kubeconfig(self, folder: Path, namespace: str) -> Path:
        """Write a kubeconfig for this proxy."""
        return apiserver.write_kubeconfig(folder, self.url, namespace)


class Forwarding(Handler):
    """One request and the real server's answer."""

    server: Proxy

    def _forward(self) -> None:
        connection, answer = self._ask()
        try:
            if self.query.get("watch") or self.query.get("follow"):
                self._stream(answer)
            else:
                self._pass_on(answer)
        finally:
            connection.close()

    _get = _post = _patch = _delete = _forward

    def _ask(self) -> tuple[http.client.HTTPSConnection, http.client.HTTPResponse]:
        behind = self.server.behind
        connection = http.client.HTTPSConnection(
            behind.server.netloc, context=behind.tls, timeout=60
        )
        headers = {name: self.headers[name] for name in FORWARDED if name in self.headers}
        headers |= behind.own
        connection.request(
            self.command, self.path, None if self.body is None else json.dumps(self.body), headers
        )
        return connection, connection.getresponse()

    def _pass_on(self, answer: http.client.HTTPResponse) -> None:
        body = answer.read()
        headers = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
        self.send(answer.status, body, headers.pop("Content-Type", "application/json"), **headers)

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        if answer.status != 200:
            self._pass_on(answer)
            return
        self.begin_stream()
        while data := answer.read1(65536):
            self.raw_chunk(data)
        self.end_stream()


# --- faults of a watch ----------------------------------------------------------------------------


def end_watch(handler: Handler) -> bool:
    """End the watch at once, as if its time were over."""
    handler.begin_stream()
    handler.end_stream()
    return True


def break_watch(handler: Handler) -> bool:
    """Break the connection in the middle of an event."""
    handler.begin_stream()
    handler.wfile.write(b'40\r\n{"type": "MODIFIED", "object": {"meta')
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.close()
    return True


def expire_watch(handler: Handler) -> bool:
    """Report in the stream that the version is too old."""
    handler.begin_stream()
    status = {
        "kind": "Status",
        "code": 410,
        "reason": "Expired",
        "message": "too old resource version",
    }
    handler.chunk({"type": "ERROR", "object": status})
    handler.end_stream()
    return True


def silence_watch(handler: Handler) -> bool:
    """Begin the watch and never send anything."""
    handler.begin_stream()
    handler.wfile.flush()
    handler.server.closing.wait()
    handler.close_connection = True
    return True
