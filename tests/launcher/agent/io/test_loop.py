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
    made = Loop()
    yield made
    signal.set_wakeup_fd(-1)
    for each in (made._wake_read, made._wake_write, made._epoll):
        each.close()


def test_an_event_of_a_descriptor_that_was_closed_meanwhile_is_not_taken_for_one_of_its_successor(
    loop: Loop,
) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    fds = [own.fileno() for own, _ in pairs]
    idle, other = socket.socketpair()  # with nothing to read
    seen: list[str] = []

    def first(fd: int, mask: int) -> None:
        (late,) = set(fds) - {fd}
        for each in fds:
            loop.unwatch(each)
        os.dup2(idle.fileno(), late)  # closes it, and gives its number to another
        loop.watch(late, READ, lambda mask: seen.append("successor"))
        seen.append("first")
        loop.call_later(0.0, loop.stop)

    for own, peer in pairs:
        loop.watch(own.fileno(), READ, partial(first, own.fileno()))
        peer.send(b"x")
    loop.run()
    assert seen == ["first"]
    for each in (*(one for pair in pairs for one in pair), idle, other):
        each.close()


@pytest.mark.parametrize("watched", [READ, WRITE, READ | WRITE])
def test_whoever_watches_a_connection_that_breaks_is_called_for_what_it_watches(
    loop: Loop, watched: int
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname())
    own, _ = listener.accept()
    reset(peer)
    masks: list[int] = []
    loop.watch(own.fileno(), watched, masks.append)
    loop.call_later(0.0, loop.stop)
    loop.run()
    assert masks == [watched]
    own.close()
    listener.close()


def test_a_descriptor_above_1023_is_awaited_as_any_other() -> None:
    read_end, write_end = os.pipe()
    high = fcntl.fcntl(read_end, fcntl.F_DUPFD, 1500)
    try:
        assert not wait_until_ready(high, READ, 0.0)
        os.write(write_end, b"x")
        assert wait_until_ready(high, READ, 0.0) and wait_until_ready(write_end, WRITE, 0.0)
    finally:
        for fd in (read_end, write_end, high):
            os.close(fd)
