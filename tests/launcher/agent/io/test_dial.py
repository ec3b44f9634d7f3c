"""Why an agent does not reach its leader, as it says it."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

import pytest

from jaxlaunch.launcher.agent.host.leader_connection import Dialer
from jaxlaunch.launcher.agent.io.loop import Loop


def test_missing_answer_of_the_name_server_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, numeric = threading.Event(), socket.getaddrinfo

    def look_up(host: str, port: int, **options: Any) -> Any:
        if not options.get(
            "flags"
        ):  # no number: a resolver tries each of its servers for some seconds
            is_over.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return numeric(host, port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    loop, messages = Loop(), list[str]()
    address = ("lm-w-0-0.lm", 9401)
    dialer = Dialer(loop, address, say=messages.append, on_connected=lambda sock: None)
    dialer.dial()

    def check_text() -> None:
        messages.append(dialer.failure_text)
        if len(messages) == 1:
            is_over.set()
        elif messages[-1].startswith("name not resolved"):
            loop.stop()

    loop.call_every(0.05, check_text)
    loop.run()
    dialer.stop()
    signal.set_wakeup_fd(-1)
    for item in (loop._wake_read, loop._wake_write):
        item.close()
    assert messages[0].startswith("the name server has not answered for ")
    assert messages[-1].startswith("name not resolved for ")
