"""The scrape and profile port, and who may hold it."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import threading
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest

from jaxlaunch.launcher.agent.host.rank_reports import Profiles
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.metrics_server import MAX_CONNECTIONS, MetricsGatherer, MetricsServer


@pytest.fixture
def port() -> Iterator[int]:
    """That of a server, whose loop runs in a thread."""
    loop, is_over = Loop(), threading.Event()
    profiles = Profiles(True, list)
    served = MetricsServer(
        loop, "127.0.0.1", 0, list, lambda texts: "x" * 100 + "\n", {"/profile": profiles.reply}
    )
    loop.call_every(0.01, lambda: loop.stop() if is_over.is_set() else None)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield served.port
    assert thread.is_alive(), "the loop ended"
    is_over.set()
    thread.join()
    signal.set_wakeup_fd(-1)
    for item in [*served._open, served._listener, loop._wake_read, loop._wake_write]:
        item.close()  # type: ignore[attr-defined]


def ask(port: int, head: str) -> tuple[int, str]:
    """Status and body of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n")
        result = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    answer, _, body = result.partition("\r\n\r\n")
    return int(answer.split()[1]), body


def test_server_without_free_descriptors_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = MagicMock()
    server = MetricsServer(loop, "127.0.0.1", 0, lambda: ["/a"], lambda texts: "", {})
    listener = server._listener
    server._listener = MagicMock(**{"fileno.return_value": listener.fileno()})
    server._listener.accept.side_effect = OSError(errno.EMFILE, "Too many open files")
    loop.reset_mock()
    server._accept_request()
    loop.unwatch.assert_called_once_with(listener.fileno())
    (_, accept_again), _ = loop.call_later.call_args
    accept_again()
    assert loop.watch.call_args.args[0] == listener.fileno()
    # A scrape in this state omits the metrics of the processes.
    texts: list[list[str]] = []
    monkeypatch.setattr(socket, "socket", MagicMock(side_effect=OSError(errno.EMFILE, "no")))
    MetricsGatherer(loop, ["/a", "/b"], lambda answers: texts.append(list(answers)))
    assert texts == [[]]
    listener.close()


def test_silent_connections_do_not_block_a_scrape(port: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4 * MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert ask(port, "GET /metrics HTTP/1.1")[0] == 200


@pytest.mark.parametrize(
    "steps", ["1" * 5_000, "\u0663" * 9, "0" * 3_000 + "1"], ids=["digits", "arabic", "zeros"]
)
def test_profile_with_too_many_digits_is_refused(port: int, steps: str) -> None:
    status, body = ask(port, f"POST /profile?steps={steps} HTTP/1.1")
    assert status == 400
    assert len(body) < 200
    assert "is not a number from 1 to 100" in json.loads(body)["error"]
    assert ask(port, "GET /profile HTTP/1.1")[0] == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("header", ["Origin: https://example.com", "oRiGiN: null"])
def test_profile_request_of_a_web_page_is_refused(port: int, method: str, header: str) -> None:
    status, body = ask(port, f"{method} /profile HTTP/1.1\r\nHost: localhost\r\n{header}")
    assert status == 403 and "web pages" in json.loads(body)["error"]
