"""The proof of the run's key: it fits one connection, one direction and one content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang.protocol import HandshakeError, HostHandshake, LeaderHandshake

KEY = b"the-uid"
FIELDS = {"host": 1, "hostname": "caf\udce9", "fault": None}


def hello(leader: LeaderHandshake, host: HostHandshake) -> dict[str, Any]:
    return over_the_wire(
        "hello", host.answer_challenge({"type": "challenge", **leader.challenge_fields()}, FIELDS)
    )


def over_the_wire(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps({"type": kind, **fields}))
    return found


def test_both_sides_know_each_other_by_a_key_that_is_in_no_message() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(KEY)
    said = hello(leader, host)
    assert leader.open_hello(said) == FIELDS | {"hostname": "caf\\udce9"}
    answer = over_the_wire("welcome", leader.seal_answer("welcome", epoch="e"))
    assert host.open_answer(answer) == {"epoch": "e"}
    assert KEY.decode() not in json.dumps([leader.challenge_fields(), said, answer])


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
def test_a_hello_that_was_changed_is_not_believed(change: dict[str, Any]) -> None:
    leader = LeaderHandshake(KEY)
    with pytest.raises(HandshakeError):
        leader.open_hello(hello(leader, HostHandshake(KEY)) | change)


def test_neither_side_believes_one_with_another_key() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(b"another")
    with pytest.raises(HandshakeError, match="key"):
        leader.open_hello(hello(leader, host))
    for kind in ("welcome", "refused"):
        with pytest.raises(HandshakeError, match="key"):
            host.open_answer(over_the_wire(kind, leader.seal_answer(kind, epoch="e")))


def test_what_one_side_sent_is_not_believed_from_the_other_or_on_another_connection() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(KEY)
    said = hello(leader, host)
    leader.open_hello(said)
    answer = over_the_wire("welcome", leader.seal_answer("welcome", epoch="e"))
    for message in (
        said,
        said | {"type": "welcome"},
        answer | {"type": "refused"},
        {"type": "start"},
    ):
        with pytest.raises(HandshakeError):
            host.open_answer(message)
    later = HostHandshake(KEY)
    hello(LeaderHandshake(KEY), later)
    with pytest.raises(HandshakeError):
        later.open_answer(answer)
    with pytest.raises(HandshakeError):
        LeaderHandshake(KEY).open_hello(said)


def test_a_host_answers_one_challenge_alone() -> None:
    leader, host = LeaderHandshake(KEY), HostHandshake(KEY)
    hello(leader, host)
    with pytest.raises(HandshakeError):
        hello(leader, host)
