"""Server of the dashboard in a cluster: the table and the pages of jobs that the viewer may see.

The server has no rights of its own. It answers a viewer with requests to the API server that carry
the viewer's own token, and keeps no answer longer than the request or the stream for which it was
read. A viewer who may list no jobs therefore sees none. The token comes in the header
Authorization, or in a cookie after a sign-in. The cookie holds the token encrypted with a key that
exists only in this process, because a browser sends it to every port of `localhost`. Input of a
viewer is forwarded only in the header Authorization and, for the names of a namespace and a job, in
the path of a request; it is never stored or logged.
"""

from __future__ import annotations

import functools
import html
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from jaxlaunch.launcher.errors import ApiError, ClusterError
from jaxlaunch.launcher.report import compare, page
from jaxlaunch.launcher.report.cluster_jobs import JobPages
from jaxlaunch.launcher.report.run import Report
from jaxlaunch.launcher.report.server import (
    TEXT,
    PageHandler,
    PageServer,
    link_row,
    link_runs,
)
from jaxlaunch.launcher.report.tokens import (
    BadTokenError,
    Cookies,
    bearer_token,
    check_token,
    set_cookie,
)
from jaxlaunch.launcher.wording import escape_controls

# Seconds between two reads of all jobs for one viewer.
LIST_PERIOD_S = 10.0
# After this time the browser connects again, and the token is checked again.
MAX_STREAM_S = 600.0
# The largest number of open streams.
MAX_STREAMS = 256
# The largest number of open connections, each of which has a thread.
MAX_CONNECTIONS = 512
# The largest number of concurrent requests to the API server, of all viewers.
MAX_READS = 16
MAX_FORM_BYTES = 64 * 1024
# The body of a refused request is read up to here, because a browser sends all of it before it
# reads the answer.
_MAX_DRAINED_BYTES = 8 * 1024 * 1024
# The names by which `kubectl port-forward` reaches the server.
OWN_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Sec-Fetch-Site of an address that was typed, and of a request from our own page.
_SAME_SITE = ("none", "same-origin")
_HOST = re.compile(
    r"(\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)\.?(?::\d{1,5})?", re.IGNORECASE
)

NOT_ACCEPTED = (
    "The cluster does not accept this token: it is wrong or has expired. Sign in with a new one."
)
NO_ANSWER = "The API server does not answer; try again later."
NO_PAGE = "You may not read jobs in this namespace, or this dashboard does not show it."
NO_RIGHTS = (
    "You may not list jobs in any namespace that this dashboard shows. Ask an administrator for "
    "the rights of a viewer (rbac.viewers of the chart)."
)
# The answers that another token may change.
_FORM_STATUSES = (HTTPStatus.OK, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_FORM = (
    '<form method="post" action="/sign-in" class="controls">',
    '<label>Token <input type="password" name="token" autocomplete="off" required '
    "autofocus></label>",
    "<button>Sign in</button>",
    "</form>",
    '<p class="quiet">A token of the cluster is your own, or that of a ServiceAccount: '
    "<code>kubectl create token NAME --namespace NAMESPACE</code> prints one. This page shows what "
    "the token may see, and keeps it in a cookie of this browser, encrypted, for at most twelve "
    "hours.</p>",
)

# Returns the jobs of the cluster as the owner of a token may see them.
OpenJobs = Callable[[str], JobPages]


class Refusal(NamedTuple):
    """The reason why a viewer sees nothing, as a sentence."""

    status: HTTPStatus
    sentence: str


def _is_page(parts: Sequence[str]) -> bool:
    """Return whether a path has the form of the page of a job or a sweep."""
    if len(parts) != 3 or parts[0] not in ("job", "sweep"):
        return False
    return all(compare.OBJECT_NAME.fullmatch(name) for name in parts[1:])


class Server(PageServer):
    """Server of the jobs of `namespaces`, for requests to one of the host names `hosts`.

    It listens on all addresses of the pod.
    """

    def __init__(
        self, open_jobs: OpenJobs, namespaces: Sequence[str], hosts: Iterable[str], port: int = 0
    ) -> None:
        self.open_jobs, self._namespaces = open_jobs, namespaces
        self.hosts = OWN_HOSTS | {host.lower() for host in hosts}
        self.cookies = Cookies()
        self._reads = threading.BoundedSemaphore(MAX_READS)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        has_dual_stack = socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if has_dual_stack else socket.AF_INET
        super().__init__("::" if has_dual_stack else "0.0.0.0", port, Handler, MAX_STREAMS)

    def server_bind(self) -> None:
        """Bind the port for IPv4 as well as for IPv6."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in its own thread, or close it if there are too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and allow another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def read_table(self, jobs: JobPages) -> dict[str, Any] | Refusal:
        """Return the rows of the jobs that a viewer may list, and what could not be read."""
        rows, groups = list[dict[str, Any]](), list[dict[str, Any]]()
        unread, hidden, failed = list[str](), 0, 0
        for namespace in self._namespaces:
            try:
                with self._reads:
                    table = jobs.read_table(namespace)
            except ApiError as error:
                if error.status == HTTPStatus.UNAUTHORIZED:
                    return Refusal(HTTPStatus.UNAUTHORIZED, NOT_ACCEPTED)
                if error.status == HTTPStatus.FORBIDDEN:
                    hidden += 1
                    continue
                failed += 1
                subject = f"The jobs of namespace {namespace}"
                unread.append(f"{subject} could not be read: {error.message}")
            except ClusterError:
                return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, NO_ANSWER)
            else:
                rows += table.rows
                groups += table.groups
                unread += table.unread
        if hidden == len(self._namespaces):
            return Refusal(HTTPStatus.FORBIDDEN, NO_RIGHTS)
        # No namespace has accepted the token, so it may be invalid.
        if hidden + failed == len(self._namespaces):
            sentence = "The API server refuses to list jobs; try again later."
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence)
        if hidden:
            count = f"{hidden} of {len(self._namespaces)} namespaces"
            unread.append(f"{count} are left out: you may not list jobs there.")
        return {
            "runs": [link_row(row, "/") for row in rows],
            "groups": [link_row(group, "/") for group in groups],
            "unread": [escape_controls(text) for text in unread],
            "is_cluster": True,
        }

    def read_page(
        self, jobs: JobPages, kind: str, namespace: str, name: str
    ) -> dict[str, Any] | Refusal:
        """Return the data of the page of a job or a sweep, or why the viewer does not see it.

        The answer is the same for a namespace that this dashboard does not show and for one in
        which the viewer may not read jobs.
        """
        if namespace not in self._namespaces:
            return Refusal(HTTPStatus.FORBIDDEN, NO_PAGE)

        def read() -> dict[str, Any] | None:
            if kind == "sweep":
                return jobs.read_sweep(namespace, name)
            report = jobs.read_job(namespace, name)
            return None if report is None else report.to_json()

        missing = f"Namespace {namespace} has no {kind} of this name."
        data = self._read_data(kind, read, missing)
        return link_runs(data, "/") if kind == "sweep" and isinstance(data, dict) else data

    def read_comparison(self, jobs: JobPages, ids: Sequence[str]) -> dict[str, Any] | Refusal:
        """Return the data of the comparison of jobs, or why the viewer does not see it."""

        def read_report(run_id: str) -> Report | None:
            job = compare.parse_job_id(run_id)
            if job is None or job[0] not in self._namespaces:
                return None
            return jobs.read_job(*job, has_rank_logs=False)

        missing = "This dashboard shows fewer than two of these jobs."
        data = self._read_data("job", lambda: compare.compare_reports(read_report, ids), missing)
        return data if isinstance(data, Refusal) else link_runs(data, "/") | {"is_cluster": True}

    def _read_data(
        self, kind: str, read: Callable[[], dict[str, Any] | None], missing: str
    ) -> dict[str, Any] | Refusal:
        """Return what `read` returns, or why the viewer does not see it: None is `missing`."""
        try:
            with self._reads:
                data = read()
        except ApiError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                return Refusal(HTTPStatus.UNAUTHORIZED, NOT_ACCEPTED)
            if error.status == HTTPStatus.FORBIDDEN:
                return Refusal(HTTPStatus.FORBIDDEN, NO_PAGE)
            sentence = f"The {kind} could not be read: {escape_controls(error.message)}"
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence)
        except ClusterError:
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, NO_ANSWER)
        return Refusal(HTTPStatus.NOT_FOUND, missing) if data is None else data


class Handler(PageHandler):
    """Handler of one request, after which the connection is closed.

    A proxy may send the requests of several viewers on one connection, and none of them must get
    the answer to another.
    """

    server: Server

    def do_GET(self) -> None:
        """Answer with the table, its stream, the form to sign in, or a refusal."""
        self.close_connection = True
        # The kubelet and load balancers request this path, by any host name.
        if (path := self._request_path()) == "/healthz":
            self.send_answer(HTTPStatus.OK, TEXT, b"ok\n")
            return
        parts = path.split("/")[1:]
        if not self._is_ours(may_link_here=path in ("/", "/compare") or _is_page(parts)):
            self._send_wrong_host()
            return
        match parts:
            case [""]:
                self._send_data("runs", "Jobs", self._read_table)
            case ["job" | "sweep" as kind, namespace, name] if _is_page(parts):
                read = functools.partial(self._read_page, kind, namespace, name)
                self._send_data("run" if kind == "job" else kind, name, read)
            case ["compare"]:
                self._send_data("compare", "Compare", self._read_comparison)
            case ["events"]:
                self._stream_data(self._read_table)
            case ["job" | "sweep" as kind, namespace, name, "events"] if _is_page(parts[:3]):
                self._stream_data(functools.partial(self._read_page, kind, namespace, name))
            case ["sign-out"]:
                self._send_sign_in(
                    Refusal(HTTPStatus.OK, "You have signed out."), deletes_cookie=True
                )
            case _:
                self.send_refusal(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_data(
        self, kind: str, title: str, read: Callable[[JobPages], dict[str, Any] | Refusal]
    ) -> None:
        """Answer with a page and its stream, or with the form to sign in."""
        if isinstance(data := self._read_as_viewer(read), Refusal):
            self._send_sign_in(data, deletes_cookie=data.status == HTTPStatus.UNAUTHORIZED)
            return
        path = self._request_path()
        links = {"sign_out": "" if self._has_token_header() else "/sign-out"}
        if kind != "compare":
            links["events"] = f"{path.rstrip('/')}/events"
        links |= {"compare": "/compare"} if kind == "runs" else {"home": "/"}
        self.send_page(page.render_page(kind, title, {**data, **links}))

    def _stream_data(self, read: Callable[[JobPages], dict[str, Any] | Refusal]) -> None:
        """Send the data of a page whenever it has changed, with the newest rights of the token.

        What was read of a job's logs is kept until the stream ends.
        """
        jobs = list[JobPages]()
        # A list, because a variable would keep the first event as long as the stream is open.
        unsent = [self._read_as_viewer(read, jobs)]
        if isinstance(unsent[0], Refusal):
            self.send_refusal(*unsent[0])
            return

        def read_next() -> dict[str, Any] | None:
            data = unsent.pop() if unsent else self._read_as_viewer(read, jobs)
            return None if isinstance(data, Refusal) else data

        self.stream_events(read_next, LIST_PERIOD_S, MAX_STREAM_S)

    def do_POST(self) -> None:
        """Sign in with the token of a form."""
        self.close_connection = True
        try:
            text = self._read_form()
            if not self._is_ours(may_link_here=False):
                self._send_wrong_host()
                return
            if self._request_path() != "/sign-in":
                self.send_refusal(HTTPStatus.NOT_FOUND, "there is no such page")
                return
            token = check_token(text)
            cookie = self.server.cookies.seal_token(token, is_secure=self._is_secure())
        except BadTokenError as error:
            self._send_sign_in(Refusal(HTTPStatus.UNAUTHORIZED, str(error)))
            return
        if isinstance(table := self.server.read_table(self.server.open_jobs(token)), Refusal):
            self._send_sign_in(table)
            return
        self.send_answer(
            HTTPStatus.SEE_OTHER, TEXT, b"", [("Location", "/"), ("Set-Cookie", cookie)]
        )

    def _read_form(self) -> str:
        """Return the token in a form. Raises BadTokenError if the body is another or too long."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", length):
            raise BadTokenError("The form has no length: send Content-Length.")
        if (remaining := int(length)) > MAX_FORM_BYTES:
            remaining = min(remaining, _MAX_DRAINED_BYTES)
            while remaining and (part := self.rfile.read(min(remaining, MAX_FORM_BYTES))):
                remaining -= len(part)
            raise BadTokenError(f"This is not a token: a form has at most {MAX_FORM_BYTES} bytes.")
        form = self.rfile.read(remaining).decode("latin-1")
        try:
            fields = urllib.parse.parse_qs(form, max_num_fields=8)
        except ValueError:
            raise BadTokenError("The form has more fields than a token.") from None
        return "".join(fields.get("token", ()))

    def _request_path(self) -> str:
        target = self.parse_target()
        return "" if target is None else target.path

    def _read_table(self, jobs: JobPages) -> dict[str, Any] | Refusal:
        return self.server.read_table(jobs)

    def _read_comparison(self, jobs: JobPages) -> dict[str, Any] | Refusal:
        target = self.parse_target()
        query = "" if target is None else target.query
        return self.server.read_comparison(jobs, urllib.parse.parse_qs(query).get("run", []))

    def _read_page(
        self, kind: str, namespace: str, name: str, jobs: JobPages
    ) -> dict[str, Any] | Refusal:
        return self.server.read_page(jobs, kind, namespace, name)

    def _read_as_viewer(
        self,
        read: Callable[[JobPages], dict[str, Any] | Refusal],
        jobs: list[JobPages] | None = None,
    ) -> dict[str, Any] | Refusal:
        """Return what the token of this request, from header or cookie, may see.

        `jobs` has the jobs as the viewer of a stream sees them, after the first read.
        """
        opened = [] if jobs is None else jobs
        try:
            token = bearer_token(self.headers.get_all("Authorization", []))
            if token is None:
                token = self.server.cookies.read_token(self.headers.get_all("Cookie", []))
            token = check_token(token or "")
        except BadTokenError as error:
            return Refusal(HTTPStatus.UNAUTHORIZED, str(error))
        if not opened:
            opened.append(self.server.open_jobs(token))
        return read(opened[0])

    def _has_token_header(self) -> bool:
        """Return whether a proxy or program sends the token, so that a form cannot change it."""
        return "Authorization" in self.headers

    def _send_sign_in(self, refusal: Refusal, *, deletes_cookie: bool = False) -> None:
        """Answer with a sentence, and with the sign-in form if it helps."""
        is_link = self.headers.get("Sec-Fetch-Site", "none") not in _SAME_SITE
        headers = [("Referrer-Policy", "same-origin")]
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            headers.append(("WWW-Authenticate", "Bearer"))
        # A request from another site comes without the cookie, and must not delete it.
        if deletes_cookie and not is_link:
            for is_secure in (False, True):
                headers.append(("Set-Cookie", set_cookie("", is_secure=is_secure) + "; Max-Age=0"))
        has_form = not self._has_token_header() and refusal.status in _FORM_STATUSES
        may_be_signed_in = is_link and has_form
        link_text = "Try again."
        if may_be_signed_in:
            link_text = "Show the jobs, if you have signed in already."
        elif refusal.status == HTTPStatus.NOT_FOUND:
            link_text = "All jobs"
        # A person who followed a link to a page, and has signed in, comes to that page.
        path = self._request_path()
        target = path if may_be_signed_in and _is_page(path.split("/")[1:]) else "/"
        link = ""
        if is_link or not has_form:
            link = f'<p><a href="{html.escape(target)}">{link_text}</a></p>'
        body = (
            f'<p role="alert">{html.escape(refusal.sentence)}</p>',
            *(_FORM if has_form else ()),
            link,
        )
        text = page.render_form("Sign in", ("<main>", "<h1>Jobs</h1>", *body, "</main>"))
        self.send_page(text, refusal.status, headers)

    def _is_ours(self, *, may_link_here: bool) -> bool:
        """Return whether the request is for one of our hosts, and from our own page or a person.

        With `may_link_here` it may also come from a link on another site, which cannot read the
        page.
        """
        hosts = self.headers.get_all("Host", [])
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None or match[1].lower() not in self.server.hosts:
            return False
        own_origins = {f"{scheme}://{hosts[0]}" for scheme in ("http", "https")}
        if not own_origins.issuperset(self.headers.get_all("Origin", [])):
            return False
        if self.headers.get("Sec-Fetch-Site", "none") in _SAME_SITE:
            return True
        navigation = self.headers.get("Sec-Fetch-Mode"), self.headers.get("Sec-Fetch-Dest")
        return may_link_here and navigation == ("navigate", "document")

    def _is_secure(self) -> bool:
        """Return whether the browser uses HTTPS, to a proxy in front of this pod."""
        forwarded = self.headers.get("X-Forwarded-Proto", "").partition(",")[0].strip()
        return forwarded == "https" or self.headers.get("Origin", "").startswith("https://")

    def _send_wrong_host(self) -> None:
        self.send_refusal(
            HTTPStatus.FORBIDDEN,
            "This request comes from another site, or asks for a host that the dashboard is not "
            "configured for: `webDashboard.hosts` of the chart lists its names.",
        )
