"""What a host does with its leader's connection and the ends of its processes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import MagicMock, PropertyMock, patch

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.gang.progress import RankProgress
from jaxlaunch.launcher.agent.gang.protocol import Hello, LeaderHandshake
from jaxlaunch.launcher.agent.gang.root_cause import EventKind
from jaxlaunch.launcher.agent.host.leader_connection import CHALLENGE_TIMEOUT_S, RETRY_REFUSED_S
from jaxlaunch.launcher.agent.host.member import Member
from jaxlaunch.launcher.agent.host.program_end import ProgramEnd
from jaxlaunch.launcher.agent.io import link
from jaxlaunch.records.verdict import verdict_for_code


@pytest.fixture
def member() -> tuple[Member, MagicMock]:
    """Host 1 and its loop, which only notes what it is asked for."""
    job = AgentJob("t", ("true",))
    environ = {contract.LEADER: "127.0.0.1:1", contract.HOSTS: "2", contract.INDEX: "1"}
    place = config.read_config(environ | {contract.UID: "u", contract.JOB: job.to_json()})
    loop, quiet, finish = MagicMock(), MagicMock(), MagicMock()
    callbacks = {"say": quiet, "finish": finish, "on_orphaned": quiet, "take_ranks": quiet}
    hello = Hello.from_config(place, 9400)
    return Member(place, loop, quiet, hello, quiet, None, **callbacks), loop


def assert_dials_again(agent: Member, loop: MagicMock, after_s: float) -> None:
    assert agent.leader._link is None
    call = loop.call_later.call_args_list[-1]
    assert call.args == (after_s, agent.leader._dialer._resolve_address)


def test_coordinator_listens_everywhere_if_its_address_is_not_of_this_host(
    member: tuple[Member, MagicMock],
) -> None:
    agent, _ = member
    say = cast(MagicMock, agent._say)
    with patch.object(type(agent.leader), "leader_address", PropertyMock(return_value="127.0.0.5")):
        assert agent._choose_bind_address() == "127.0.0.5"
    with patch.object(type(agent.leader), "leader_address", PropertyMock(return_value="192.0.2.7")):
        assert agent._choose_bind_address() == "::"
    note = say.call_args.args[0]
    assert "192.0.2.7, is not one of its interfaces" in note


def test_connection_reset_at_once_is_dialled_again(
    member: tuple[Member, MagicMock], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Callable[..., Any]:
        raise OSError(22, "Invalid argument")  # as macOS says of a socket that was reset

    agent, loop = member
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    monkeypatch.setattr(link.Link, "__init__", refuse)
    agent.leader._on_connected(sock)
    other.close()
    assert sock.fileno() == -1
    assert loop.call_later.call_args_list[-1].args[1] == agent.leader._dialer._resolve_address


def test_rank_that_is_stopped_while_it_starts_is_not_blamed(
    member: tuple[Member, MagicMock],
) -> None:
    """Ctrl-C ends Python before it has loaded our site hook."""
    agent, _ = member
    child = MagicMock(rank=1)
    child.progress.has_hello = False
    agent.processes.children[1] = child
    say = cast(MagicMock, agent._say)
    agent.state.start_attempt(1)
    agent.state.is_stopping = True
    agent.reports.check_hellos([child])
    say.assert_not_called()
    agent.state.is_stopping = False
    agent.reports.check_hellos([child])
    say.assert_called_once()


@pytest.mark.parametrize(
    ("changes", "left", "committed", "attempt", "may_restart"),
    [
        ({}, 2, None, 1, True),
        ({}, 0, None, 1, False),
        ({}, 0, 40, 1, True),
        # The last message of the leader was about the attempt before.
        ({}, 0, None, 0, True),
        ({"in_place_limit": 0}, 0, 40, 1, False),
        ({"replaces": True}, 0, None, 1, True),
        ({"requeue_codes": {42: "free"}}, 0, None, 1, True),
    ],
)
def test_standby_process_is_kept_only_for_an_allowed_restart(
    member: tuple[Member, MagicMock],
    changes: dict[str, Any],
    left: int,
    committed: int | None,
    attempt: int,
    may_restart: bool,
) -> None:
    agent, _ = member
    job = dataclasses.replace(agent._config.job, command=None, **changes)
    place = dataclasses.replace(agent._config, job=job)
    agent._config = agent.processes._config = place
    agent.state.start_attempt(1)
    progress = {} if committed is None else {"first_committed": committed}
    agent.gang = {"attempt": attempt, "of": progress, "left": {"in_place": left}}
    started: list[int] = []

    def start_child(rank: int, *_: Any, **__: Any) -> MagicMock:
        started.append(rank)
        return MagicMock()

    with patch.object(agent.processes, "_start_child", start_child):
        agent.processes.keep_standbys()
    assert started == ([0] if may_restart else [])
    for standby in agent.processes._standbys.values():
        standby.close()


def make_connection() -> tuple[socket.socket, socket.socket]:
    """Both ends of one over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
        # Data arrives at once.
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ours, theirs


@pytest.fixture
def stranger(member: tuple[Member, MagicMock]) -> Iterator[Callable[..., bytes]]:
    """Sends a message to the member in the leader's place; returns what the member has sent."""
    agent, _ = member
    ours, theirs = make_connection()
    theirs.settimeout(0.0)
    agent.leader._on_connected(ours)

    def send(kind: str, /, **fields: Any) -> bytes:
        theirs.sendall(json.dumps({"type": kind, **fields}).encode() + b"\n")
        assert agent.leader._link is not None
        agent.leader._link._receive_lines()
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
        ("refused", {"fields": '{"message": "x", "code": 64}', "proof": "0" * 64}),
        ("challenge", {"nonce": 3}),
        ("ping", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("challenges", [0, 1])
def test_host_ignores_a_leader_without_the_key(
    member: tuple[Member, MagicMock],
    stranger: Callable[..., bytes],
    kind: str,
    fields: dict[str, Any],
    challenges: int,
) -> None:
    agent, loop = member
    for _ in range(challenges):
        assert json.loads(stranger("challenge", nonce="1" * 32))["type"] == "hello"
    stranger(kind, **fields)
    assert not agent.state.has_started and agent.state.verdict is None
    assert not agent._finish.called  # type: ignore[attr-defined]
    assert_dials_again(agent, loop, RETRY_REFUSED_S)
    assert ("host 0 did not admit this host: ") in agent._say.call_args.args[0]  # type: ignore[attr-defined]


@pytest.fixture
def leader(member: tuple[Member, MagicMock]) -> Iterator[Callable[..., None]]:
    """Sends a message to the member as the leader that has admitted it."""
    agent, _ = member
    ours, theirs = make_connection()
    agent.leader._on_connected(ours)
    side = LeaderHandshake(agent._config.handshake_key)
    numbers = itertools.count()

    def put(fields: dict[str, Any]) -> None:
        theirs.sendall(json.dumps(fields).encode() + b"\n")
        if agent.leader._link is not None:
            agent.leader._link._receive_lines()

    put({"type": "challenge", **side.challenge_fields()})
    side.open_hello(json.loads(theirs.recv(65536)))
    put({"type": "welcome", **side.seal_answer("welcome", epoch="e")})
    yield lambda kind, **fields: put({"type": kind, **fields, "epoch": "e", "n": next(numbers)})
    ours.close()
    theirs.close()


PROGRESS = {"uid": "", "generation": 0, "attempt": 1, "started": 1.0, "at": 2.0}
STATE = {"attempt": 1, "of": PROGRESS, "seconds": {}}
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
def test_malformed_order_ends_only_the_connection(
    member: tuple[Member, MagicMock], leader: Callable[..., None], kind: str, fields: dict[str, Any]
) -> None:
    agent, _ = member
    leader("ping", gang=STATE)
    assert agent.gang["attempt"] == 1
    leader("nothing that is known", gang=3)
    assert agent.leader._link is not None
    agent.state.has_started = True
    leader(kind, **fields)
    assert agent.leader._link is None and agent.gang["attempt"] == 1
    finished = agent._finish.call_args.args[0]  # type: ignore[attr-defined]
    assert finished.code == contract.LOST
    assert finished.message.startswith(f"host 0 was lost: it sent a `{kind}` whose ")


def answer_hello(agent: Member, kind: str, fields: dict[str, Any]) -> None:
    """Prove to be the leader, and answer the host's hello."""
    ours, theirs = make_connection()
    agent.leader._on_connected(ours)
    side = LeaderHandshake(agent._config.handshake_key)
    challenge = {"type": "challenge", **side.challenge_fields()}
    theirs.sendall(json.dumps(challenge).encode() + b"\n")
    assert agent.leader._link is not None
    agent.leader._link._receive_lines()
    side.open_hello(json.loads(theirs.recv(65536)))
    answer = {"type": kind, **side.seal_answer(kind, **fields)}
    theirs.sendall(json.dumps(answer).encode() + b"\n")
    agent.leader._link._receive_lines()
    theirs.close()


def test_nonsense_from_a_proven_leader_is_dialled_again(member: tuple[Member, MagicMock]) -> None:
    agent, loop = member
    refusal = {"message": "x", "code": "64"}
    for kind, fields in (("welcome", {"epoch": 3}), ("welcome", {}), ("refused", refusal)):
        answer_hello(agent, kind, fields)
        assert not agent._finish.called  # type: ignore[attr-defined]
        assert_dials_again(agent, loop, RETRY_REFUSED_S)


def test_refused_host_says_why_and_ends_unless_it_may_retry(
    member: tuple[Member, MagicMock],
) -> None:
    agent, loop = member
    refusal = {"message": "host 1 has jax 2, host 0 has 1", "code": contract.BAD_SPEC}
    said = agent._say.call_args_list  # type: ignore[attr-defined]
    answer_hello(agent, "refused", refusal | {"may_retry": True})
    assert not agent._finish.called  # type: ignore[attr-defined]
    assert_dials_again(agent, loop, RETRY_REFUSED_S)
    answer_hello(agent, "refused", refusal | {"may_retry": False})
    message = "host 0 refused this host: host 1 has jax 2, host 0 has 1"
    assert [call.args for call in said] == [(message,)] * 2
    verdict, leaves_alone = agent._finish.call_args.args  # type: ignore[attr-defined]
    assert (verdict.code, verdict.message) == (contract.BAD_SPEC, refusal["message"])
    assert not leaves_alone


def test_host_gives_up_when_nobody_replaces_the_leader(member: tuple[Member, MagicMock]) -> None:
    agent, loop = member
    agent.reports.timeouts_s = {**agent.reports.timeouts_s, "replace": 7.0}
    agent._wait_for_leader(verdict_for_code(contract.LOST, "host 0 is gone"))
    (give_up,) = (call.args[1] for call in loop.call_later.call_args_list if call.args[0] == 7.0)
    assert not agent._finish.called  # type: ignore[attr-defined]
    give_up()
    verdict, leaves_alone = agent._finish.call_args.args  # type: ignore[attr-defined]
    assert (verdict.code, leaves_alone) == (contract.LOST, False)


def test_silent_leader_is_dialled_again(
    member: tuple[Member, MagicMock], stranger: Callable[..., bytes]
) -> None:
    agent, loop = member
    agent.leader._ticked_at = time.monotonic()
    agent.leader.last_message_at -= CHALLENGE_TIMEOUT_S + 1.0
    agent._on_tick()
    assert_dials_again(agent, loop, RETRY_REFUSED_S)


def test_challenge_may_take_longer_than_later_messages(
    member: tuple[Member, MagicMock], stranger: Callable[..., bytes]
) -> None:
    agent, _ = member
    agent.leader._ticked_at = time.monotonic()
    agent.leader.last_message_at -= link.SILENCE_TIMEOUT_S + 1.0
    agent._on_tick()
    assert agent.leader._link is not None
    stranger("challenge", nonce="1" * 32)
    agent.leader.last_message_at -= link.SILENCE_TIMEOUT_S + 1.0
    agent._on_tick()
    assert agent.leader._link is None
    message = agent._say.call_args.args[0]  # type: ignore[attr-defined]
    assert "did not admit this host: no message for 10 s" in message


def test_repeated_refusal_is_reported_once(member: tuple[Member, MagicMock]) -> None:
    agent, _ = member
    for _ in range(3):
        ours, theirs = make_connection()
        agent.leader._on_connected(ours)
        theirs.close()
        assert agent.leader._link is not None
        agent.leader._link._receive_lines()
    (call,) = agent._say.call_args_list  # type: ignore[attr-defined]
    assert call.args[0].startswith(
        "host 0 did not admit this host: connection closed; it may belong to another run, or have "
        "another gang_secret"
    )


@pytest.mark.parametrize(
    ("code", "is_reported"), [(1, True), (128, True), (255, True), (0, False), (137, False)]
)
def test_exception_below_a_wrapper_is_reported(
    member: tuple[Member, MagicMock],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    is_reported: bool,
) -> None:
    agent, _ = member
    sent: list[EventKind] = []
    monkeypatch.setattr(agent.reports, "send_event", lambda kind, *_, **fields: sent.append(kind))
    child = MagicMock(rank=1, end=ProgramEnd(error={"type": "ValueError"}), tail_text="")
    agent._on_child_end(child, code)
    assert (EventKind.ERROR in sent) is is_reported


def test_stacks_are_read_only_until_they_are_sent(
    member: tuple[Member, MagicMock], leader: Callable[..., None]
) -> None:
    agent, _ = member
    reads: list[str] = []
    child = MagicMock(rank=1, progress=RankProgress(0.0), end=ProgramEnd())
    type(child).stacks_text = PropertyMock(side_effect=lambda: reads.append("read") or "T")
    agent.processes.children[1] = child
    leader("stacks")
    for now in range(5):
        agent.reports.tick(float(now))
    assert len(reads) == 2
