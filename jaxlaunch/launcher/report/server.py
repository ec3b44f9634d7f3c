"""Server of the dashboard on this machine: a table of runs, a page of each, and comparisons.

It listens only on the loopback address, and answers only requests whose path has the secret token
of the printed address. The headers Host and Origin are checked, so that pages of other sites cannot
use the server. No path of a request is opened as a file, and nothing is logged, because an address
or a header may contain a token.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import math
import os
import secrets
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.report import compare, page, sweep_page
from jaxlaunch.launcher.report.cluster_jobs import JobPages
from jaxlaunch.launcher.report.run import Report, RunReader
from jaxlaunch.launcher.report.run_files import brief_stamp, read_brief
from jaxlaunch.launcher.report.sweep_page import MetricCatalog, SweepReader, SweepRecord
from jaxlaunch.launcher.wording import escape_controls, os_error_reason
from jaxlaunch.records.run_numbers import RunNumbers
from jaxlaunch.runs import layout

LOOPBACK = "127.0.0.1"
# Seconds between two reads of a run.
RUN_PERIOD_S = 1.0
# Seconds between two reads of all runs.
LIST_PERIOD_S = 2.0
# Seconds between two reads of a job on a cluster.
JOB_PERIOD_S = 5.0
# An idle stream sends a comment after this time. The write fails if the client has gone.
KEEPALIVE_S = 15.0
# The largest number of open streams.
MAX_STREAMS = 32
# The largest number of runs whose curves are kept in memory, about 1 MB for a run of 1,000 points,
# and of sweeps whose rows are kept.
MAX_READERS, MAX_SWEEPS = 16, 4
HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

Headers = Sequence[tuple[str, str]]


class PageServer(http.server.ThreadingHTTPServer):
    """HTTP server with streams. Raises UserError if the port cannot be used."""

    daemon_threads = True

    def __init__(
        self, address: str, port: int, handler: type[PageHandler], max_streams: int
    ) -> None:
        self.streams = threading.BoundedSemaphore(max_streams)
        self.is_closing = threading.Event()
        try:
            super().__init__((address, port), handler)
        except OSError as error:
            message = f"Port {port} cannot be used: {os_error_reason(error)}."
            raise UserError(message, "choose another with --port, or leave it out.") from None

    def server_bind(self) -> None:
        """Bind the port without a DNS lookup of the address."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an exception, unless the client has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def shutdown(self) -> None:
        """Shut down, and end the streams too."""
        self.is_closing.set()
        super().shutdown()


class PageHandler(http.server.BaseHTTPRequestHandler):
    """Handler of one request, whose answers have a status line and restrictive headers."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 30
    server_version, sys_version = "jaxlaunch", ""

    def parse_target(self) -> urllib.parse.SplitResult | None:
        """Return the address of the request, or None if it is invalid."""
        try:
            return urllib.parse.urlsplit(self.path)
        except ValueError:
            return None

    def send_page(
        self, text: str, status: HTTPStatus = HTTPStatus.OK, headers: Headers = ()
    ) -> None:
        """Answer with a page."""
        self.send_answer(status, HTML, text.encode("utf-8", "backslashreplace"), headers)

    def send_refusal(self, status: HTTPStatus, text: str) -> None:
        """Answer with a sentence, and close the connection."""
        self.close_connection = True
        self.send_answer(status, TEXT, f"{text}\n".encode())

    def send_answer(
        self, status: HTTPStatus, content_type: str, body: bytes, headers: Headers = ()
    ) -> None:
        """Answer with a body. `headers` replace default headers of the same name."""
        self.send_response(status)
        # Without this header a browser would send its next request to a closed connection.
        connection = [("Connection", "close")] * self.close_connection
        self._send_headers(
            content_type, [("Content-Length", str(len(body))), *connection, *headers]
        )
        self.wfile.write(body)

    def stream_events(
        self, read: Callable[[], dict[str, Any] | None], period_s: float, limit_s: float
    ) -> None:
        """Send the value of `read` as an event whenever it has changed.

        The stream ends if the value is None, if the client leaves, or after `limit_s` seconds. Then
        a browser that still shows the page connects again.
        """
        if not self.server.streams.acquire(blocking=False):
            self.send_refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
            return
        try:
            self.close_connection = True
            self.send_response(HTTPStatus.OK)
            self._send_headers("text/event-stream", [("Connection", "close")])
            sent_digest, sent_at, deadline = b"", time.monotonic(), time.monotonic() + limit_s
            is_closing = self.server.is_closing
            while not is_closing.is_set() and time.monotonic() < deadline:
                if (digest := self._send_event(read, sent_digest)) is None:
                    break
                if digest != sent_digest:
                    sent_digest, sent_at = digest, time.monotonic()
                elif time.monotonic() - sent_at > KEEPALIVE_S:
                    sent_at = time.monotonic()
                    self.wfile.write(b": nothing new\n\n")
                is_closing.wait(period_s)
        finally:
            self.server.streams.release()

    def _send_event(
        self, read: Callable[[], dict[str, Any] | None], sent_digest: bytes
    ) -> bytes | None:
        """Send the value of `read` unless it was sent before. Return its digest, if it has one.

        A page may have megabytes, so nothing of it is kept until the next one.
        """
        if (data := read()) is None:
            return None
        text = page.to_json(data).encode()
        if (digest := hashlib.blake2b(text).digest()) != sent_digest:
            self.wfile.write(b"event: run\ndata: " + text + b"\n\n")
        return digest

    def _send_headers(self, content_type: str, headers: Headers) -> None:
        for name, value in {"Content-Type": content_type, **_HEADERS}.items():
            if name not in dict(headers):
                self.send_header(name, value)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def send_response_only(self, code: int, message: str | None = None) -> None:
        """Send a status line, even for a request of HTTP/0.9 or without a version."""
        self.request_version = self.protocol_version
        super().send_response_only(code, message)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def table_row(numbers: RunNumbers, *, name: str, why: str, **fields: Any) -> dict[str, Any]:
    """Return a row of the table of runs. `why` is escaped and shortened."""
    texts = {"name": escape_controls(name), "why": escape_controls(why)[:300]}
    return {"step": numbers.step, "goodput": numbers.goodput, **texts, **fields}


def link_row(row: Mapping[str, Any], home: str) -> dict[str, Any]:
    """Return a row whose page, if it has one, has an address below `home`."""
    return {**row, "page": f"{home}{row['page']}" if row["page"] else ""}


def link_runs(data: Mapping[str, Any], home: str) -> dict[str, Any]:
    """Return the data of a page with the addresses of its runs below `home`."""
    runs = [{**run, "page": run["page"] and f"{home}{run['page']}"} for run in data["runs"]]
    return {**data, "runs": runs}


class RunCatalog:
    """The runs below a folder, and the jobs of namespaces of a cluster.

    Runs, sweeps and jobs are read again when the table is older than LIST_PERIOD_S.
    """

    def __init__(
        self, folder: Path | None, jobs: JobPages | None = None, namespaces: Sequence[str] = ()
    ) -> None:
        self._folder = folder
        # Namespaces, each with the jobs of its cluster.
        self._jobs = {} if jobs is None else dict.fromkeys(namespaces, jobs)
        self._lock = threading.Lock()
        self._table: tuple[float, dict[str, Path], dict[str, Any]] | None = None
        # Sweeps by their ids.
        self._sweeps: dict[str, SweepRecord] = {}
        self._readers: dict[str, tuple[threading.Lock, RunReader]] = {}
        self._rows: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._metrics = MetricCatalog()
        self._sweep_readers: dict[str, tuple[threading.Lock, SweepReader]] = {}

    def read_table(self) -> dict[str, Any]:
        """Return the rows of all runs and jobs."""
        with self._lock:
            return self._list_runs()[1]

    def _list_runs(self) -> tuple[dict[str, Path], dict[str, Any]]:
        if self._table is not None and time.monotonic() - self._table[0] < LIST_PERIOD_S:
            return self._table[1:]
        paths, rows, groups = dict[str, Path](), list[dict[str, Any]](), list[dict[str, Any]]()
        sweeps, runs = self._find_folders()
        for path in runs:
            paths[_folder_id(path)] = path
            rows.append({**self._read_row(path, None), **_link_run(path)})
            for role in layout.find_own_roles(path):
                paths[_folder_id(role)] = role
                row = self._read_row(role, None) | _link_run(role)
                rows.append(row | {"name": escape_controls(f"{path.name}/{role.name}")})
        self._sweeps = {_folder_id(path): sweep_page.read_sweep(path) for path in sweeps}
        for sweep_id, sweep in self._sweeps.items():
            name = escape_controls(sweep.folder.name)
            group = {"id": sweep_id, "name": name, "is_max": sweep.is_higher_better}
            groups.append({**group, "page": f"sweep/{sweep_id}"})
            for path in layout.find_own_runs(sweep.folder):
                paths[_folder_id(path)] = path
                row = {"group": sweep_id, "changes": sweep.changes.get(path.name, {})}
                rows.append({**self._read_row(path, sweep.metric), **row, **_link_run(path)})
        unread = list[str]()
        for namespace, jobs in self._jobs.items():
            try:
                job_table = jobs.read_table(namespace)
            except ClusterError as error:
                unread.append(str(error))
                continue
            rows += job_table.rows
            groups += job_table.groups
            unread += job_table.unread
        table = {
            "runs": rows,
            "groups": groups,
            "unread": [escape_controls(text) for text in unread],
        }
        self._table = time.monotonic(), paths, table
        return paths, table

    def _find_folders(self) -> tuple[list[Path], list[Path]]:
        """Return the folders of sweeps, and of runs outside of sweeps."""
        if self._folder is None:
            return [], []
        if layout.is_sweep(self._folder):
            return [self._folder], []
        return list(layout.find_own_sweeps(self._folder)), list(layout.find_own_runs(self._folder))

    def read_sweep_page(self, sweep_id: str, home: str) -> dict[str, Any] | None:
        """Return the data of the page of a sweep, or None if it is not in the table."""
        with self._lock:
            self._list_runs()
            sweep = self._sweeps.get(sweep_id)
            if sweep is None:
                return None
            if sweep_id not in self._sweep_readers and len(self._sweep_readers) >= MAX_SWEEPS:
                del self._sweep_readers[next(iter(self._sweep_readers))]
            new_reader = threading.Lock(), SweepReader(sweep.folder)
            lock, reader = self._sweep_readers.setdefault(sweep_id, new_reader)
        pages = {run: f"run/{_folder_id(sweep.folder / run)}" for run in sweep.changes}
        with lock:
            return link_runs(reader.read_page(pages), home)

    def read_job_page(
        self, kind: str, namespace: str, name: str, home: str
    ) -> dict[str, Any] | None:
        """Return the data of the page of a job or a sweep on the cluster, or None.

        Raises ClusterError if it cannot be read.
        """
        jobs = self._jobs.get(namespace)
        if jobs is None or not compare.OBJECT_NAME.fullmatch(name):
            return None
        if kind == "sweep":
            data = jobs.read_sweep(namespace, name)
            return None if data is None else link_runs(data, home)
        report = jobs.read_job(namespace, name)
        return None if report is None else report.to_json()

    def _read_row(self, path: Path, metric: str | None) -> dict[str, Any]:
        """Return the row of a run, read again if its files have changed or it may have ended."""
        stamp = brief_stamp(path)
        cached = self._rows.get(path)
        if cached is None or cached[0] != stamp or cached[1]["state"] in ("running", "unknown"):
            brief = read_brief(path)
            is_running = brief.state == "running"
            chosen = self._metrics.read_metric(path, metric, is_running=is_running)
            # The page computes the age from `began`, because a cached row does not change.
            row = table_row(
                brief,
                name=brief.name,
                state=brief.state,
                why=brief.message,
                steps=brief.steps,
                restarts=brief.restart_count,
                began=brief.began_at,
                owner=brief.owner,
                where="this machine",
                tags=sweep_page.describe_tags(path),
                duration_s=sweep_page.duration_s(brief),
                metric=None if chosen is None else chosen.to_json(),
            )
            cached = self._rows[path] = stamp, row
        return cached[1]

    def read_report(self, run_id: str) -> Report | None:
        """Return the report of a run or job as it is now, or None if it is not in the table.

        Raises ClusterError if the job cannot be read.
        """
        if (job := compare.parse_job_id(run_id)) is not None:
            jobs = self._jobs.get(job[0])
            return None if jobs is None else jobs.read_job(*job, has_rank_logs=False)
        with self._lock:
            path = self._list_runs()[0].get(run_id)
            if path is None:
                return None
            if run_id not in self._readers and len(self._readers) >= MAX_READERS:
                del self._readers[next(iter(self._readers))]
            new_reader = threading.Lock(), RunReader(path)
            lock, run_reader = self._readers.setdefault(run_id, new_reader)
        with lock:
            return run_reader.read_report()


def _folder_id(path: Path) -> str:
    """Return the id of a folder in URLs: a digest, because its name may have any character."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:24]


def _link_run(path: Path) -> dict[str, str]:
    return {"id": _folder_id(path), "page": f"run/{_folder_id(path)}"}


class Server(PageServer):
    """Server of the runs of a catalog. Raises UserError if the port cannot be used."""

    def __init__(self, runs: RunCatalog, port: int = 0) -> None:
        self.runs, self.token = runs, secrets.token_urlsafe(24)
        super().__init__(LOOPBACK, port, Handler, MAX_STREAMS)

    @property
    def page_url(self) -> str:
        """The address to open, with the token."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.token}/"


class Handler(PageHandler):
    """Handler of one request for a page or a stream."""

    server: Server

    def do_GET(self) -> None:
        """Answer with a page, a stream or a refusal."""
        if (target := self.parse_target()) is None:
            self.send_refusal(HTTPStatus.BAD_REQUEST, "this is not an address")
            return
        parts, token = target.path.split("/"), self.server.token
        is_ours = (
            self._is_ours()
            and len(parts) >= 3
            and secrets.compare_digest(parts[1].encode(), token.encode())
        )
        if not is_ours:
            sentence = "open the address that launcher dashboard printed"
            self.send_refusal(HTTPStatus.FORBIDDEN, sentence)
            return
        match parts[2:]:
            case [""]:
                links = {"compare": f"/{token}/compare", "events": f"/{token}/events"}
                self.send_page(page.render_page("runs", "Runs", self._make_table() | links))
            case ["events"]:
                self.stream_events(self._make_table, LIST_PERIOD_S, math.inf)
            case ["run", run_id, *end]:
                self._answer_run(run_id, end)
            case ["sweep", sweep_id] | ["sweep", sweep_id, "events"]:
                self._answer_sweep(sweep_id, parts[4:])
            case ["job" | "sweep" as kind, namespace, name, *end]:
                self._answer_job(kind, namespace, name, end)
            case ["compare"]:
                self._send_comparison(urllib.parse.parse_qs(target.query).get("run", []))
            case _:
                self.send_refusal(HTTPStatus.NOT_FOUND, "there is no such page")

    def _answer_run(self, run_id: str, end: Sequence[str]) -> None:
        """Answer with the page of a run, or with its stream."""

        def read_data() -> dict[str, Any] | None:
            report = self.server.runs.read_report(run_id)
            return None if report is None else report.to_json()

        self._answer_page("run", f"run/{run_id}", end, read_data, RUN_PERIOD_S)

    def _answer_sweep(self, sweep_id: str, end: Sequence[str]) -> None:
        """Answer with the page of a sweep, or with its stream."""
        home, runs = f"/{self.server.token}/", self.server.runs
        read_data = functools.partial(runs.read_sweep_page, sweep_id, home)
        self._answer_page("sweep", f"sweep/{sweep_id}", end, read_data, LIST_PERIOD_S)

    def _answer_page(
        self,
        kind: str,
        path: str,
        end: Sequence[str],
        read_data: Callable[[], dict[str, Any] | None],
        period_s: float,
    ) -> None:
        """Answer with a page, or if `end` is "events" with its stream."""
        # A list, because a variable would keep the first event as long as the stream is open.
        unsent = list[dict[str, Any] | None]()
        try:
            unsent.append(read_data())
        except ClusterError as error:
            self.send_refusal(HTTPStatus.SERVICE_UNAVAILABLE, escape_controls(str(error)))
            return
        if unsent[0] is None or end not in ([], ["events"]):
            self.send_refusal(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        if not end:
            home = f"/{self.server.token}/"
            links = {"home": home, "events": f"{home}{path}/events"}
            self.send_page(page.render_page(kind, unsent[0]["name"], unsent[0] | links))
            return

        def read_next() -> dict[str, Any] | None:
            # If the cluster does not answer, the stream ends, and the browser connects again.
            with contextlib.suppress(ClusterError):
                return unsent.pop() if unsent else read_data()
            return None

        self.stream_events(read_next, period_s, math.inf)

    def _answer_job(self, kind: str, namespace: str, name: str, end: Sequence[str]) -> None:
        """Answer with the page of a job or a sweep on the cluster, or with its stream."""
        home, runs = f"/{self.server.token}/", self.server.runs
        read_data = functools.partial(runs.read_job_page, kind, namespace, name, home)
        page_kind, path = "run" if kind == "job" else kind, f"{kind}/{namespace}/{name}"
        self._answer_page(page_kind, path, end, read_data, JOB_PERIOD_S)

    def _send_comparison(self, run_ids: Sequence[str]) -> None:
        try:
            data = compare.compare_reports(self.server.runs.read_report, run_ids)
        except ClusterError as error:
            self.send_refusal(HTTPStatus.SERVICE_UNAVAILABLE, escape_controls(str(error)))
            return
        if data is None:
            self.send_refusal(HTTPStatus.NOT_FOUND, "there are no such runs")
            return
        home = f"/{self.server.token}/"
        self.send_page(
            page.render_page("compare", "Compare", link_runs(data, home) | {"home": home})
        )

    def _is_ours(self) -> bool:
        """Return whether the request comes from our own page or from an address that was typed."""
        port = self.server.server_address[1]
        hosts = {f"{LOOPBACK}:{port}", f"localhost:{port}"}
        is_same_site = self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        has_own_origin = self.headers.get("Origin") in {None, *(f"http://{host}" for host in hosts)}
        return self.headers.get("Host") in hosts and is_same_site and has_own_origin

    def _make_table(self) -> dict[str, Any]:
        """Return the table of runs, with links to their pages."""
        table, home = self.server.runs.read_table(), f"/{self.server.token}/"
        rows = [link_row(row, home) for row in table["runs"]]
        groups = [link_row(group, home) for group in table["groups"]]
        return {**table, "runs": rows, "groups": groups}
