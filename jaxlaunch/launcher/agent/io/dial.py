"""Connects an agent to its leader; retries until it succeeds, and logs every ten seconds why it does not."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop, Timer

RETRY_S, SAY_S, CONNECT_S = 0.3, 10.0, 5.0
_NOT_TRIED = "not tried yet"

Addresses = list[tuple[Any, ...]]


class Dialer:
    """Calls `connected` with a socket once the leader accepts it; `dial` starts over."""

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        *,
        say: Callable[[str], None],
        connected: Callable[[socket.socket], None],
    ) -> None:
        self._loop, self._address, self._say, self._connected = loop, address, say, connected
        self._since: float | None = None
        self._retry, self._reminder = Timer(lambda: None), Timer(lambda: None)
        self._reason = _NOT_TRIED

    @property
    def reason(self) -> str:
        """Why there is no connection yet, as "connection refused for 40 s"."""
        return f"{self._reason} for {time.monotonic() - (self._since or time.monotonic()):.0f} s"

    def dial(self, after_s: float = 0.0) -> None:
        """Connects after `after_s` seconds, and retries until it succeeds or `stop` is called."""
        if self._since is None:
            self._since = time.monotonic()
            self._reminder = self._loop.after(SAY_S, self._log_reason)
        self._retry = self._loop.after(after_s, self._resolve)

    def stop(self) -> None:
        """Stops the retries; a connection under way is closed."""
        self._retry.cancel()
        self._reminder.cancel()
        self._since = None

    def _log_reason(self) -> None:
        self._say(f"cannot reach the leader (host 0) at {self._address[0]}:{self._address[1]}: {self.reason}")
        self._reminder = self._loop.after(SAY_S, self._log_reason)

    def _resolve(self) -> None:
        host, port = self._address
        try:
            return self._connect(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except socket.gaierror:
            pass  # a name: resolved in a thread, since DNS may take a minute and a SIGTERM must not wait
        if self._reason == _NOT_TRIED:
            self._reason = "the name server has not answered"
        found: list[Addresses] = []
        read_end, write_end = os.pipe()

        def look_up() -> None:
            try:
                found.append(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
            except OSError:
                found.append([])
            os.close(write_end)

        def resolved(mask: int) -> None:
            self._loop.unwatch(read_end)
            os.close(read_end)
            if self._since is None:
                return  # stopped in the meantime
            if found and found[0]:
                self._connect(found[0])
            else:
                self._failed("name not resolved")

        self._loop.watch(read_end, READ, resolved)
        threading.Thread(target=look_up, daemon=True).start()

    def _connect(self, addresses: Addresses) -> None:
        family, kind, protocol, _, address = addresses[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return self._failed(_reason_of(code))
        timeout = self._loop.after(CONNECT_S, lambda: self._settled(sock, errno.ETIMEDOUT))

        def ready(mask: int) -> None:
            timeout.cancel()
            self._settled(sock, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

        self._loop.watch(sock.fileno(), WRITE, ready)

    def _settled(self, sock: socket.socket, code: int) -> None:
        self._loop.unwatch(sock.fileno())
        if code == 0 and self._since is not None:
            self.stop()
            return self._connected(sock)
        sock.close()
        if self._since is not None:
            self._failed(_reason_of(code))

    def _failed(self, reason: str) -> None:
        self._reason = reason
        self._retry = self._loop.after(RETRY_S, self._resolve)


def _reason_of(code: int) -> str:
    return os.strerror(code).lower()
