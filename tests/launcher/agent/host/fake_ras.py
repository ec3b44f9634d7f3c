"""A server in place of NCCL's RAS, which plays what a test gives it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from jaxlaunch.launcher.agent.gang import nccl


def play(
    *pieces: str | bytes, pause_s: float = 0.0, forever: bool = False
) -> Callable[[socket.socket], None]:
    """A server that sends these pieces and closes, or sends the last one again and again."""

    def act(peer: socket.socket) -> None:
        for piece in pieces:
            peer.sendall(piece if isinstance(piece, bytes) else piece.encode())
            time.sleep(pause_s)
        while forever:
            peer.sendall(pieces[-1] if isinstance(pieces[-1], bytes) else pieces[-1].encode())

    return act


@contextlib.contextmanager
def server(act: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answers one connection on a port of this machine; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as peer:
                assert peer.recv(1000) == nccl.RAS_QUERY
                act(peer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
