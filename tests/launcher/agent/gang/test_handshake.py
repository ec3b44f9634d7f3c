"""The proof of the run's key: it fits one connection, one direction and one content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang.protocol import HostSide, LeaderSide, NotProven

KEY = b"the-uid"
FIELDS = {"host": 1, "hostname": "caf\udce9", "fault": None}


def hello(leader: LeaderSide, host: HostSide) -> dict[str, Any]:
    return over_the_wire("hello", host.hello({"type": "challenge", **leader.challenge()}, FIELDS))


def over_the_wire(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps({"type": kind, **fields}))
    return found


def test_both_sides_know_each_other_by_a_key_that_is_in_no_message() -> None:
    leader, host = LeaderSide(KEY), HostSide(KEY)
    said = hello(leader, host)
    assert leader.opened(said) == FIELDS | {"hostname": "caf\\udce9"}
    answer = over_the_wire("welcome", leader.sealed("welcome", epoch="e"))
    assert host.opened(answer) == {"epoch": "e"}
    assert KEY.decode() not in json.dumps([leader.challenge(), said, answer])


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
    leader = LeaderSide(KEY)
    with pytest.raises(NotProven):
        leader.opened(hello(leader, HostSide(KEY)) | change)


def test_neither_side_believes_one_with_another_key() -> None:
    leader, host = LeaderSide(KEY), HostSide(b"another")
    with pytest.raises(NotProven, match="key"):
        leader.opened(hello(leader, host))
    for kind in ("welcome", "refused"):
        with pytest.raises(NotProven, match="key"):
            host.opened(over_the_wire(kind, leader.sealed(kind, epoch="e")))


def test_what_one_side_sent_is_not_believed_from_the_other_or_on_another_connection() -> None:
    leader, host = LeaderSide(KEY), HostSide(KEY)
    said = hello(leader, host)
    leader.opened(said)
    answer = over_the_wire("welcome", leader.sealed("welcome", epoch="e"))
    for message in (said, said | {"type": "welcome"}, answer | {"type": "refused"}, {"type": "start"}):
        with pytest.raises(NotProven):
            host.opened(message)
    later = HostSide(KEY)
    hello(LeaderSide(KEY), later)
    with pytest.raises(NotProven):
        later.opened(answer)
    with pytest.raises(NotProven):
        LeaderSide(KEY).opened(said)


def test_a_host_answers_one_challenge_alone() -> None:
    leader, host = LeaderSide(KEY), HostSide(KEY)
    hello(leader, host)
    with pytest.raises(NotProven):
        hello(leader, host)
