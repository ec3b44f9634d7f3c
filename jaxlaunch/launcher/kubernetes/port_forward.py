"""One request to a port of a pod through the API server, like `kubectl port-forward`.

The pod sees it come from 127.0.0.1. Over WebSocket every message begins with the number of its channel, 0 for the bytes
and 1 for an error; the first message on each only repeats the port (`v4.channel.k8s.io`).
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from typing import Any

from jaxlaunch.launcher.errors import ApiError, ClusterError, Unreachable

PROTOCOL = "v4.channel.k8s.io"
MAX_ANSWER = 4 * 1024 * 1024  # bytes
_BYTES, _ERROR = 0, 1
_TLS = {"ca_certs": "ca_certs", "cert_file": "certfile", "key_file": "keyfile", "server_hostname": "server_hostname"}


def exchange(pool: Any, url: str, headers: Mapping[str, str], request: bytes, limit_s: float) -> bytes:
    """All that a port answers to a request until it closes.

    `pool` is urllib3's, with the server's certificates; `url` is of the pod's subresource `portforward`. Raises
    ApiError when the server refuses, Unreachable when it does not answer or nothing listens on the port.
    """
    import websocket  # with its imports it takes a twentieth of a second

    end = time.monotonic() + limit_s
    what = f"GET {url}"
    try:
        tunnel = websocket.create_connection(
            url.replace("http", "ws", 1),
            timeout=limit_s,
            header=[f"{name}: {value}" for name, value in headers.items()],
            subprotocols=[PROTOCOL],
            suppress_origin=True,
            redirect_limit=0,  # the credentials are for this server alone
            sslopt=_tls(pool),
            **_proxy(pool),
        )
    except websocket.WebSocketBadStatusException as error:
        raise _refused(error, what) from None
    except (OSError, websocket.WebSocketException) as error:
        raise Unreachable(f"The API server did not open a port-forward to the pod: {error} ({what}).") from None
    try:
        tunnel.send_binary(bytes([_BYTES]) + request)
        return _answer(tunnel, end, what)
    except (OSError, websocket.WebSocketException) as error:
        raise Unreachable(f"The port-forward to the pod broke off: {error} ({what}).", sent=True) from None
    finally:
        tunnel.shutdown()  # its close() leaves the socket open where the other side closed first


def _answer(tunnel: Any, end: float, what: str) -> bytes:
    """The bytes until the pod's side closes."""
    import websocket

    opened: set[int] = set()
    answer = bytearray()
    while time.monotonic() < end and len(answer) < MAX_ANSWER:
        opcode, data = tunnel.recv_data()
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            return bytes(answer)
        channel = data[0] if data else _BYTES
        if channel not in opened:
            opened.add(channel)
        elif channel == _ERROR:
            fault = data[1:].decode(errors="replace").strip()
            raise Unreachable(f"The pod did not answer: {fault} ({what}).")
        else:
            answer += data[1:]
    raise Unreachable(f"The pod's answer did not end ({what}).", sent=True)


def _tls(pool: Any) -> dict[str, Any]:
    """The pool's certificates, of the server and of the client, under the names of the WebSocket library."""
    given = pool.connection_pool_kw
    found = {theirs: given[ours] for ours, theirs in _TLS.items() if given.get(ours)}
    if given.get("cert_reqs") in (ssl.CERT_NONE, "CERT_NONE"):
        return found | {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
    return found | {"cert_reqs": ssl.CERT_REQUIRED, "check_hostname": given.get("assert_hostname") is not False}


def _proxy(pool: Any) -> Mapping[str, Any]:
    """The pool's proxy, or none: the WebSocket library would take one from the environment."""
    if (proxy := pool.proxy) is None:
        return {"http_no_proxy": ["*"]}
    auth = tuple(proxy.auth.split(":", 1)) if proxy.auth else None
    return {"http_proxy_host": proxy.host, "http_proxy_port": proxy.port, "http_proxy_auth": auth, "proxy_type": "http"}


def _refused(error: Any, what: str) -> ClusterError:
    """The error with the server's own message."""
    try:
        message = str(json.loads(error.resp_body)["message"])
    except (ValueError, LookupError, TypeError):
        message = str(error)
    hint = "you need the right to get and create pods/portforward." if error.status_code == 403 else None
    return ApiError(f"{message} ({what})", hint, error.status_code)
