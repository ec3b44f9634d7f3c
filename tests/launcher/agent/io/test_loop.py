"""The loop, with descriptors that change while their events are dealt with."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop, wait_until_ready
from tests.launcher.agent.leader.gangs import reset


@pytest.fixture
def loop() -> Iterator[Loop]:
    created = Loop()
    yield created
    signal.set_wakeup_fd(-1)
    for item in (created._wake_read, created._wake_write, created._epoll):
        item.close()


def test_stale_event_does_not_reach_a_reused_descriptor(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    fds = [sock.fileno() for sock, _ in pairs]
    idle, other = socket.socketpair()  # with nothing to read
    observed: list[str] = []

    def first(fd: int, mask: int) -> None:
        (late,) = set(fds) - {fd}
        for item in fds:
            loop.unwatch(item)
        os.dup2(idle.fileno(), late)  # closes it, and gives its number to another
        loop.watch(late, READ, lambda mask: observed.append("successor"))
        observed.append("first")
        loop.call_later(0.0, loop.stop)

    for sock, peer in pairs:
        loop.watch(sock.fileno(), READ, partial(first, sock.fileno()))
        peer.send(b"x")
    loop.run()
    assert observed == ["first"]
    for item in (*(single for pair in pairs for single in pair), idle, other):
        item.close()


@pytest.mark.parametrize("watched", [READ, WRITE, READ | WRITE])
def test_broken_connection_calls_its_watcher(loop: Loop, watched: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    sock, _ = listener.accept()
    reset(peer)
    masks: list[int] = []
    loop.watch(sock.fileno(), watched, masks.append)
    loop.call_later(0.0, loop.stop)
    loop.run()
    assert masks == [watched]
    sock.close()
    listener.close()


def test_descriptor_above_1023_can_be_awaited() -> None:
    read_end, write_end = os.pipe()
    high = fcntl.fcntl(read_end, fcntl.F_DUPFD, 1500)
    try:
        assert not wait_until_ready(high, READ, 0.0)
        os.write(write_end, b"x")
        assert wait_until_ready(high, READ, 0.0) and wait_until_ready(write_end, WRITE, 0.0)
    finally:
        for fd in (read_end, write_end, high):
            os.close(fd)
