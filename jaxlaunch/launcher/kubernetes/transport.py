"""Requests to the API server with timeouts, safe retries, and errors with hints.

By default urllib3 retries a GET three times, never retries a POST, and has no timeout.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from jaxlaunch.launcher.errors import ApiError, ClusterError, UnreachableError
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.kubernetes.objects import MAX_SKEW_S, clock_skew_s, parse_http_date

CONNECT_TIMEOUT_S = 5.0
# Limit between two bytes of an answer.
READ_TIMEOUT_S = 15.0
# Limit for one call with all retries and pauses.
TOTAL_TIMEOUT_S = 60.0
MAX_TRIES = 6
# A call that takes longer than this is reported to the user.
REPORT_AFTER_S = 2.0
_REPORT_PERIOD_S = 60.0
# The server answers most calls within a few hundredths of a second.
_SLOW_CALL_S = 0.5
# Not the global generator: a user's program may have seeded that.
_jitter = random.Random()
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_CHUNK_BYTES = 64 * 1024
# A server with one of these statuses may recover.
_TRANSIENT_STATUSES = {500, 502, 503, 504}

T = TypeVar("T")


class Access(NamedTuple):
    """Connections, address and credentials of one context of a kubeconfig."""

    # Pool manager of urllib3.
    pool: Any
    # URL of the API server.
    server: str
    # Returns headers with the credentials, which are never shown.
    headers: Callable[[], Mapping[str, str]]


class Response(NamedTuple):
    """A response of the server with status 200 to 299."""

    headers: Mapping[str, str]
    body: bytes


class Transport:
    """Sends requests to the API server, and retries them until a deadline."""

    def __init__(
        self, open_access: Callable[[], Access], name: str, say: Callable[[str], None] | None = None
    ) -> None:
        """Open connections, without sending a request.

        Args:
            open_access: Returns connections with current credentials. It is called again after an
                error 401.
            name: Name of the context, for messages.
            say: Called with a message while a call is slow.
        """
        self._open_access = open_access
        self._access = open_access()
        self.name = name
        self.total_s = TOTAL_TIMEOUT_S
        # Skew of this machine's clock. Smaller differences from the server's clock count as 0.
        self.skew_s = 0.0
        self._answered_at = time.monotonic()
        self._say = say
        self._reported_at = -math.inf
        # Total duration of the latest calls if all of them were slow, else 0.
        self._slow_s = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer to any thread that was not a server error."""
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
        content_type: str = "application/json",
        is_idempotent: bool = True,
    ) -> Response:
        """Send a request and return the response.

        A request that is not idempotent is not retried if the server may have processed it.

        Raises:
            ApiError: If the server rejects the request.
            UnreachableError: If it does not answer within `total_s`.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type, "Accept-Encoding": "gzip"}

        def send_once(deadline: float) -> Response:
            read_s = min(READ_TIMEOUT_S, self.total_s)
            response = self._open_response(method, path, query, headers, data, read_s)
            return Response(response.headers, _read_body(response, deadline))

        with self._report_if_slow(f"an answer of the API server {self.server}"):
            return self._send_with_retries(
                f"{method} {path}", send_once, is_idempotent, self.total_s
            )

    def stream(
        self, path: str, query: Mapping[str, str], silence_s: float, total_s: float | None = None
    ) -> Iterator[bytes]:
        """Yield the bytes of a streamed answer.

        Args:
            path: API path of a watch or a log.
            query: Query parameters.
            silence_s: Longest time between two bytes.
            total_s: Time in which the answer must begin, without retries. By default, errors are
                retried like those of other calls.

        Raises:
            ApiError: If the server rejects the request.
            UnreachableError: If no bytes arrive for `silence_s`.
        """
        request_line = f"GET {path}"

        def open_stream(_: float) -> Any:
            return self._open_response("GET", path, query, {}, None, silence_s)

        *_, pod, subresource = path.split("/")
        awaited = f"an answer of the API server {self.server}"
        if subresource == "log":
            # The API server reads a log from the kubelet of the pod's node.
            awaited = f"the log of pod {pod} from its node"
        # The first line of a followed log may come at any time.
        with contextlib.nullcontext() if "follow" in query else self._report_if_slow(awaited):
            limit_s = self.total_s if total_s is None else total_s
            response = self._send_with_retries(request_line, open_stream, total_s is None, limit_s)
        try:
            for data in response.stream(_CHUNK_BYTES):
                self._answered_at = time.monotonic()
                yield data
        except HTTPError as error:
            raise self._unreachable_error(request_line, error) from None
        finally:
            response.close()

    def open_websocket(
        self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> Any:
        """Open the WebSocket of a pod's subresource, `exec` or `portforward`.

        Raises:
            ApiError: If the server rejects the request.
            UnreachableError: If it does not answer.
        """
        url = f"{self.server}{path}?{urlencode(query)}"

        def open_once(_: float) -> Any:
            pool, _server, headers = self._access
            limit_s = min(READ_TIMEOUT_S, self.total_s)
            return streams.open_websocket(pool, url, headers(), protocols, limit_s)

        *_, pod, subresource = path.split("/")
        with self._report_if_slow(f"the {subresource} of pod {pod}"):
            return self._send_with_retries(f"GET {path}", open_once, False, self.total_s)

    def _open_response(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
        data: bytes | None,
        read_s: float,
    ) -> Any:
        """Send one request, and leave the body unread. Raises ApiError for status 300 or more."""
        sent_at = datetime.datetime.now(datetime.UTC)
        common_headers = {"Accept": "application/json", "User-Agent": "jaxlaunch"}
        response = self._access.pool.request(
            method,
            f"{self._access.server}{path}" + (f"?{urlencode(query)}" if query else ""),
            body=data,
            headers={**common_headers, **headers, **self._access.headers()},
            timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=read_s),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        if (server_time := parse_http_date(response.headers.get("Date"))) is not None:
            skew_s = clock_skew_s(sent_at, server_time, datetime.datetime.now(datetime.UTC))
            self.skew_s = skew_s if abs(skew_s) > MAX_SKEW_S else 0.0
        if response.status < 500 and response.status != 429:
            self._answered_at = time.monotonic()
        if response.status < 300:
            return response
        raise self._response_error(f"{method} {path}", response)

    def _send_with_retries(
        self,
        request_line: str,
        send_once: Callable[[float], T],
        is_idempotent: bool,
        total_s: float,
    ) -> T:
        """Send a request, with retries after errors that may be temporary."""
        deadline = time.monotonic() + total_s
        has_new_credentials = False
        for attempt in range(1, MAX_TRIES + 1):
            backoff_s = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
            pause_s: float | None = backoff_s * _jitter.uniform(0.8, 1.2)
            failure: ClusterError
            try:
                return send_once(deadline)
            except ApiError as error:
                failure = error
                if error.status == 401 and not has_new_credentials:
                    self._access, has_new_credentials = self._open_access(), True
                    pause_s = 0.0
                elif error.status == 429 or (error.status in _TRANSIENT_STATUSES and is_idempotent):
                    pause_s = pause_s if error.retry_after_s is None else error.retry_after_s
                else:
                    pause_s = None
            except HTTPError as error:
                failure = self._unreachable_error(request_line, error)
                if _is_untrusted(error) or (failure.was_sent and not is_idempotent):
                    pause_s = None
            if pause_s is None or attempt == MAX_TRIES or time.monotonic() + pause_s > deadline:
                try:
                    raise failure from None
                finally:
                    # The traceback refers to this frame. Without the cycle, connections of the
                    # frames above are closed at once and not by the garbage collector.
                    del failure
            del failure
            time.sleep(pause_s)
        raise AssertionError("the last attempt raises")

    @contextlib.contextmanager
    def _report_if_slow(self, awaited: str) -> Iterator[None]:
        """Report what the client waits for, at most once a minute, if calls are slow."""
        started_at = time.monotonic()

        def report_wait() -> None:
            if self._say is not None and time.monotonic() - self._reported_at >= _REPORT_PERIOD_S:
                self._reported_at = time.monotonic()
                self._say(f"waiting for {awaited}")

        timer = threading.Timer(max(0.0, REPORT_AFTER_S - self._slow_s), report_wait)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            elapsed_s = time.monotonic() - started_at
            self._slow_s = self._slow_s + elapsed_s if elapsed_s >= _SLOW_CALL_S else 0.0

    def _response_error(self, request_line: str, response: Any) -> ApiError:
        """Return the error of a response: a Status of the API server, or a text of a proxy."""
        body, reason, details = b"", "", {}
        with contextlib.suppress(HTTPError):
            body = _read_body(response, time.monotonic() + READ_TIMEOUT_S)
        try:
            status = json.loads(body)
            message = status["message"]
            reason = status.get("reason", "")
            details = status.get("details")
        except (ValueError, LookupError, TypeError):
            first_line = body.decode(errors="replace").strip().partition("\n")[0][:200]
            message = f"{response.status} {response.reason or ''}".strip()
            message += f": {first_line}" if first_line else ""
        if response.status == 401:
            message = (
                f"The server {self.server} does not accept the credentials of context "
                f"{self.name}: {message}"
            )
            hint = "log in again; `kubectl auth whoami` checks the same credentials."
            return ApiError(message, hint, 401, reason, details)
        # The header contains seconds or a date.
        retry_after, pause_s = response.headers.get("Retry-After", ""), None
        if retry_after.isdecimal():
            pause_s = float(retry_after)
        elif (retry_at := parse_http_date(retry_after)) is not None:
            now = datetime.datetime.now(datetime.UTC)
            pause_s = max(0.0, (retry_at - now).total_seconds())
        message = f"{message} ({request_line})"
        return ApiError(message, None, response.status, reason, details, pause_s)

    def _unreachable_error(self, request_line: str, error: HTTPError) -> UnreachableError:
        subject = f"The API server {self.server} of context {self.name}"
        cause = _innermost_cause(error)
        # The messages of the outer exceptions contain addresses of Python objects.
        text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        if isinstance(cause, ssl.SSLCertVerificationError):
            text = cause.verify_message
        reason = text or type(cause).__name__
        if _is_untrusted(error):
            hint = "check certificate-authority in the kubeconfig."
            return UnreachableError(f"{subject} is not trusted: {reason}", hint)
        if isinstance(error, NewConnectionError | ConnectTimeoutError | ProxyError | SSLError):
            hint = "check its address and your network or VPN."
            return UnreachableError(f"{subject} cannot be reached: {reason}", hint)
        is_silent = isinstance(error, ReadTimeoutError)
        problem = "stopped answering" if is_silent else "closed the connection"
        return UnreachableError(f"{subject} {problem} ({request_line}).", sent=True)


def _read_body(response: Any, deadline: float) -> bytes:
    """Return the body. The read timeout only limits the time between two bytes."""
    chunks = []
    try:
        for chunk in response.stream(_CHUNK_BYTES, decode_content=True):
            chunks.append(chunk)
            if time.monotonic() > deadline:
                raise ReadTimeoutError(response, "", "the answer did not end in time")
    except BaseException:
        # The traceback keeps the response, and urllib3 closes it only after some errors.
        response.close()
        raise
    response.release_conn()
    return b"".join(chunks)


def _is_untrusted(error: HTTPError) -> bool:
    """Return whether TLS failed because of a certificate, and not because the connection broke."""
    return isinstance(error, SSLError) and not isinstance(
        _innermost_cause(error), ssl.SSLEOFError | ConnectionError
    )


def _innermost_cause(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
