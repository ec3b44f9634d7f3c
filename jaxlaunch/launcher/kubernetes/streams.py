"""Byte streams to pods over WebSocket: port-forwards, and commands in a container.

The official client opens its own connections from a global configuration and hides why one failed.
Here they use the library below it (`websocket`) with the connections of the transport. Every
message begins with the number of its channel (`v4.channel.k8s.io`).
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.errors import ApiError, ClusterError, UnreachableError

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.client import Cluster

PROTOCOL = "v4.channel.k8s.io"
# The protocol in which a client can also close the standard input of a command.
CLOSING_PROTOCOL = "v5.channel.k8s.io"
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_DATA_CHANNEL, _ERROR_CHANNEL = 0, 1
# The channels of a command.
STDIN, STDOUT, STDERR, _STATUS, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255
# A socket that is writable has room for a message of this size, so that sending it does not block
# while the other side waits for a reader of its own output.
PIECE_BYTES = 4096
# A connection on which the network is silent for longer is closed. macOS lacks some of these.
_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


def open_websocket(
    pool: Any, url: str, headers: Mapping[str, str], protocols: Sequence[str], limit_s: float
) -> Any:
    """Open the WebSocket of a pod's subresource.

    Args:
        pool: Pool manager of urllib3 with the server's certificates.
        url: URL of the subresource.
        headers: Headers with the credentials.
        protocols: Subprotocols, the preferred one first.
        limit_s: Limit for the handshake, and later for the rest of a message that has begun.

    Raises:
        ApiError: If the server rejects the request.
        UnreachableError: If it does not answer.
    """
    # Imported here, because the import takes 50 ms.
    import websocket

    address = url.partition("?")[0]
    request_line, subresource = f"GET {url}", address.rpartition("/")[2]
    if subresource == "exec":
        # The query holds a program.
        request_line = f"GET {address}"
    try:
        return websocket.create_connection(
            url.replace("http", "ws", 1),
            timeout=limit_s,
            header=[f"{name}: {value}" for name, value in headers.items()],
            subprotocols=list(protocols),
            suppress_origin=True,
            # The credentials are for this server only.
            redirect_limit=0,
            sockopt=_KEEPALIVE,
            sslopt=_tls_options(pool),
            **_proxy_options(pool),
        )
    except websocket.WebSocketBadStatusException as error:
        message = str(error)
        with contextlib.suppress(ValueError, LookupError, TypeError):
            message = str(json.loads(error.resp_body)["message"])
        if error.status_code == 403:
            right = f"The right to get and create pods/{subresource} is missing"
            raise ApiError(f"{right}: {message} ({request_line})", None, 403) from None
        raise ApiError(f"{message} ({request_line})", None, error.status_code) from None
    except (OSError, websocket.WebSocketException) as error:
        stream = "a port-forward to" if subresource == "portforward" else "a command in"
        raise UnreachableError(
            f"The API server did not open {stream} the pod: {error} ({request_line})."
        ) from None


# --- port-forwards --------------------------------------------------------------------------------


def open_port(cluster: Cluster, namespace: str, pod: str, port: int) -> Any:
    """Open a connection to a pod's port, which sees it come from 127.0.0.1.

    Raises ApiError and UnreachableError.
    """
    query = [("ports", str(port))]
    return cluster.open_websocket(namespace, pod, "portforward", query, [PROTOCOL])


def exchange_bytes(
    cluster: Cluster, namespace: str, pod: str, port: int, request: bytes, limit_s: float = 15.0
) -> bytes:
    """Send a request to a pod's port and return the complete answer.

    Raises:
        ApiError: If the server rejects the request.
        UnreachableError: If it does not answer within `limit_s`, or nothing listens on the port.
    """
    import websocket

    deadline = time.monotonic() + limit_s
    place = f"port {port} of pod {namespace}/{pod}"
    tunnel = open_port(cluster, namespace, pod, port)
    try:
        tunnel.send_binary(bytes([_DATA_CHANNEL]) + request)
        forward, answer = _Forward(tunnel), bytearray()
        while time.monotonic() < deadline and len(answer) < MAX_ANSWER_BYTES:
            if (data := forward.receive()) is None:
                return bytes(answer)
            answer += data
    except ForwardError as error:
        raise UnreachableError(f"The pod did not answer: {error} ({place}).") from None
    except (OSError, websocket.WebSocketException) as error:
        raise UnreachableError(
            f"The port-forward to the pod was interrupted: {error} ({place}).", sent=True
        ) from None
    finally:
        # close() would leave the socket open if the other side closed first.
        tunnel.shutdown()
    raise UnreachableError(f"The pod's answer did not end ({place}).", sent=True)


class ForwardError(Exception):
    """The pod reports that a port cannot be reached."""


class _Forward:
    """The receiving side of a port-forward."""

    def __init__(self, tunnel: Any) -> None:
        self._tunnel = tunnel
        # The first message on each channel only repeats the port.
        self._open_channels: set[int] = set()

    def receive(self) -> bytes | None:
        """Return the data of the next message, or None once the pod has closed the connection."""
        import websocket

        opcode, frame = self._tunnel.recv_data_frame(control_frame=True)
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            return None
        if opcode != websocket.ABNF.OPCODE_BINARY:
            return b""
        channel = frame.data[0] if frame.data else _DATA_CHANNEL
        if channel not in self._open_channels:
            self._open_channels.add(channel)
            return b""
        if channel == _ERROR_CHANNEL:
            raise ForwardError(frame.data[1:].decode(errors="replace").strip())
        return bytes(frame.data[1:])


# Time for the rest of an answer after the client has closed its side.
_DRAIN_S = 5.0


def relay_connection(tunnel: Any, client: socket.socket) -> None:
    """Pass bytes between a port-forward and a local connection until one of them ends.

    Raises ForwardError if nothing listens on the port, and OSError and WebSocketException.
    """
    forward, is_client_open = _Forward(tunnel), True
    while True:
        readers = [tunnel.sock, client] if is_client_open else [tunnel.sock]
        readable = readers[:1] if _has_pending(tunnel) else None
        if readable is None:
            readable = select.select(readers, (), (), None if is_client_open else _DRAIN_S)[0]
        if not readable:
            return
        if client in readable:
            data = client.recv(PIECE_BYTES)
            is_client_open = bool(data)
            if data:
                tunnel.send_binary(bytes([_DATA_CHANNEL]) + data)
        if tunnel.sock in readable:
            answer = forward.receive()
            if answer is None:
                return
            client.sendall(answer)


# --- commands -------------------------------------------------------------------------------------


class CommandStream:
    """The standard streams of a command that runs in a container. One thread may use it.

    Attributes:
        exit_code: Exit code of the command, or None while it runs.
    """

    def __init__(self, tunnel: Any) -> None:
        self._tunnel = tunnel
        self.exit_code: int | None = None

    def __enter__(self) -> CommandStream:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._tunnel.shutdown()

    def send(self, data: bytes, channel: int = STDIN) -> None:
        """Send a piece of the command's input. Raises UnreachableError."""
        with self._report_cut():
            self._tunnel.send_binary(bytes([channel]) + data)

    def resize(self, columns: int, rows: int) -> None:
        """Tell the command's terminal its size. Raises UnreachableError."""
        self.send(json.dumps({"Width": columns, "Height": rows}).encode(), _RESIZE)

    def close_stdin(self) -> None:
        """End the command's input, if the server can. Raises UnreachableError."""
        if self._tunnel.getsubprotocol() == CLOSING_PROTOCOL:
            self.send(bytes([STDIN]), _CLOSE)

    def wait(
        self,
        readers: Sequence[int] = (),
        *,
        is_sending: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[set[int], bool]:
        """Wait until the command has written, or a descriptor is readable.

        Args:
            readers: Other descriptors.
            is_sending: Whether to return also when the next piece of input can be sent.
            timeout_s: Longest wait.

        Returns:
            The readable descriptors, and whether a piece of input can be sent. `fileno()` is among
            the descriptors if `receive` has something to read.
        """
        connection = self.fileno()
        if _has_pending(self._tunnel):
            timeout_s = 0.0
        writers = [connection] if is_sending else []
        readable, writable, _ = select.select([connection, *readers], writers, (), timeout_s)
        ready = set(readable) | ({connection} if _has_pending(self._tunnel) else set())
        return ready, bool(writable)

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return int(self._tunnel.sock.fileno())

    def receive(self) -> tuple[int, bytes]:
        """Return the channel and the data of the next message.

        Raises:
            UnreachableError: If the connection ends before the command.
            ClusterError: If the command cannot be started.
        """
        import websocket

        with self._report_cut():
            opcode, frame = self._tunnel.recv_data_frame(control_frame=True)
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            raise UnreachableError("The connection to the pod was closed before the command ended.")
        if opcode != websocket.ABNF.OPCODE_BINARY or not frame.data:
            return STDOUT, b""
        channel, data = frame.data[0], bytes(frame.data[1:])
        if channel == _STATUS:
            self.exit_code = _read_exit_code(data)
        return channel, data

    @contextlib.contextmanager
    def _report_cut(self) -> Iterator[None]:
        import websocket

        try:
            yield
        except (OSError, websocket.WebSocketException) as error:
            message = f"The connection to the pod was cut: {error}."
            raise UnreachableError(message, sent=True) from None


def open_command(
    cluster: Cluster,
    namespace: str,
    pod: str,
    container: str,
    argv: Sequence[str],
    *,
    has_terminal: bool,
) -> CommandStream:
    """Start a command in a container, with a terminal or with three separate streams.

    Raises ApiError and UnreachableError.
    """
    options = {"stdin": True, "stdout": True, "stderr": not has_terminal, "tty": has_terminal}
    query = [("container", container)]
    query += [(name, "true") for name, is_set in options.items() if is_set]
    query += [("command", word) for word in argv]
    protocols = [CLOSING_PROTOCOL, PROTOCOL]
    return CommandStream(cluster.open_websocket(namespace, pod, "exec", query, protocols))


def _read_exit_code(data: bytes) -> int:
    """Return the exit code in the final status. Raises ClusterError if there is none."""
    status = json.loads(data)
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    message = " ".join(str(status.get("message", "no reason")).split())
    raise ClusterError(f"The command cannot run in the pod: {message}.")


def _has_pending(tunnel: Any) -> bool:
    """Return whether the connection has decrypted bytes, which select() does not report."""
    # A connection without TLS has no such method.
    return hasattr(tunnel.sock, "pending") and tunnel.sock.pending() > 0


# --- settings of the transport's connections ------------------------------------------------------


def _tls_options(pool: Any) -> dict[str, Any]:
    """Return the pool's TLS settings as options of the WebSocket library."""
    # Imported here, because a Python may lack it.
    import ssl

    settings = pool.connection_pool_kw
    option_names = {
        "ca_certs": "ca_certs",
        "cert_file": "certfile",
        "key_file": "keyfile",
        "server_hostname": "server_hostname",
    }
    options = {
        option: settings[setting]
        for setting, option in option_names.items()
        if settings.get(setting)
    }
    if settings.get("cert_reqs") in (ssl.CERT_NONE, "CERT_NONE"):
        return options | {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
    check_hostname = settings.get("assert_hostname") is not False
    return options | {"cert_reqs": ssl.CERT_REQUIRED, "check_hostname": check_hostname}


def _proxy_options(pool: Any) -> Mapping[str, Any]:
    """Return the pool's proxy settings, which replace those of the environment."""
    if (proxy := pool.proxy) is None:
        return {"http_no_proxy": ["*"]}
    auth = tuple(proxy.auth.split(":", 1)) if proxy.auth else None
    return {
        "http_proxy_host": proxy.host,
        "http_proxy_port": proxy.port,
        "http_proxy_auth": auth,
        "proxy_type": "http",
    }
