"""A TCP relay before a server. It can refuse connections as if the server were away."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes bytes between its own port on loopback and a server."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_refusing = False
        self._listener = self._listening(0)
        self.port: int = self._listener.getsockname()[1]

    def refuse(self) -> None:
        """From now on connections are refused; those that there are break."""
        with self._lock:
            everything = [self._listener, *self._open]
            self._open.clear()
            self._is_refusing = True
        for connection in everything:
            _close_socket(connection)

    def accept(self) -> None:
        """The server is back, at the same port."""
        self._is_refusing = False
        self._listener = self._listening(self.port)

    def _listening(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return listener

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._connect(listener.accept()[0])

    def _connect(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._to)
        except OSError:  # the server has ended
            _close_socket(near)
            return
        with self._lock:
            is_refused = self._is_refusing
            if not is_refused:
                self._open |= {near, far}
        if is_refused:  # meanwhile: nothing else would close them
            _close_socket(near)
            _close_socket(far)
            return
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_copy_bytes, args=pair, daemon=True).start()


def _copy_bytes(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _close_socket(source)
    _close_socket(sink)


def _close_socket(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
