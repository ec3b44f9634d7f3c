"""Which hosts the leader admits, and what a stranger costs and leaves in the log."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang.protocol import HostHandshake
from jaxlaunch.launcher.agent.io.link import MAX_GREETING_BYTES
from jaxlaunch.launcher.agent.leader.membership import MAX_REFUSALS
from jaxlaunch.launcher.agent.leader.server import HELLO_TIMEOUT_S, LOG_INTERVAL_S
from tests.launcher.agent.leader.gangs import PATIENCE_S, UID, Gang

NONCE, DEEP = "0" * 32, b"[" * 5_000
HELLOS: list[dict[str, Any]] = [
    {"nonce": NONCE, "fields": "{}", "proof": "\ud800"},
    {"nonce": "\ud800" * 32, "fields": "\udce9", "proof": "x"},
    {"nonce": NONCE, "fields": {}, "proof": []},
    {"nonce": 3, "fields": "{}", "proof": "x"},
    {"host": 2, "uid": UID, "spec": 3, "fault": "stop"},
]
STOPS = b'{"type": "stop"}\n{"type": "kill"}\n'
STRANGE = [
    b"[" * 100_000 + b"\n",
    b'{"type": "hello", "fields": ' + b"[" * 10_000 + b"\n",
    b'{"type": "hello", "nonce": "%b", "fields": "%b", "proof": "0"}\n' % (NONCE.encode(), DEEP),
    *(json.dumps({"type": "hello", **hello}).encode() + b"\n" for hello in HELLOS),
    STOPS,
    b"GET /metrics HTTP/1.1\r\n\r\n",
    b"\xff\n",
    b"x" * (MAX_GREETING_BYTES + 1),
]


def read_to_end(sock: socket.socket) -> bytes:
    """Return what the leader sent until it closed the connection."""
    result = b""
    sock.settimeout(PATIENCE_S)
    # It may close before it has read everything.
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            result += data
    return result


def logged_texts(gang: Gang) -> list[str]:
    """Return what was logged, except for the attempt's start."""
    return [text for text in gang.messages if "starting attempt" not in text]


@pytest.mark.parametrize("line", STRANGE, ids=lambda line: repr(line[:40]))
@pytest.mark.parametrize("joined", [2, 3], ids=["gathering", "running"])
def test_invalid_line_closes_only_the_connection_of_the_stranger(
    gang: Callable[..., Gang], line: bytes, joined: int
) -> None:
    harness = gang(3, joined=joined)
    harness.connect(99)
    sock, fd = harness.hosts[99]
    sock.sendall(line)
    while fd in harness.loop.ready:
        harness.read(fd)
    assert read_to_end(sock) == b""
    assert harness.leader._gang.verdict is None and len(harness.leader._peers) == joined
    assert not logged_texts(harness)
    if joined == 2:
        harness.join(2)
    assert harness.has_started


@pytest.mark.parametrize(
    "key", [b"", b"another", UID.encode()[:-1]], ids=["none", "another", "a part of it"]
)
def test_hello_without_the_key_gets_no_answer(gang: Callable[..., Gang], key: bytes) -> None:
    harness = gang(3, joined=2)
    harness.join(2, key, fault="the gang must end")
    assert read_to_end(harness.hosts[2][0]) == b""
    machine = harness.leader._gang
    assert machine.verdict is None and 2 not in machine.gathering.arrived_hosts
    assert not harness.messages
    harness.join(2)
    assert harness.has_started


def test_replayed_hello_is_rejected(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=1)
    recorded = harness.greeting(HostHandshake(UID.encode()), 1, harness.connect(1))
    harness.raw(1, recorded)
    assert 1 in harness.leader._peers
    harness.connect(2)
    harness.raw(2, recorded)
    assert read_to_end(harness.hosts[2][0]) == b"" and len(harness.leader._peers) == 2


def test_uid_is_never_sent(gang: Callable[..., Gang]) -> None:
    harness = gang(2)
    challenge = {"type": "challenge", "nonce": NONCE}
    assert UID.encode() not in harness.greeting(HostHandshake(UID.encode()), 1, challenge)
    harness.join(2)  # is refused: there are two hosts
    harness.leader._on_tick()
    harness.event(1, "error", error={"type": "ValueError", "message": "boom"})
    for host in (0, 1):
        harness.send(host, "gone")
    for sock in harness.sockets:
        while select.select([sock], [], [], 0)[0] and (data := sock.recv(65536)):
            assert UID.encode() not in data
    assert harness.leader._gang.stage.name == "LEAVE"


@pytest.mark.parametrize(
    "changes", [{"fault": "a fault"}, {"spec": "another"}, {"versions": {}}], ids=str
)
def test_refused_host_does_not_end_a_running_gang(
    gang: Callable[..., Gang], changes: dict[str, Any]
) -> None:
    harness = gang(3)
    sock, _ = harness.hosts[2]
    harness.close(2)
    assert harness.leader._gang.verdict is None, "its loss is not settled yet"
    harness.join(2, **changes)
    assert harness.leader._gang.verdict is None
    refusal = next(text for text in harness.messages if "refused: host 2" in text)
    assert "tried to join after the start" in refusal
    assert sock.fileno() == -1


def test_thousands_of_strangers_are_logged_in_two_lines(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    for _ in range(300):
        harness.connect(99)
        harness.raw(99, STOPS)
    for silent in range(100, 150):
        harness.connect(silent)
    assert len(harness.leader._gate._waiting) <= 3 + 16
    now = time.monotonic()
    harness.leader._gate.close_late_connections(now)
    for late in range(5):
        harness.leader._gate.close_late_connections(now + HELLO_TIMEOUT_S + late + 1)
    assert not harness.leader._gate._waiting
    harness.leader._gate.close_late_connections(now + LOG_INTERVAL_S)
    messages = logged_texts(harness)
    assert len(messages) == 2 and all(len(line) < 200 for line in messages), messages
    last = "the last from 127.0.0.1: it sent no hello before many others came"
    assert messages[0] == f"closed 331 connections, {last}"
    assert messages[1].endswith(": it sent no hello within 10 s")
    harness.join(2)
    assert harness.has_started


def test_hello_during_a_busy_period_is_read_before_the_timeout(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    side = HostHandshake(UID.encode())
    hello = harness.greeting(side, 2, harness.connect(2))
    sock, fd = harness.hosts[2]
    sock.sendall(hello)
    harness.leader._gate.close_late_connections(time.monotonic() + 3 * HELLO_TIMEOUT_S)
    harness.read(fd)
    harness.leader._gate.close_late_connections(time.monotonic() + 3 * HELLO_TIMEOUT_S)
    assert harness.has_started


def test_host_joins_despite_the_maximum_of_silent_strangers(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    for silent in range(100, 100 + 2 * (3 + 16)):
        harness.connect(silent)
    harness.join(2)
    assert harness.has_started


@pytest.mark.parametrize(("hosts", "accepted"), [(100, 60), (3, 3 + 16)])
def test_simultaneous_hosts_are_accepted_in_one_turn(
    gang: Callable[..., Gang], hosts: int, accepted: int
) -> None:
    harness = gang(hosts, joined=0)
    harness.sockets += [socket.create_connection(harness.address) for _ in range(60)]
    harness.read(harness.listener)
    harness.leader._gate.close_late_connections(time.monotonic())
    assert len(harness.leader._gate._waiting) == accepted and not harness.messages


def test_refusals_are_logged_once_and_bounded(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    for _ in range(100):
        harness.join(2, generation=7)
    (refusal,) = harness.messages
    assert "it has generation 7, host 0 has generation 0" in refusal
    for number in range(2 * MAX_REFUSALS):
        harness.join(2, generation=8 + number, hostname="h" * 900)
    assert len(harness.messages) == len(harness.leader._gang.gathering.refusals) == MAX_REFUSALS
    assert sum(map(len, harness.messages)) < 100_000


def test_malformed_hello_is_logged_with_its_address(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    harness.join(2, spec=3)
    assert read_to_end(harness.hosts[2][0]) == b""
    harness.leader._gate.close_late_connections(time.monotonic())
    fault = "its hello is invalid: spec must be a string, not 3"
    assert harness.messages == [f"closed a connection from 127.0.0.1: {fault}"]
