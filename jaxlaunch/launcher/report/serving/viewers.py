"""The dashboard in a cluster: the table of its jobs, as whoever opens it may see them.

It has no rights. Each request of a viewer is one of their own token to the API server, of which nothing is kept for the
next request or for anybody else: who may list no jobs sees none. What a viewer sends is sent on in one place only, the
header Authorization, and is written nowhere.
"""

from __future__ import annotations

import functools
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from jaxlaunch.launcher.errors import ApiError, ClusterError
from jaxlaunch.launcher.report import page
from jaxlaunch.launcher.report.serving import sign_in, tokens
from jaxlaunch.launcher.report.serving.answers import TEXT, Answers, Listening
from jaxlaunch.launcher.wording import visible

LIST_S = 10.0  # between two looks of one viewer at all jobs
LONGEST_STREAM_S = 600.0  # after which the browser asks again, and the token is looked at again
MOST_STREAMS = 256  # at a time
MOST_CONNECTIONS = 512  # at a time: each has a thread
MOST_READS = 16  # of the API server at a time, of all viewers
LONGEST_FORM = 64 * 1024  # bytes
_LONGEST_DRAINED = 8 * 1024 * 1024  # of a body that is refused: who sends it reads the answer only afterwards
OWN_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})  # by which `kubectl port-forward` is reached
_SAME_SITE = ("none", "same-origin")  # Sec-Fetch-Site of what a person asks for, and of our own page
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)\.?(?::\d{1,5})?", re.IGNORECASE)

# The rows of the jobs of a namespace that the token may list, and what could not be read. Raises ClusterError.
Jobs = Callable[[str, str], tuple[list[dict[str, Any]], list[str]]]


class Refusal(NamedTuple):
    """Why a viewer sees nothing, in one sentence."""

    status: HTTPStatus
    sentence: str


class Server(Listening):
    """Serves the jobs of `namespaces` on all addresses of this pod, by the names `hosts` and those of OWN_HOSTS."""

    def __init__(self, jobs: Jobs, namespaces: Sequence[str], hosts: Iterable[str], port: int = 0) -> None:
        self._jobs, self._namespaces = jobs, namespaces
        self.hosts = OWN_HOSTS | {host.lower() for host in hosts}
        self.cookies = tokens.Cookies()
        self._reads = threading.BoundedSemaphore(MOST_READS)
        self._connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        has_both = socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if has_both else socket.AF_INET
        super().__init__("::" if has_both else "0.0.0.0", port, Handler, MOST_STREAMS)

    def server_bind(self) -> None:
        """Takes the port of IPv6 and of IPv4."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread of its own, or closes it where there are too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def table(self, token: str) -> dict[str, Any] | Refusal:
        """What the token may see now. Namespaces that it may not see are counted, and not named."""
        rows, unread, hidden, failed = list[dict[str, Any]](), list[str](), 0, 0
        for namespace in self._namespaces:
            try:
                with self._reads:
                    found, notes = self._jobs(token, namespace)
            except ApiError as error:
                if error.status == HTTPStatus.UNAUTHORIZED:
                    return Refusal(HTTPStatus.UNAUTHORIZED, sign_in.NOT_ACCEPTED)
                if error.status == HTTPStatus.FORBIDDEN:
                    hidden += 1
                    continue
                failed += 1
                unread.append(f"The jobs of namespace {namespace} could not be read: {error.message}")
            except ClusterError:
                return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "The API server does not answer; try again later.")
            else:
                rows += found
                unread += notes
        if hidden == len(self._namespaces):
            return Refusal(HTTPStatus.FORBIDDEN, sign_in.NO_RIGHTS)
        if hidden + failed == len(self._namespaces):  # nothing shows that this token is anybody's
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "The API server refuses to list jobs; try again later.")
        if hidden:
            unread.append(f"{hidden} of {len(self._namespaces)} namespaces are left out: you may not list jobs there.")
        return {"runs": rows, "unread": [visible(text) for text in unread]}


class Handler(Answers):
    """One request, with which its connection ends: a proxy may use one for several viewers, and what follows a request
    on it must not be answered to another of them."""

    server: Server

    def do_GET(self) -> None:
        """Answers the table, its stream or the form to sign in, or refuses."""
        self.close_connection = True
        if (path := self._path()) == "/healthz":  # asked by the kubelet and load balancers, by any name
            return self.answer(HTTPStatus.OK, TEXT, b"ok\n")
        if not self._is_ours(may_lead_here=path == "/"):
            return self._refuse_the_place()
        match path:
            case "/":
                self._table()
            case "/events":
                self._events()
            case "/sign-out":
                self._sign_in(Refusal(HTTPStatus.OK, "You have signed out."), is_over=True)
            case _:
                self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        """Signs in with the token of a form."""
        self.close_connection = True
        try:
            written = self._form()
            if not self._is_ours(may_lead_here=False):
                return self._refuse_the_place()
            if self._path() != "/sign-in":
                return self.refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            token = tokens.checked(written)
            kept = self.server.cookies.kept(token, is_secure=self._is_secure())
        except tokens.Refused as why:
            return self._sign_in(Refusal(HTTPStatus.UNAUTHORIZED, str(why)))
        if isinstance(found := self.server.table(token), Refusal):
            return self._sign_in(found)
        self.answer(HTTPStatus.SEE_OTHER, TEXT, b"", [("Location", "/"), ("Set-Cookie", kept)])

    def _form(self) -> str:
        """The token that a form sends. Raises Refused for a body that is no form, or too long for one."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", length):
            raise tokens.Refused("The form has no length: send Content-Length.")
        if (left := int(length)) > LONGEST_FORM:
            left = min(left, _LONGEST_DRAINED)
            while left and (part := self.rfile.read(min(left, LONGEST_FORM))):
                left -= len(part)
            raise tokens.Refused(f"This is not a token: a form has at most {LONGEST_FORM} bytes.")
        try:
            fields = urllib.parse.parse_qs(self.rfile.read(left).decode("latin-1"), max_num_fields=8)
        except ValueError:
            raise tokens.Refused("The form has more fields than a token.") from None
        return "".join(fields.get("token", ()))

    def _path(self) -> str:
        found = self.target()
        return "" if found is None else found.path

    def _table(self) -> None:
        if isinstance(found := self._seen(), Refusal):
            return self._sign_in(found, is_over=found.status == HTTPStatus.UNAUTHORIZED)
        more = {"events": "/events", "sign_out": "" if self._is_by_proxy() else "/sign-out"}
        self.show(page.of("runs", "Jobs", {**found, **more}))

    def _events(self) -> None:
        if isinstance(first := self._seen(), Refusal):
            return self.refuse(*first)
        self.stream(functools.partial(self._next, [first]), LIST_S, LONGEST_STREAM_S)

    def _next(self, known: list[dict[str, Any]]) -> dict[str, Any] | None:
        """What the viewer may see, `known` first; None once they may see nothing."""
        found = known.pop() if known else self._seen()
        return None if isinstance(found, Refusal) else found

    def _seen(self) -> dict[str, Any] | Refusal:
        """What the token of this request may see, read anew."""
        try:
            token = self._token()
        except tokens.Refused as why:
            return Refusal(HTTPStatus.UNAUTHORIZED, str(why))
        return self.server.table(token)

    def _token(self) -> str:
        """The token of this request: its header's before its cookie's. Raises Refused where there is none."""
        found = tokens.of_headers(self.headers.get_all("Authorization", []))
        if found is None:
            found = self.server.cookies.token(self.headers.get_all("Cookie", []))
        return tokens.checked(found or "")

    def _is_by_proxy(self) -> bool:
        """Whether a program sends the token, so that no form changes it."""
        return "Authorization" in self.headers

    def _sign_in(self, why: Refusal, *, is_over: bool = False) -> None:
        """A sentence, and the form to sign in where it helps; `is_over` ends what the cookie holds."""
        is_led_here = self.headers.get("Sec-Fetch-Site", "none") not in _SAME_SITE
        more = [("Referrer-Policy", "same-origin")]
        if why.status == HTTPStatus.UNAUTHORIZED:
            more.append(("WWW-Authenticate", "Bearer"))
        if is_over and not is_led_here:  # a link from elsewhere comes without the cookie, and says nothing about it
            more += [("Set-Cookie", value) for value in tokens.forgotten()]
        has_form = not self._is_by_proxy() and why.status != HTTPStatus.SERVICE_UNAVAILABLE
        self.show(sign_in.page_of(why.sentence, has_form=has_form, is_led_here=is_led_here), why.status, more)

    def _is_ours(self, *, may_lead_here: bool) -> bool:
        """Whether the request is for one of our names, and of our own page or of a person.

        With `may_lead_here` it may also be a link on another site, which cannot read the page that it leads to.
        """
        hosts = self.headers.get_all("Host", [])
        named = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if named is None or named[1].lower() not in self.server.hosts:
            return False
        own = {f"{scheme}://{hosts[0]}" for scheme in ("http", "https")}
        if not own.issuperset(self.headers.get_all("Origin", [])):
            return False
        if self.headers.get("Sec-Fetch-Site", "none") in _SAME_SITE:
            return True
        led = self.headers.get("Sec-Fetch-Mode"), self.headers.get("Sec-Fetch-Dest")
        return may_lead_here and led == ("navigate", "document")

    def _is_secure(self) -> bool:
        """Whether the browser speaks HTTPS, to a proxy in front of this pod."""
        forwarded = self.headers.get("X-Forwarded-Proto", "").partition(",")[0].strip()
        return forwarded == "https" or self.headers.get("Origin", "").startswith("https://")

    def _refuse_the_place(self) -> None:
        self.refuse(
            HTTPStatus.FORBIDDEN,
            "This request comes from another site, or asks for a host that the dashboard is not configured for:"
            " `webDashboard.hosts` of the chart lists its names.",
        )
