"""One request to the API server, with a time limit, retried where that is safe, its errors with a hint.

By default urllib3 repeats a GET three times and a POST never, and waits for ever.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import json
import math
import random
import ssl
import threading
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

from jaxlaunch.launcher.errors import ApiError, ClusterError, Unreachable
from jaxlaunch.launcher.kubernetes.objects import SKEW_S, ahead_s

CONNECT_S = 5.0
READ_S = 15.0  # between two bytes of an answer
TOTAL_S = 60.0  # of one call, all tries and pauses
TRIES = 6
TELL_AFTER_S = 2.0  # of silence: who waits for longer wants to know for what
_TELL_AGAIN_S = 60.0
_SLOW_CALL_S = 0.5  # of a call: the server answers most within a few hundredths
_jitter = random.Random()  # not the global generator: a user's program may have seeded that
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_CHUNK = 64 * 1024
_PASSING = {500, 502, 503, 504}  # statuses of a server that may recover

T = TypeVar("T")


class Access(NamedTuple):
    """How one context of a kubeconfig reaches its server."""

    pool: Any  # urllib3's
    server: str
    headers: Callable[[], Mapping[str, str]]  # with the credentials; never shown


class Answer(NamedTuple):
    """The server's response."""

    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Sends requests with the access that `opened` gives, and calls it again when the credentials are refused."""

    def __init__(self, opened: Callable[[], Access], name: str, say: Callable[[str], None] | None = None) -> None:
        self._opened = opened
        self._access = opened()
        self.name = name  # of the context, for messages
        self.total_s = TOTAL_S
        self.ahead_s = 0.0  # of this machine's clock, where it is more than SKEW_S from the server's
        self._answered_at = time.monotonic()
        self._say = say
        self._told_at = -math.inf
        self._slow_s = 0.0  # that the last calls took together, each of them a slow one

    @property
    def silent_s(self) -> float:
        """Seconds since the server last answered anything but that it is unwell; of all threads together."""
        return time.monotonic() - self._answered_at

    @property
    def server(self) -> str:
        """The server's URL."""
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
        """The server's answer. Without `repeat` nothing is sent again that the server may have carried out.

        Raises ApiError when the server refuses, Unreachable when it does not answer within `total_s`.
        """
        data = None if body is None else json.dumps(body).encode()

        def attempt(end: float) -> Answer:
            headers = {"Content-Type": content, "Accept-Encoding": "gzip"}
            response = self._open(method, path, query, headers, data, min(READ_S, self.total_s))
            return Answer(response.headers, _whole(response, end))

        with self._told_if_slow(f"an answer of the API server {self.server}"):
            return self._retried(f"{method} {path}", attempt, repeat)

    def stream(
        self, path: str, query: Mapping[str, str], silence_s: float, total_s: float | None = None
    ) -> Iterator[bytes]:
        """The bytes of a streamed answer, as they come. Raises Unreachable when none come for `silence_s`.

        With `total_s` it must begin within that time, and a refusal is not retried.
        """
        what = f"GET {path}"
        is_followed = "follow" in query  # its first line may come at any time
        with contextlib.nullcontext() if is_followed else self._told_if_slow(self._streamed(path)):
            response = self._retried(
                what, lambda _: self._open("GET", path, query, {}, None, silence_s), total_s is None, total_s
            )
        try:
            for data in response.stream(_CHUNK):
                self._answered_at = time.monotonic()
                yield data
        except HTTPError as error:
            raise self._unreachable(what, error) from None
        finally:
            response.close()

    def _streamed(self, path: str) -> str:
        """What a stream of this path waits for: a log comes from the kubelet of the pod's node."""
        *_, pod, last = path.split("/")
        return f"the log of pod {pod} from its node" if last == "log" else f"an answer of the API server {self.server}"

    def port_forward(self, path: str, port: int, request: bytes) -> bytes:
        """What a port of a pod answers; `path` is of the pod's subresource `portforward`."""
        from jaxlaunch.launcher.kubernetes import port_forward  # few commands need it

        pool, server, headers = self._access
        url = f"{server}{path}?ports={port}"
        with self._told_if_slow(f"port {port} of pod {path.split('/')[-2]}"):
            return port_forward.exchange(pool, url, headers(), request, min(READ_S, self.total_s))

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        data: bytes | None,
        read_s: float,
    ) -> Any:
        """The response, its body not read yet. Raises ApiError for a status of 300 or more."""
        url = f"{self._access.server}{path}" + (f"?{urlencode(query)}" if query else "")
        sent = {"Accept": "application/json", "User-Agent": "jaxlaunch", **headers, **self._access.headers()}
        before = datetime.datetime.now(datetime.UTC)
        response = self._access.pool.request(
            method,
            url,
            body=data,
            headers=sent,
            timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        self._compare_clocks(before, response.headers.get("Date"))
        if response.status < 500 and response.status != 429:
            self._answered_at = time.monotonic()
        if response.status < 300:
            return response
        raise self._refused(f"{method} {path}", response)

    def _compare_clocks(self, before: datetime.datetime, date: str | None) -> None:
        """Notes how far this machine's clock is ahead of the server's, by the time in an answer."""
        with contextlib.suppress(ValueError, TypeError):  # there is none, or another's
            there = email.utils.parsedate_to_datetime(date or "")
            skew_s = ahead_s(before, there, datetime.datetime.now(datetime.UTC))
            self.ahead_s = skew_s if abs(skew_s) > SKEW_S else 0.0

    def _retried(self, what: str, attempt: Callable[[float], T], repeat: bool, total_s: float | None = None) -> T:
        """The answer to a request, which is sent again while that may help."""
        end = time.monotonic() + (self.total_s if total_s is None else total_s)
        has_renewed = False
        for tries in range(1, TRIES + 1):
            pause: float | None = min(_FIRST_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S) * _jitter.uniform(0.8, 1.2)
            fault: ClusterError
            try:
                return attempt(end)
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
                if _is_untrusted(error) or (fault.sent and not repeat):
                    pause = None
            if pause is None or tries == TRIES or time.monotonic() + pause > end:
                raise fault from None
            time.sleep(pause)
        raise AssertionError("the last try raises")

    @contextlib.contextmanager
    def _told_if_slow(self, what: str) -> Iterator[None]:
        """Says what is waited for, at most once a minute: after TELL_AFTER_S of one call, or of slow ones in a row."""
        began = time.monotonic()

        def _tell() -> None:
            if self._say is not None and time.monotonic() - self._told_at >= _TELL_AGAIN_S:
                self._told_at = time.monotonic()
                self._say(f"waiting for {what}")

        timer = threading.Timer(max(0.0, TELL_AFTER_S - self._slow_s), _tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            spent_s = time.monotonic() - began
            self._slow_s = self._slow_s + spent_s if spent_s >= _SLOW_CALL_S else 0.0

    def _refused(self, what: str, response: Any) -> ApiError:
        """The error with the message of the server's Status, or the first line of another body: a proxy's."""
        try:
            body = _whole(response, time.monotonic() + READ_S)
        except HTTPError:
            body = b""
        try:
            status = json.loads(body)
            message, reason, details = status["message"], status.get("reason", ""), status.get("details")
        except (ValueError, LookupError, TypeError):
            first = body.decode(errors="replace").strip().partition("\n")[0][:200]
            message, reason, details = (
                f"{response.status} {response.reason or ''}".strip() + f": {first}" * bool(first),
                "",
                {},
            )
        if response.status == 401:
            message = f"The server {self.server} does not accept the credentials of context {self.name}: {message}"
            return ApiError(
                message, "log in again; `kubectl auth whoami` checks the same credentials.", 401, reason, details
            )
        pause = _retry_after(response.headers)
        return ApiError(f"{message} ({what})", None, response.status, reason, details, pause)

    def _unreachable(self, what: str, error: HTTPError) -> Unreachable:
        where = f"The API server {self.server} of context {self.name}"
        if _is_untrusted(error):
            return Unreachable(
                f"{where} is not trusted: {_reason(error)}", "check certificate-authority in the kubeconfig."
            )
        if isinstance(error, NewConnectionError | ConnectTimeoutError | ProxyError | SSLError):
            return Unreachable(
                f"{where} cannot be reached: {_reason(error)}", "check its address and your network or VPN."
            )
        kind = "stopped answering" if isinstance(error, ReadTimeoutError) else "closed the connection"
        return Unreachable(f"{where} {kind} ({what}).", sent=True)


def _whole(response: Any, end: float) -> bytes:
    """The rest of a body, until `end`: the timeout between two bytes never ends one that comes slowly."""
    parts = []
    for part in response.stream(_CHUNK, decode_content=True):
        parts.append(part)
        if time.monotonic() > end:
            response.close()
            raise ReadTimeoutError(response, "", "the answer did not end in time")
    response.release_conn()
    return b"".join(parts)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server wants us to wait, which it may write as a date."""
    text = headers.get("Retry-After", "")
    if text.isdecimal():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (moment - datetime.datetime.now(datetime.UTC)).total_seconds())


def _is_untrusted(error: HTTPError) -> bool:
    """Whether it is about certificates; a handshake that breaks off is a server that starts or ends."""
    return isinstance(error, SSLError) and not isinstance(_innermost(error), ssl.SSLEOFError | ConnectionError)


def _innermost(error: BaseException) -> BaseException:
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


def _reason(error: HTTPError) -> str:
    """The message of the innermost cause; the outer ones have addresses of Python objects in them."""
    inner = _innermost(error)
    text = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    if isinstance(inner, ssl.SSLCertVerificationError):
        text = inner.verify_message
    return text or type(inner).__name__
