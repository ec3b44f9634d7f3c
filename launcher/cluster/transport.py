"""One request to the API server: bounded in time, repeated where that is safe, its failures in words.

Left to itself urllib3 repeats a GET three times and a POST never, and waits for ever.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

from launcher.errors import ApiError, ClusterError, Unreachable

CONNECT_S = 5.0
READ_S = 15.0  # between two bytes of an answer
TOTAL_S = 60.0  # of one call, all tries and pauses
TRIES = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_CHUNK = 64 * 1024
_PASSING = {500, 502, 503, 504}  # faults of a server that may be well again

T = TypeVar("T")


class Access(NamedTuple):
    """How one context of a kubeconfig reaches its server."""

    pool: Any  # urllib3's
    server: str
    headers: Callable[[], Mapping[str, str]]  # who asks; never shown


class Answer(NamedTuple):
    """What the server sent."""

    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Sends requests with the access that `opened` gives; opened again when the server no longer accepts it."""

    def __init__(self, opened: Callable[[], Access], name: str) -> None:
        self._opened = opened
        self._access = opened()
        self.name = name  # of the context, for messages
        self.calls = 0  # requests made, every try
        self.total_s = TOTAL_S

    @property
    def server(self) -> str:
        return self._access.server

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        content: str = "application/json",
        repeat: bool = True,
    ) -> Answer:
        """The server's answer. Without `repeat` nothing is sent again that may have been carried out.

        Raises ApiError for a refusal and Unreachable when no answer comes within `total_s`.
        """
        data = None if body is None else json.dumps(body).encode()

        def ask(end: float) -> Answer:
            headers = {"Content-Type": content, "Accept-Encoding": "gzip"}
            response = self._open(method, path, query, headers, data, min(READ_S, self.total_s))
            return Answer(response.headers, _whole(response, end))

        return self._until_answered(f"{method} {path}", ask, repeat)

    def stream(
        self, path: str, query: Mapping[str, str], silence_s: float, total_s: float | None = None
    ) -> Iterator[bytes]:
        """The bytes of an answer that goes on, as they come; Unreachable when nothing comes for `silence_s`.

        It must have begun within `total_s`, and then a refusal is not asked again.
        """
        what = f"GET {path}"
        response = self._until_answered(
            what, lambda _: self._open("GET", path, query, {}, None, silence_s), total_s is None, total_s
        )
        try:
            yield from response.stream(_CHUNK)
        except HTTPError as error:
            raise self._unreachable(what, error) from None
        finally:
            response.close()

    def through(self, path: str, port: int, request: bytes) -> bytes:
        """What a port of a pod answers, by the path of the pod's subresource `portforward`."""
        from launcher import portforward  # few commands go this way

        self.calls += 1
        pool, server, headers = self._access
        url = f"{server}{path}?ports={port}"
        return portforward.exchange(pool, url, headers(), request, min(READ_S, self.total_s))

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        data: bytes | None,
        read_s: float,
    ) -> Any:
        """The response, its body still unread; ApiError when it is a refusal."""
        url = f"{self._access.server}{path}" + (f"?{urlencode(query)}" if query else "")
        told = {"Accept": "application/json", "User-Agent": "jaxlaunch", **headers, **self._access.headers()}
        self.calls += 1
        response = self._access.pool.request(
            method,
            url,
            body=data,
            headers=told,
            timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        if response.status < 300:
            return response
        raise self._refused(f"{method} {path}", response)

    def _until_answered(self, what: str, ask: Callable[[float], T], repeat: bool, total_s: float | None = None) -> T:
        """The answer to a request, asked for again while it may help."""
        end = time.monotonic() + (self.total_s if total_s is None else total_s)
        has_renewed = False
        for tries in range(1, TRIES + 1):
            pause: float | None = min(_FIRST_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
            fault: ClusterError
            try:
                return ask(end)
            except ApiError as error:
                fault = error
                if error.status == 401 and not has_renewed:
                    has_renewed, self._access, pause = True, self._opened(), 0.0
                elif error.status == 429 or (error.status in _PASSING and repeat):
                    pause = pause if error.retry_after_s is None else error.retry_after_s
                else:
                    pause = None
            except HTTPError as error:
                fault = self._unreachable(what, error)
                if isinstance(error, SSLError) or (fault.sent and not repeat):
                    pause = None
            if pause is None or tries == TRIES or time.monotonic() + pause > end:
                raise fault from None
            time.sleep(pause)
        raise AssertionError("the last try raises")

    def _refused(self, what: str, response: Any) -> ApiError:
        """The server's words: those of its Status, or the first of what a proxy says."""
        try:
            body = _whole(response, time.monotonic() + READ_S)
        except HTTPError:
            body = b""
        try:
            status = json.loads(body)
            message, reason, details = status["message"], status.get("reason", ""), status.get("details")
        except (ValueError, LookupError, TypeError):
            said = body.decode(errors="replace").strip().partition("\n")[0][:200]
            message, reason, details = (
                f"{response.status} {response.reason or ''}".strip() + f": {said}" * bool(said),
                "",
                {},
            )
        if response.status == 401:
            message = f"The server {self.server} does not accept the credentials of context {self.name}: {message}"
            return ApiError(message, "log in again; `kubectl auth whoami` asks the same.", 401, reason, details)
        pause = _retry_after(response.headers)
        return ApiError(f"{message} ({what})", None, response.status, reason, details, pause)

    def _unreachable(self, what: str, error: HTTPError) -> Unreachable:
        where = f"The API server {self.server} of context {self.name}"
        if isinstance(error, SSLError):
            return Unreachable(
                f"{where} is not trusted: {_reason(error)}", "is its certificate-authority the right one?"
            )
        if isinstance(error, NewConnectionError | ConnectTimeoutError | ProxyError):
            return Unreachable(f"{where} cannot be reached: {_reason(error)}", "is the address right, is a VPN needed?")
        kind = "stopped answering" if isinstance(error, ReadTimeoutError) else "broke the connection"
        return Unreachable(f"{where} {kind} ({what}).", sent=True)


def _whole(response: Any, end: float) -> bytes:
    """The rest of a body that may drip: a timeout between bytes alone would never end it."""
    parts = []
    for part in response.stream(_CHUNK, decode_content=True):
        parts.append(part)
        if time.monotonic() > end:
            response.close()
            raise ReadTimeoutError(response, "", "the answer does not end")
    response.release_conn()
    return b"".join(parts)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait, which it may write as a date."""
    text = headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())


def _reason(error: HTTPError) -> str:
    """The words of the innermost cause; the outer ones hold addresses of objects."""
    inner: BaseException = error
    while (below := inner.__cause__ or inner.__context__) is not None:
        inner = below
    text = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    if isinstance(inner, ssl.SSLCertVerificationError):
        text = inner.verify_message
    return text or type(inner).__name__
