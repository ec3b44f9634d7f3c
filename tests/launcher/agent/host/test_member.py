"""What a host of the gang does with its leader's connection and its processes' ends. No process is started."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock, PropertyMock

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.gang.progress import RankProgress
from jaxlaunch.launcher.agent.gang.protocol import Hello, LeaderHandshake
from jaxlaunch.launcher.agent.gang.root_cause import EventKind
from jaxlaunch.launcher.agent.host.leader_connection import CHALLENGE_TIMEOUT_S, RETRY_REFUSED_S
from jaxlaunch.launcher.agent.host.member import Member
from jaxlaunch.launcher.agent.io import link


@pytest.fixture
def member() -> tuple[Member, MagicMock]:
    """Host 1 and its loop, which only notes what it is asked for."""
    job = AgentJob("t", ("true",))
    environ = {
        contract.LEADER: "127.0.0.1:1",
        contract.HOSTS: "2",
        contract.INDEX: "1",
        contract.UID: "u",
    }
    place = config.read_config(environ | {contract.JOB: job.to_json()})
    loop, quiet = MagicMock(), MagicMock()
    hello = Hello.from_config(place, 9400)
    return Member(
        place,
        loop,
        quiet,
        hello,
        quiet,
        None,
        say=quiet,
        finish=MagicMock(),
        on_orphaned=quiet,
        take_ranks=quiet,
    ), loop


def test_a_connection_that_the_leader_reset_at_once_is_dialled_again(
    member: tuple[Member, MagicMock], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Callable[..., Any]:
        raise OSError(22, "Invalid argument")  # as macOS says of a socket that was reset

    of, loop = member
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    monkeypatch.setattr(link.Link, "__init__", refuse)
    of.leader._on_connected(sock)
    other.close()
    assert sock.fileno() == -1
    assert loop.call_later.call_args_list[-1].args[1] == of.leader._dialer._resolve_address


def connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of one over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
        theirs.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # what is sent is there at once
        return ours, theirs


@pytest.fixture
def stranger(member: tuple[Member, MagicMock]) -> Iterator[Callable[..., bytes]]:
    """Sends a message to the member in the leader's place; returns what the member has sent."""
    of, _ = member
    ours, theirs = connection()
    theirs.settimeout(0.0)
    of.leader._on_connected(ours)

    def send(kind: str, /, **fields: Any) -> bytes:
        theirs.sendall(json.dumps({"type": kind, **fields}).encode() + b"\n")
        assert of.leader._link is not None
        of.leader._link._receive_lines()
        try:
            return theirs.recv(65536)
        except BlockingIOError:
            return b""

    yield send
    ours.close()
    theirs.close()


VERDICT = {"cause": "bad_spec", "code": 64, "message": "end"}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("start", {"attempt": 1, "coordinator": "127.0.0.1:1", "start": 1}),
        ("leave", {"verdict": VERDICT}),
        ("verdict", {"attempt": 1, "verdict": VERDICT}),
        ("welcome", {"epoch": "e"}),
        ("welcome", {"fields": '{"epoch": "e"}', "proof": "0" * 64}),
        ("refused", {"message": "go away", "code": 64, "may_retry": False}),
        (
            "refused",
            {"fields": '{"message": "x", "code": 64, "may_retry": false}', "proof": "0" * 64},
        ),
        ("challenge", {"nonce": 3}),
        ("ping", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("challenges", [0, 1])
def test_a_host_obeys_nobody_who_has_not_proven_the_key_and_dials_again(
    member: tuple[Member, MagicMock],
    stranger: Callable[..., bytes],
    kind: str,
    fields: dict[str, Any],
    challenges: int,
) -> None:
    of, loop = member
    for _ in range(challenges):
        assert json.loads(stranger("challenge", nonce="1" * 32))["type"] == "hello"
    stranger(kind, **fields)
    assert of.leader._link is None and not of.state.has_started and of.state.verdict is None
    assert not of._finish.called  # type: ignore[attr-defined]
    assert loop.call_later.call_args_list[-1].args == (
        RETRY_REFUSED_S,
        of.leader._dialer._resolve_address,
    )
    assert ("host 0 did not admit this host: ") in of._say.call_args.args[0]  # type: ignore[attr-defined]


@pytest.fixture
def leader(member: tuple[Member, MagicMock]) -> Iterator[Callable[..., None]]:
    """Sends a message to the member as the leader that has admitted it."""
    of, _ = member
    ours, theirs = connection()
    of.leader._on_connected(ours)
    side = LeaderHandshake(of._config.handshake_key)
    numbers = itertools.count()

    def put(fields: dict[str, Any]) -> None:
        theirs.sendall(json.dumps(fields).encode() + b"\n")
        if of.leader._link is not None:
            of.leader._link._receive_lines()

    put({"type": "challenge", **side.challenge_fields()})
    side.open_hello(json.loads(theirs.recv(65536)))
    put({"type": "welcome", **side.seal_answer("welcome", epoch="e")})
    yield lambda kind, **fields: put({"type": kind, **fields, "epoch": "e", "n": next(numbers)})
    ours.close()
    theirs.close()


STATE = {
    "attempt": 1,
    "of": {"uid": "", "generation": 0, "attempt": 1, "started": 1.0, "at": 2.0},
    "seconds": {},
}
DEEP = json.loads("[" * 20 + "]" * 20)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ping", {}),
        ("ping", {"gang": None}),
        ("ping", {"gang": []}),
        ("ping", {"gang": {**STATE, "of": None}}),
        ("ping", {"gang": {**STATE, "seconds": {"step": "long"}}}),
        ("ping", {"gang": {**STATE, "silence_s": None}}),
        ("ping", {"gang": {**STATE, "foremost": -1}}),
        ("ping", {"gang": {**STATE, "left": {"crash": DEEP}}}),
        ("start", {}),
        ("start", {"attempt": "1", "coordinator": "a:1", "start": 1}),
        ("start", {"attempt": 1, "coordinator": None, "start": 1}),
        ("start", {"attempt": 1, "coordinator": "a:1\nLD_PRELOAD=x", "start": 1}),
        ("start", {"attempt": 1, "coordinator": "a:1", "start": "../../x"}),
        ("start", {"attempt": 2**70, "coordinator": "a:1", "start": 1}),
        ("start", {"attempt": 1, "coordinator": "a:1", "start": 1, "saved": "40"}),
        ("verdict", {"attempt": 1}),
        ("verdict", {"attempt": 1, "verdict": []}),
        ("verdict", {"attempt": 1, "verdict": {**VERDICT, "code": 700}}),
        ("leave", {"verdict": {**VERDICT, "message": 3}}),
        ("leave", {"verdict": None}),
    ],
    ids=str,
)
def test_a_message_of_another_form_ends_the_connection_to_the_leader_and_no_agent(
    member: tuple[Member, MagicMock], leader: Callable[..., None], kind: str, fields: dict[str, Any]
) -> None:
    of, _ = member
    leader("ping", gang=STATE)
    assert of.gang["attempt"] == 1
    leader("nothing that is known", gang=3)
    assert of.leader._link is not None
    of.state.has_started = True
    leader(kind, **fields)
    assert of.leader._link is None and of.gang["attempt"] == 1
    finished = of._finish.call_args.args[0]  # type: ignore[attr-defined]
    assert finished.code == contract.LOST
    assert finished.message.startswith(f"host 0 was lost: it sent a `{kind}` whose ")


def test_a_leader_that_proves_the_key_and_answers_nonsense_is_dialled_again(
    member: tuple[Member, MagicMock],
) -> None:
    of, loop = member
    for kind, fields in (
        ("welcome", {"epoch": 3}),
        ("welcome", {}),
        ("refused", {"message": "x", "code": "64"}),
    ):
        ours, theirs = connection()
        of.leader._on_connected(ours)
        side = LeaderHandshake(of._config.handshake_key)
        theirs.sendall(
            json.dumps({"type": "challenge", **side.challenge_fields()}).encode() + b"\n"
        )
        assert of.leader._link is not None
        of.leader._link._receive_lines()
        side.open_hello(json.loads(theirs.recv(65536)))
        theirs.sendall(
            json.dumps({"type": kind, **side.seal_answer(kind, **fields)}).encode() + b"\n"
        )
        of.leader._link._receive_lines()
        theirs.close()
        assert of.leader._link is None and not of._finish.called  # type: ignore[attr-defined]
        assert loop.call_later.call_args_list[-1].args == (
            RETRY_REFUSED_S,
            of.leader._dialer._resolve_address,
        )


def test_a_leader_that_says_nothing_is_left_and_dialled_again(
    member: tuple[Member, MagicMock], stranger: Callable[..., bytes]
) -> None:
    of, loop = member
    of.leader._ticked_at = time.monotonic()
    of.leader.last_message_at -= CHALLENGE_TIMEOUT_S + 1.0
    of._on_tick()
    assert of.leader._link is None
    assert loop.call_later.call_args_list[-1].args == (
        RETRY_REFUSED_S,
        of.leader._dialer._resolve_address,
    )


def test_a_host_waits_longer_for_the_challenge_of_a_busy_leader_than_for_what_follows(
    member: tuple[Member, MagicMock], stranger: Callable[..., bytes]
) -> None:
    of, _ = member
    of.leader._ticked_at = time.monotonic()
    of.leader.last_message_at -= link.SILENCE_TIMEOUT_S + 1.0
    of._on_tick()
    assert of.leader._link is not None
    stranger("challenge", nonce="1" * 32)
    of.leader.last_message_at -= link.SILENCE_TIMEOUT_S + 1.0
    of._on_tick()
    assert of.leader._link is None
    said = of._say.call_args.args[0]  # type: ignore[attr-defined]
    assert "did not admit this host: no message for 10 s" in said


def test_a_leader_that_closes_again_and_again_is_reported_once(
    member: tuple[Member, MagicMock],
) -> None:
    of, _ = member
    for _ in range(3):
        ours, theirs = connection()
        of.leader._on_connected(ours)
        theirs.close()
        assert of.leader._link is not None
        of.leader._link._receive_lines()
    said = [call.args[0] for call in of._say.call_args_list]  # type: ignore[attr-defined]
    assert said == [
        "host 0 did not admit this host: connection closed; it may belong to another run, or have "
        "another gang_secret"
    ]


@pytest.mark.parametrize(
    ("code", "passes_it_on"), [(1, True), (128, True), (255, True), (0, False), (137, False)]
)
def test_a_wrapper_that_ends_with_a_code_of_its_own_passes_the_exception_on(
    member: tuple[Member, MagicMock], monkeypatch: pytest.MonkeyPatch, code: int, passes_it_on: bool
) -> None:
    of, _ = member
    sent: list[EventKind] = []
    monkeypatch.setattr(of.reports, "send_event", lambda kind, child, **fields: sent.append(kind))
    child = MagicMock(rank=1, handled={"type": "ValueError"}, tail_text="")
    of._on_child_end(child, code)
    assert (EventKind.ERROR in sent) is passes_it_on


def test_the_stacks_of_a_process_are_read_until_they_are_sent_and_not_after(
    member: tuple[Member, MagicMock], leader: Callable[..., None]
) -> None:
    of, _ = member
    reads: list[str] = []
    child = MagicMock(rank=1, progress=RankProgress(0.0))
    type(child).stacks_text = PropertyMock(side_effect=lambda: reads.append("read") or "T")
    of.processes.children[1] = child
    leader("stacks")
    for now in range(5):
        of.reports.tick(float(now))
    assert len(reads) == 2
