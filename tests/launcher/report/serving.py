"""A server of pages in a thread, while a test looks at it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeVar

from jaxlaunch.launcher.report.server import PageServer

S = TypeVar("S", bound=PageServer)


@contextlib.contextmanager
def serving(server: S) -> Iterator[S]:
    """Answers until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
