"""The agent's HTTP server: /metrics, /profile and, in a pod, /output. It never blocks the loop.

The answer to /metrics has the agent's rows of `contract.PROMETHEUS`, merged with the metrics that
the processes of this host serve on Unix sockets. A process that does not answer in time is omitted.
"""

from __future__ import annotations

import errno
import json
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import PROTOCOL_VERSION
from jaxlaunch.launcher.agent.gang.progress import RankProgress
from jaxlaunch.launcher.agent.io.link import open_listener
from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop, Timer
from jaxlaunch.records.run_numbers import goodput_ratio

MAX_REQUEST_BYTES, MAX_EXPOSITION_BYTES = 8 * 1024, 4 * 1024 * 1024
# Beyond this number, a new connection replaces the oldest one that waits for its client.
MAX_CONNECTIONS = 16
REQUEST_TIMEOUT_S, CHILD_TIMEOUT_S = 5.0, 1.0
# Pause before the next connection is accepted if no descriptor was free.
ACCEPT_RETRY_S = 1.0
# A scrape is expected within this time. Prometheus scrapes every minute by default.
SCRAPE_INTERVAL_S = 75.0

PLAIN, JSON = "text/plain; version=0.0.4; charset=utf-8", "application/json"

# Returns the answer to /metrics, given the metrics of this host's processes.
RenderExposition = Callable[[Sequence[str]], str]
# Returns the status and the answer, given the method, the query and whether the client is local.
Reply = Callable[[str, str, bool], tuple[HTTPStatus, Mapping[str, Any]]]


class MetricsServer:
    """HTTP server that listens until the agent ends."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        list_sockets: Callable[[], Sequence[str]],
        render_exposition: RenderExposition,
        replies: Mapping[str, Reply],
    ) -> None:
        """Listen on a port.

        Args:
            loop: Event loop of the agent.
            host: Address to listen on.
            port: Port to listen on, or 0 for any free one.
            list_sockets: Returns the paths of the sockets of this host's processes.
            render_exposition: Returns the answer to /metrics, given the metrics of the processes.
            replies: By path, functions whose results are sent as JSON.

        Raises:
            OSError: The port is in use.
        """
        self.loop, self.replies = loop, replies
        self.list_sockets, self.render_exposition = list_sockets, render_exposition
        # Open connections, oldest first.
        self._open: dict[Request, None] = {}
        self._scraped_at: float | None = None
        self._on_scrape: Callable[[], None] = lambda: None
        self._listener = open_listener(host, port)
        self._listener.setblocking(False)
        self._start_accepting()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._listener.getsockname()[1])

    def after_scrape(self, callback: Callable[[], None]) -> None:
        """Call back after the next scrape, or at once if nobody scrapes this server."""
        if self._scraped_at is None or time.monotonic() - self._scraped_at > SCRAPE_INTERVAL_S:
            callback()
            return
        self._on_scrape = callback
        self.loop.call_later(SCRAPE_INTERVAL_S, callback)

    def record_scrape(self) -> None:
        """Record that a scrape was answered."""
        self._scraped_at = time.monotonic()
        self._on_scrape()

    def remove_request(self, request: Request) -> None:
        """Remove a closed connection."""
        del self._open[request]

    def _start_accepting(self) -> None:
        self.loop.watch(self._listener.fileno(), READ, lambda mask: self._accept_request())

    def _accept_request(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # If no descriptor is free, the listener would be ready again at once. Otherwise the
            # client closed the connection before it was accepted.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.loop.unwatch(self._listener.fileno())
                self.loop.call_later(ACCEPT_RETRY_S, self._start_accepting)
            return
        if len(self._open) >= MAX_CONNECTIONS:
            slow = next((request for request in self._open if request.waits_for_client), None)
            if slow is None:
                sock.close()
                return
            slow.close()
        self._open[Request(self, sock)] = None


class Request:
    """A connection with one request and one response."""

    def __init__(self, server: MetricsServer, sock: socket.socket) -> None:
        sock.setblocking(False)
        # Whether the client has to send its request or to read the response.
        self.waits_for_client = True
        self._server, self._loop, self._sock = server, server.loop, sock
        self._request, self._response = bytearray(), bytearray()
        self._is_scrape = False
        self._timeout = self._loop.call_later(REQUEST_TIMEOUT_S, self.close)
        self._loop.watch(sock.fileno(), READ, lambda mask: self._on_readable())

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._request += data
        if not data or len(self._request) > MAX_REQUEST_BYTES:
            self.close()
            return
        if b"\r\n\r\n" not in self._request:
            return
        self._loop.unwatch(self._sock.fileno())
        self.waits_for_client = False
        request_line, *headers = bytes(self._request).decode(errors="replace").split("\r\n")
        method, _, target = request_line.partition(" ")
        path, _, query = target.partition(" ")[0].partition("?")
        is_from_page = any(line.lower().startswith("origin:") for line in headers)
        self._route(method, path, query, is_from_page)

    def _route(self, method: str, path: str, query: str, is_from_page: bool) -> None:
        server = self._server
        if path in server.replies and is_from_page:
            fault = {"error": f"web pages may not ask for {path}"}
            self._respond(HTTPStatus.FORBIDDEN, json.dumps(fault) + "\n", JSON)
        elif path in server.replies:
            status, answer = server.replies[path](method, query, self._is_local())
            self._respond(status, json.dumps(answer) + "\n", JSON)
        elif method == "GET" and path in ("/metrics", "/metrics/"):
            self._is_scrape = True
            MetricsGatherer(self._loop, server.list_sockets(), self._respond_metrics)
        else:
            paths = ", ".join(("/metrics", *server.replies))
            self._respond(HTTPStatus.NOT_FOUND, f"not found: this server has {paths}\n")

    def _respond_metrics(self, texts: Sequence[str]) -> None:
        self._respond(HTTPStatus.OK, self._server.render_exposition(texts))

    def _is_local(self) -> bool:
        try:
            address = str(self._sock.getpeername()[0])
        except OSError:
            # The client has closed the connection.
            return False
        # Not all of 127.0.0.0/8 is local: the sidecar of a service mesh connects from 127.0.0.6 for
        # remote clients.
        return address.removeprefix("::ffff:") in ("127.0.0.1", "::1")

    def _respond(self, status: HTTPStatus, text: str, content_type: str = PLAIN) -> None:
        body = text.encode(errors="backslashreplace")
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._response += head.encode() + body
        self.waits_for_client = True
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock.fileno(), WRITE, lambda mask: self._on_writable())

    def _on_writable(self) -> None:
        try:
            sent_bytes = self._sock.send(self._response)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        del self._response[:sent_bytes]
        if not self._response:
            self.close()
            if self._is_scrape:
                self._server.record_scrape()

    def close(self) -> None:
        """Close the connection, even without an answer."""
        self._timeout.cancel()
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._server.remove_request(self)


class MetricsGatherer:
    """Reads several Unix sockets at once. Sockets that are too slow are omitted."""

    def __init__(
        self, loop: Loop, paths: Sequence[str], on_done: Callable[[Sequence[str]], None]
    ) -> None:
        self._loop, self._on_done = loop, on_done
        self._open: dict[socket.socket, bytearray] = {}
        self._texts: list[str] = []
        self._timeout: Timer = loop.call_later(CHILD_TIMEOUT_S, self._finish)
        for path in paths:
            self._connect_socket(path)
        if not self._open:
            self._finish()

    def _connect_socket(self, path: str) -> None:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            # No descriptor is free.
            return
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:
            # The process does not serve metrics, or not yet, or its backlog is full.
            sock.close()
            return
        self._open[sock] = bytearray()
        self._loop.watch(sock.fileno(), READ, lambda mask: self._read_socket(sock))

    def _read_socket(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            self._close_socket(sock, is_whole=False)
            return
        self._open[sock] += data
        if not data or len(self._open[sock]) > MAX_EXPOSITION_BYTES:
            self._close_socket(sock, is_whole=not data)

    def _close_socket(self, sock: socket.socket, is_whole: bool) -> None:
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
        on_done, self._on_done = self._on_done, lambda texts: None
        on_done(self._texts)


# --- the text of /metrics -------------------------------------------------------------------------

NAN = float("nan")
# Name of the metric at the beginning of a sample.
_SAMPLE_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
Labels = tuple[str, ...]
# Values of a metric by the values of its labels.
Values = Mapping[Labels, float]


def render_agent_metrics(
    generation: int,
    gang: Mapping[str, Any],
    ranks: Mapping[int, RankProgress],
    timeouts_s: Mapping[str, float | None],
    silence_s: float,
    memory: Mapping[str, float | None],
    now: float,
) -> str:
    """Return the agent's rows in the text format. An unknown value is NaN, never missing.

    Args:
        generation: Number of the set of pods.
        gang: Newest state of the gang that the leader sent.
        ranks: Progress of the ranks of this host.
        timeouts_s: Timeouts of the job by phase.
        silence_s: Time since the last message of the leader.
        memory: Memory of this host in bytes, by kind.
        now: Monotonic time.
    """
    values = _gang_values(generation, gang, silence_s)
    values |= _rank_values(ranks, gang.get("foremost"), timeouts_s, now)
    values["jaxlaunch_host_memory_bytes"] = {
        (kind,): _float_or_nan(size) for kind, size in memory.items()
    }
    lines: list[str] = []
    for row in contract.PROMETHEUS:
        if row.exporter == "agent":
            lines += [f"# HELP {row.name} {row.help}", f"# TYPE {row.name} {row.type}"]
            for texts, value in values[row.name].items():
                pairs = zip(row.labels, texts, strict=True)
                labels = ",".join(f'{label}="{text}"' for label, text in pairs)
                number = "NaN" if value != value else repr(value)
                lines.append(f"{row.name}{f'{{{labels}}}' if labels else ''} {number}")
    return "\n".join(lines) + "\n"


def merge_expositions(texts: Iterable[str]) -> str:
    """Merge expositions so that each metric appears once. Malformed lines are omitted."""
    # By name of the metric, its comment lines and its samples.
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        name = ""
        for line in text.split("\n"):
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                header, _ = families.setdefault(name, ([], []))
                start = line[: len("# HELP ") + len(name) + 1]
                if not any(comment.startswith(start) for comment in header):
                    header.append(line)
            elif (sample := _SAMPLE_NAME.match(line)) is not None:
                families.setdefault(name or sample[0], ([], []))[1].append(line)
    return "".join("\n".join([*header, *samples]) + "\n" for header, samples in families.values())


def _gang_values(generation: int, gang: Mapping[str, Any], silence_s: float) -> dict[str, Values]:
    seconds = {
        cause: float(gang.get("seconds", {}).get(cause, 0.0)) for cause in contract.CLOCK_CAUSES
    }
    causes = [outcome.cause for outcome in contract.OUTCOMES.values()]
    ended, left = gang.get("ended", {}), gang.get("left", {})
    heartbeat_age_s = max(silence_s, float(gang.get("silence_s", 0.0)))
    return {
        "jaxlaunch_build_info": {(PROTOCOL_VERSION, platform.python_version()): 1.0},
        "jaxlaunch_goodput_ratio": _unlabelled_value(goodput_ratio(seconds)),
        "jaxlaunch_clock_seconds": {(cause,): spent for cause, spent in seconds.items()},
        "jaxlaunch_restarts_total": {(cause,): float(ended.get(cause, 0)) for cause in causes},
        "jaxlaunch_restarts_left": {
            (limit,): float(left.get(limit, NAN)) for limit in ("crash", "in_place", "preempted")
        },
        "jaxlaunch_last_verdict_code": _unlabelled_value(gang.get("code")),
        "jaxlaunch_generation": _unlabelled_value(generation),
        "jaxlaunch_attempt": _unlabelled_value(gang.get("attempt")),
        "jaxlaunch_heartbeat_age_seconds": _unlabelled_value(heartbeat_age_s),
    }


def _rank_values(
    ranks: Mapping[int, RankProgress],
    foremost: int | None,
    timeouts_s: Mapping[str, float | None],
    now: float,
) -> dict[str, Values]:
    steps: dict[Labels, float] = {}
    lags: dict[Labels, float] = {}
    seconds_left: dict[Labels, float] = {}
    phases: dict[Labels, float] = {}
    for rank, progress in ranks.items():
        label, status = str(rank), progress.status
        timeout = progress.find_deadline(timeouts_s, now)
        step, lags[(label,)] = status.step, NAN
        steps[(label,)] = _float_or_nan(step)
        if step is not None and foremost is not None:
            lags[(label,)] = float(max(0, foremost - step))
        seconds_left[(label,)] = NAN if timeout is None else timeout.left_s
        phases |= {(label, phase): float(phase == status.phase) for phase in contract.PHASES}
    living_count = sum(progress.status.exit is None for progress in ranks.values())
    return {
        "jaxlaunch_children_up": _unlabelled_value(living_count),
        "jaxlaunch_phase": phases,
        "jaxlaunch_phase_timeout_left_seconds": seconds_left,
        "jaxlaunch_rank_step": steps,
        "jaxlaunch_rank_lag_steps": lags,
    }


def _unlabelled_value(value: float | None) -> Values:
    return {(): _float_or_nan(value)}


def _float_or_nan(value: float | None) -> float:
    return NAN if value is None else float(value)
