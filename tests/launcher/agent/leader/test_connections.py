"""Who may come in to the leader, and what whoever may not is told, costs and leaves in the log."""

from __future__ import annotations

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

STRANGE = [
    b"[" * 100_000 + b"\n",
    b'{"type": "hello", "fields": ' + b"[" * 10_000 + b"\n",
    b'{"type": "hello", "nonce": "'
    + b"0" * 32
    + b'", "fields": "'
    + b"[" * 5_000
    + b'", "proof": "0"}\n',
    json.dumps({"type": "hello", "nonce": "0" * 32, "fields": "{}", "proof": "\ud800"}).encode()
    + b"\n",
    json.dumps({"type": "hello", "nonce": "\ud800" * 32, "fields": "\udce9", "proof": "x"}).encode()
    + b"\n",
    json.dumps({"type": "hello", "nonce": "0" * 32, "fields": {}, "proof": []}).encode() + b"\n",
    json.dumps({"type": "hello", "nonce": 3, "fields": "{}", "proof": "x"}).encode() + b"\n",
    json.dumps({"type": "hello", "host": 2, "uid": UID, "spec": 3, "fault": "stop"}).encode()
    + b"\n",
    b'{"type": "stop"}\n{"type": "kill"}\n',
    b"GET /metrics HTTP/1.1\r\n\r\n",
    b"\xff\n",
    b"x" * (MAX_GREETING_BYTES + 1),
]


def received(sock: socket.socket) -> bytes:
    """What the leader sent until it closed the connection."""
    found = b""
    sock.settimeout(PATIENCE_S)
    try:
        while data := sock.recv(65536):
            found += data
    except ConnectionResetError:  # it closed before it had read everything
        pass
    return found


def of_gang(gang: Gang) -> list[str]:
    """What was logged, but for the attempt's start."""
    return [text for text in gang.said if "starting attempt" not in text]


@pytest.mark.parametrize("line", STRANGE, ids=lambda line: repr(line[:40]))
@pytest.mark.parametrize("joined", [2, 3], ids=["gathering", "running"])
def test_a_line_of_a_stranger_closes_its_own_link_alone(
    gang: Callable[..., Gang], line: bytes, joined: int
) -> None:
    of = gang(3, joined=joined)
    of.connect(99)
    sock, fd = of.hosts[99]
    sock.sendall(line)
    while fd in of.loop.ready:
        of.read(fd)
    assert received(sock) == b""
    assert of.leader._gang.verdict is None and len(of.leader._peers) == joined and not of_gang(of)
    if joined == 2:
        of.join(2)
    assert any("starting attempt 1" in text for text in of.said)


@pytest.mark.parametrize(
    "key", [b"", b"another", UID.encode()[:-1]], ids=["none", "another", "a part of it"]
)
def test_without_the_key_no_hello_is_accepted_and_nothing_is_told(
    gang: Callable[..., Gang], key: bytes
) -> None:
    of = gang(3, joined=2)
    of.join(2, key, fault="the gang must end")
    assert received(of.hosts[2][0]) == b""
    assert (
        of.leader._gang.verdict is None
        and 2 not in of.leader._gang.gathering.arrived_hosts
        and not of.said
    )
    of.join(2)
    assert any("starting attempt 1" in text for text in of.said)


def test_a_hello_that_was_recorded_is_not_accepted_again(gang: Callable[..., Gang]) -> None:
    of = gang(3, joined=1)
    recorded = of.greeting(HostHandshake(UID.encode()), 1, of.connect(1))
    of.raw(1, recorded)
    assert 1 in of.leader._peers
    of.connect(2)
    of.raw(2, recorded)
    assert received(of.hosts[2][0]) == b"" and len(of.leader._peers) == 2


def test_the_uid_is_in_no_message(gang: Callable[..., Gang]) -> None:
    of = gang(2)
    assert UID.encode() not in of.greeting(
        HostHandshake(UID.encode()), 1, {"type": "challenge", "nonce": "0" * 32}
    )
    of.join(2)  # is refused: there are two hosts
    of.leader._on_tick()
    of.event(1, "error", error={"type": "ValueError", "message": "boom"})
    for host in (0, 1):
        of.send(host, "gone")
    for sock in of.sockets:
        while select.select([sock], [], [], 0)[0] and (data := sock.recv(65536)):
            assert UID.encode() not in data
    assert of.leader._gang.stage.name == "LEAVE"


@pytest.mark.parametrize(
    "changes", [{"fault": "a fault"}, {"spec": "another"}, {"versions": {}}], ids=str
)
def test_a_fault_while_the_processes_run_ends_nothing(
    gang: Callable[..., Gang], changes: dict[str, Any]
) -> None:
    of = gang(3)
    sock, _ = of.hosts[2]
    of.close(2)
    assert of.leader._gang.verdict is None, "its loss is not settled yet"
    of.join(2, **changes)
    assert of.leader._gang.verdict is None
    assert any(
        "refused: host 2" in text and "tried to join after the start" in text for text in of.said
    ), of.said
    assert sock.fileno() == -1


def test_thousands_of_strangers_leave_two_lines_in_the_log_and_no_host_out(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3, joined=2)
    for _ in range(300):
        of.connect(99)
        of.raw(99, STRANGE[7])
    for silent in range(100, 150):
        of.connect(silent)
    assert len(of.leader._gate._waiting) <= 3 + 16
    now = time.monotonic()
    of.leader._gate.close_late_connections(now)
    for late in range(5):
        of.leader._gate.close_late_connections(now + HELLO_TIMEOUT_S + late + 1)
    assert not of.leader._gate._waiting
    of.leader._gate.close_late_connections(now + LOG_INTERVAL_S)
    said = of_gang(of)
    assert len(said) == 2 and all(len(line) < 200 for line in said), said
    assert (
        said[0] == "closed 331 connections, the last from 127.0.0.1: it sent no hello before many "
        "others came"
    )
    assert said[1].endswith(": it sent no hello within 10 s")
    of.join(2)
    assert any("starting attempt 1" in text for text in of.said)


def test_a_hello_that_came_while_the_leader_was_busy_for_long_is_read_before_its_connection_counts_as_silent(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3, joined=2)
    side = HostHandshake(UID.encode())
    hello = of.greeting(side, 2, of.connect(2))
    sock, fd = of.hosts[2]
    sock.sendall(hello)
    of.leader._gate.close_late_connections(time.monotonic() + 3 * HELLO_TIMEOUT_S)
    of.read(fd)
    of.leader._gate.close_late_connections(time.monotonic() + 3 * HELLO_TIMEOUT_S)
    assert any("starting attempt 1" in text for text in of.said), of.said


def test_a_host_joins_while_silent_strangers_hold_as_many_connections_as_there_may_be(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3, joined=2)
    for silent in range(100, 100 + 2 * (3 + 16)):
        of.connect(silent)
    of.join(2)
    assert any("starting attempt 1" in text for text in of.said)


@pytest.mark.parametrize(("hosts", "accepted"), [(100, 60), (3, 3 + 16)])
def test_hosts_that_connect_at_once_are_accepted_in_one_turn_and_none_is_turned_away(
    gang: Callable[..., Gang], hosts: int, accepted: int
) -> None:
    of = gang(hosts, joined=0)
    of.sockets += [socket.create_connection(of.address) for _ in range(60)]
    of.read(of.listener)
    of.leader._gate.close_late_connections(time.monotonic())
    assert len(of.leader._gate._waiting) == accepted and not of.said


def test_refusals_are_logged_once_each_and_only_so_many_are_kept(gang: Callable[..., Gang]) -> None:
    of = gang(3, joined=2)
    for _ in range(100):
        of.join(2, generation=7)
    assert len(of.said) == 1 and "it has generation 7, host 0 has generation 0" in of.said[0]
    for number in range(2 * MAX_REFUSALS):
        of.join(2, generation=8 + number, hostname="h" * 900)
    assert len(of.said) == len(of.leader._gang.gathering.refusals) == MAX_REFUSALS
    assert sum(map(len, of.said)) < 100_000


def test_a_host_whose_hello_has_another_form_is_named_by_its_address(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3, joined=2)
    of.join(2, spec=3)
    assert received(of.hosts[2][0]) == b""
    of.leader._gate.close_late_connections(time.monotonic())
    assert of.said == [
        "closed a connection from 127.0.0.1: its hello is invalid: spec must be a string, not 3"
    ]
