"""The proof of the run's key: it fits one connection, one direction and one content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang.protocol import HandshakeError, HostHandshake, LeaderHandshake

KEY = b"the-uid"
FIELDS = {"host": 1, "hostname": "caf\udce9", "fault": None}


def hello(leader: LeaderHandshake, host: HostHandshake) -> dict[str, Any]:
    challenge = {"type": "challenge", **leader.challenge_fields()}
    return over_the_wire("hello", host.answer_challenge(challenge, FIELDS))


def over_the_wire(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps({"type": kind, **fields}))
    return result


def test_handshake_never_sends_the_key() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(KEY)
    greeting = hello(leader, host)
    assert leader.open_hello(greeting) == FIELDS | {"hostname": "caf\\udce9"}
    answer = over_the_wire("welcome", leader.seal_answer("welcome", epoch="e"))
    assert host.open_answer(answer) == {"epoch": "e"}
    assert KEY.decode() not in json.dumps([leader.challenge_fields(), greeting, answer])


@pytest.mark.parametrize(
    "change",
    [
        {"fields": '{"host": 2}'},
        {"proof": "0" * 64},
        {"proof": "é"},
        {"proof": None},
        {"fields": None},
        {"fields": "[" * 1_000},
        {"nonce": "0" * 32},
        {"nonce": "0"},
        {"nonce": ["0" * 32]},
        {"type": "welcome"},
        {"type": "stop"},
    ],
    ids=str,
)
def test_changed_hello_is_rejected(change: dict[str, Any]) -> None:
    leader = LeaderHandshake(KEY)
    with pytest.raises(HandshakeError):
        leader.open_hello(hello(leader, HostHandshake(KEY)) | change)


def test_handshake_rejects_another_key() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(b"another")
    with pytest.raises(HandshakeError, match="key"):
        leader.open_hello(hello(leader, host))
    for kind in ("welcome", "refused"):
        with pytest.raises(HandshakeError, match="key"):
            host.open_answer(over_the_wire(kind, leader.seal_answer(kind, epoch="e")))


def test_proof_is_bound_to_direction_and_connection() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(KEY)
    greeting = hello(leader, host)
    leader.open_hello(greeting)
    answer = over_the_wire("welcome", leader.seal_answer("welcome", epoch="e"))
    forged = greeting | {"type": "welcome"}, answer | {"type": "refused"}
    for message in (greeting, *forged, {"type": "start"}):
        with pytest.raises(HandshakeError):
            host.open_answer(message)
    later = HostHandshake(KEY)
    hello(LeaderHandshake(KEY), later)
    with pytest.raises(HandshakeError):
        later.open_answer(answer)
    with pytest.raises(HandshakeError):
        LeaderHandshake(KEY).open_hello(greeting)


def test_host_answers_only_one_challenge() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(KEY)
    hello(leader, host)
    with pytest.raises(HandshakeError):
        hello(leader, host)
