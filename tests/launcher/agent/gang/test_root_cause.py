"""Which of many symptoms is the cause: tables, no process is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang.progress import RankProgress, Status
from jaxlaunch.launcher.agent.gang.root_cause import (
    Event,
    EventKind,
    find_root_cause,
    verdict_for_event,
    verdict_for_lost_leader,
)
from jaxlaunch.launcher.agent.leader.attempt import FINISHED_WAIT_S, Attempt
from jaxlaunch.launcher.agent.leader.hang import STACKS_TIMEOUT_S
from jaxlaunch.records.verdict import HangFacts, LostHost, Verdict
from tests.found import shows

GLOO = {
    "type": "ValueError",
    "message": "Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:4711",
}
STEPPING = Status(phase="step", step=20, stepped=True)
TRAINER = dataclasses.replace(STEPPING, trainer=True)
MISSED = (
    "The following tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks have crashed."
)
COORDINATION = "Terminating process because the JAX distributed service detected fatal errors."
UNHEALTHY = f"{COORDINATION} UNAVAILABLE: {MISSED}"


def error(rank: int, message: str = "boom", status: Status = STEPPING, **fields: Any) -> Event:
    report = {"type": "ValueError", "message": message, "traceback": "Traceback", "code": None}
    return Event(EventKind.ERROR, rank, rank, status, error=report | fields)


def echo(rank: int, status: Status = STEPPING) -> Event:
    return error(rank, status=status, **GLOO)


def ended(rank: int, code: int, status: Status = STEPPING, text: str = "") -> Event:
    status = dataclasses.replace(status, exit=code)
    return Event(EventKind.EXIT, rank, rank, status, exit=code, text=text)


def left(rank: int, status: Status = STEPPING) -> Event:
    return Event(EventKind.LEFT, rank, rank, dataclasses.replace(status, left=True, waits=True))


LEFT_EARLY = "rank 1's program ended while other ranks were still running"
LOST = Event(EventKind.LOST, 2, 2, STEPPING, lost=LostHost(2, "connection closed", 2, 2))
HANG = Event(EventKind.HANG, 1, 1, STEPPING, hang=HangFacts("step", 5.0, 5.0, 1))


@pytest.mark.parametrize(
    ("events", "code", "rank", "words"),
    [
        ([error(1)], 83, 1, "rank 1 raised at step 20: ValueError: boom"),
        # What the trainer says is a sentence for a person: whole, in one line, without the name of
        # its class.
        ([error(1, "no step:\n  3: damaged", TRAINER, code=78)], 78, 1, ": no step: 3: damaged"),
        ([echo(0), error(1)], 83, 1, "boom"),
        ([error(1), ended(1, 1), echo(0), ended(0, 1)], 83, 1, "boom"),
        ([echo(0), ended(0, 1), ended(1, -9)], 137, 1, "rank 1 was killed by SIGKILL at step 20"),
        (
            [echo(0), dataclasses.replace(ended(1, -9), oom=True)],
            137,
            1,
            "rank 1 was OOMKilled at step 20: its container",
        ),
        ([echo(0), ended(0, -6, text=COORDINATION), LOST], 81, 2, "host 2 (rank 2) was lost"),
        (
            [ended(0, -6, text=COORDINATION), ended(1, 3)],
            83,
            1,
            "ended with exit code 3 at step 20",
        ),
        ([ended(0, -6, text="Check failed: x == y"), echo(1)], 134, 0, "SIGABRT"),
        ([ended(0, -6, text=UNHEALTHY)], 82, 1, "rank 1 stopped sending heartbeats to JAX"),
        ([ended(0, -6), LOST], 81, 2, "host 2 (rank 2) was lost"),
        ([ended(0, -11), echo(1)], 139, 0, "SIGSEGV"),
        ([left(1), ended(0, -6, text=COORDINATION)], 83, 1, LEFT_EARLY),
        ([ended(1, 0), echo(0)], 83, 1, LEFT_EARLY),
        ([left(1), error(0)], 83, 0, "boom"),
        ([HANG, echo(0)], 82, 1, "no progress"),
        ([HANG, error(2)], 83, 2, "boom"),
        ([echo(0)], 83, 0, "Gloo"),
        ([error(1, status=TRAINER, code=84)], 84, 1, "boom"),
        ([error(1, "Gloo said no", status=TRAINER, code=76), error(0)], 76, 1, "Gloo said no"),
        ([error(1, status=STEPPING, code=84)], 84, 1, "boom"),
        ([error(1, status=Status(phase="init"))], 70, 1, "rank 1 raised in init: ValueError: boom"),
        ([error(1, status=Status())], 83, 1, "boom"),
        ([echo(1, Status(phase="init", trainer=True))], 83, 1, "Gloo"),
        ([ended(1, 3, Status(phase="init", trainer=True))], 70, 1, "exit code 3 in init"),
        ([ended(1, 65, Status(phase="init", trainer=True))], 65, 1, "exit code 65"),
        ([ended(1, 65, Status())], 83, 1, "exit code 65"),
        ([ended(1, 0, TRAINER)], 83, 1, "rank 1's program ended at step 20, before its last step"),
        (
            [ended(1, 0, RankProgress(0.0, "init").status)],
            70,
            1,
            "exit code 0 before the trainer began",
        ),
        (
            [Event(EventKind.UNSTARTABLE, 0, 0, text="nope: No such file")],
            70,
            0,
            "could not be started: nope",
        ),
    ],
)
def test_closest_event_determines_the_verdict(
    events: list[Event], code: int, rank: int, words: str
) -> None:
    result = find_root_cause(events)
    assert result is not None
    verdict = verdict_for_event(result[0])
    assert (verdict.code, verdict.rank) == (code, rank)
    assert words in verdict.message


@pytest.mark.parametrize(
    "events",
    [
        [],
        [ended(0, 0, dataclasses.replace(TRAINER, done=True))],
        [ended(0, 80, TRAINER)],
        [error(0, status=TRAINER, code=80)],
    ],
)
def test_clean_events_have_no_verdict(events: list[Event]) -> None:
    assert find_root_cause(events) is None


def test_failed_save_barrier_is_the_cause_if_no_rank_died() -> None:
    message = (
        "saving step 90 failed: TimeoutError: Timed out while waiting for "
        "async_commit_complete barrier."
    )
    state = attempt()
    state.add_event(error(1, message, TRAINER, code=84), 10.0)
    assert state.decide_verdict(11.0, {}) is None
    alone = decide(state, 12.1)
    assert (alone.code, alone.rank) == (84, 1)
    state.add_event(ended(0, -11, TRAINER), 11.5)
    verdict = decide(state, 11.5)
    assert (verdict.code, verdict.rank) == (139, 0)


NCCL = "option reduce='nccl' is not one of sum, mean"
STARTING = Status(phase="init")


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (error(0, NCCL, STARTING), 70),
        (error(0, NCCL, dataclasses.replace(STARTING, trainer=True), code=70), 70),
        (error(0, "the barrier of this simulation is not closed", STARTING), 70),
        (error(0, "no heartbeat in column 3", STARTING, type="KeyError"), 70),
        (error(0, "Gloo 'gloom' is no such map", STARTING, type="RuntimeError"), 70),
        (error(0, "[Errno 2] No such file: 'nccl.conf'", STARTING, type="FileNotFoundError"), 70),
        (error(0, "UNAVAILABLE: connection closed", STARTING, type="JaxRuntimeError"), 83),
        (
            error(0, "[Errno 104] Connection reset by peer", STARTING, type="ConnectionResetError"),
            83,
        ),
        (error(0, GLOO["message"], STARTING), 83),
        (error(0, "[gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", STARTING), 83),
    ],
)
def test_only_jax_and_os_errors_are_echoes_before_the_first_step(event: Event, code: int) -> None:
    verdict = verdict_for_event(event)
    assert verdict.code == code and str(event.error["message"]) in verdict.message


@pytest.mark.parametrize("status", [STARTING, STEPPING])
@pytest.mark.parametrize("kind", ["ValueError", "JaxRuntimeError", "ConnectionResetError"])
def test_exception_of_a_process_without_peers_is_a_cause(status: Status, kind: str) -> None:
    state = attempt(1)
    state.add_event(error(0, GLOO["message"], status, type=kind), 10.0)
    verdict = decide(state, 10.0, {0: 9.0})
    assert verdict.code == (83 if status.stepped else 70)


def test_abort_of_a_process_without_peers_is_a_cause() -> None:
    state = attempt(1)
    state.add_event(ended(0, -6, text=UNHEALTHY), 10.0)
    verdict = decide(state, 10.0, {0: 9.0})
    assert verdict.code == 134 and "rank 0 was killed by SIGABRT" in verdict.message


def attempt(size: int = 2, status: Status = STEPPING, platform: str = "cpu") -> Attempt:
    state = Attempt(1, {host: range(host, host + 1) for host in range(size)}, platform)
    state.ranks.set_range(range(size), status)
    return state


def decide(state: Attempt, now: float, heard: Mapping[int, float] | None = None) -> Verdict:
    verdict = state.decide_verdict(now, heard or {})
    assert verdict is not None
    return verdict


def test_cause_is_decided_at_once_and_echo_waits() -> None:
    state = attempt()
    state.add_event(echo(0), 10.0)
    assert state.decide_verdict(10.0, {}) is None
    assert state.decide_verdict(11.9, {}) is None
    state.add_event(ended(1, -9), 11.9)
    verdict = decide(state, 11.9)
    assert verdict.code == 137


def test_single_echo_is_believed_after_a_wait() -> None:
    state = attempt()
    state.add_event(echo(0), 10.0)
    verdict = decide(state, 12.1)
    assert "Gloo" in verdict.message


@pytest.mark.parametrize("symptom", [ended(0, -6), ended(0, -6, text=COORDINATION), echo(0)])
def test_echo_of_a_dead_host_waits_for_messages_of_all_hosts(symptom: Event) -> None:
    state = attempt(3)
    state.add_event(symptom, 10.0)
    assert state.decide_verdict(12.5, {0: 9.0, 1: 12.0, 2: 9.5}) is None
    verdict = decide(state, 12.5, {0: 9.0, 1: 12.0, 2: 12.0})
    assert verdict.rank == 0
    state.add_lost_host(2, "no message for 10 s", 19.6)
    verdict = decide(state, 20.2, {0: 20.0, 1: 20.0})
    assert "host 2 (rank 2) was lost" in verdict.message


def stack_of(state: Attempt, rank: int, file: str) -> None:
    """Answer the request for stacks, which the attempt must have made."""
    assert state.hang.needs_stacks and not state.hang.is_requested
    state.hang.is_requested = True
    state.hang.add_stacks(rank, stack(file, "wait"))


def test_rank_that_finishes_is_blamed_once_all_others_wait_in_jax() -> None:
    status = Status(jax="0.10.2")
    state = attempt(2, status)
    state.add_event(left(1, status), 10.0)
    later = 10.0 + FINISHED_WAIT_S
    assert state.decide_verdict(later - 0.1, {}) is None and not state.hang.needs_stacks
    # It exports a model by itself.
    assert state.decide_verdict(later, {}) is None
    stack_of(state, 0, "/home/me/train.py")
    assert state.decide_verdict(later + 0.1, {}) is None
    assert state.decide_verdict(later + FINISHED_WAIT_S, {}) is None
    # It waits for a collective.
    assert state.decide_verdict(later + FINISHED_WAIT_S + 0.1, {}) is None
    stack_of(state, 0, "/lib/jax/_src/array.py")
    verdict = decide(state, later + FINISHED_WAIT_S + 0.2)
    assert (verdict.code, verdict.message) == (83, LEFT_EARLY)


@pytest.mark.parametrize("phase", ["step", "done"])
def test_rank_that_reports_phases_has_only_their_timeouts(phase: str) -> None:
    status = Status(phase=phase, step=9, stepped=True, done=phase == "done", jax="0.10.2")
    state = attempt(2, status)
    state.add_event(left(1, status), 10.0)
    assert state.decide_verdict(1e5, {}) is None and not state.hang.needs_stacks


RESET_BY_PEER = "[Errno 104] Connection reset by peer"
DONE = dataclasses.replace(STEPPING, phase="done", done=True, jax="0.10.2")
SERVICE_GONE = f"{COORDINATION} UNAVAILABLE: Socket closed"


@pytest.mark.parametrize("last", [ended(1, -6, DONE, SERVICE_GONE), ended(1, 134, DONE)])
@pytest.mark.parametrize("first", [ended(0, 0, DONE), left(0, DONE)])
def test_abort_after_all_ranks_were_done_is_a_warning(first: Event, last: Event) -> None:
    state = attempt(2, DONE)
    state.add_event(first, 10.0)
    state.add_event(last, 20.0)
    heard = dict.fromkeys(range(2), 100.0)
    if first.kind is EventKind.LEFT:
        # It may still work, and its exit code counts.
        assert state.decide_verdict(90.0, heard) is None
        state.add_event(ended(0, 0, DONE), 90.0)
    verdict = decide(state, 100.0, heard)
    assert (verdict.code, verdict.cause) == (0, "done")
    assert verdict.message == (
        "every process reported that it had finished; after that, rank 1 was killed by SIGABRT"
    )
    shows("after that, rank 1 was killed by SIGABRT", verdict.message)


@pytest.mark.parametrize("status", [STEPPING, DONE])
def test_shutdown_timeout_of_the_program_counts(status: Status) -> None:
    state = attempt(2, status)
    text = f"{COORDINATION} DEADLINE_EXCEEDED: Barrier timed out. Id: Shutdown::11442::0."
    state.add_event(left(1, status), 10.0)
    state.add_event(ended(1, -6, dataclasses.replace(status, left=True), text), 13.0)
    state.add_event(ended(0, -6, status, text), 13.1)
    verdict = decide(state, 20.0, dict.fromkeys(range(2), 20.0))
    assert (verdict.code, verdict.rank) == (83, 0)
    shows("rank 0 had not ended when the shutdown timeout of JAX passed", verdict.message)


@pytest.mark.parametrize(
    "events",
    [
        # Not every rank was done.
        [ended(0, 0), ended(1, -6, DONE, SERVICE_GONE)],
        # It ended with an error of its own.
        [ended(0, 0, DONE), ended(1, -11, DONE)],
        [ended(0, 3, DONE), ended(1, -6, DONE, SERVICE_GONE)],
        [ended(0, 0, DONE), error(1, "no space", DONE)],
        [ended(0, 0, DONE), error(1, RESET_BY_PEER, DONE, type="OSError"), ended(1, 1, DONE)],
        [ended(0, -9, DONE), ended(1, -6, DONE, SERVICE_GONE)],
    ],
)
def test_other_ends_after_done_are_failures(events: list[Event]) -> None:
    state = attempt(2, STEPPING)
    for event in events:
        state.add_event(event, 10.0)
    assert decide(state, 100.0, dict.fromkeys(range(2), 100.0)).code != 0


ALONE = Status(jax="0.10.2", processes=1)


@pytest.mark.parametrize(
    ("processes", "options", "code"),
    [
        ((1, 1), {}, 64),
        ((1, 0, 1), {}, 64),
        # Plain programs, one that uses JAX, and programs that joined: all of them, or a part.
        ((0, 0), {}, 0),
        ((1, 0), {}, 0),
        ((1,), {}, 0),
        ((2, 2), {}, 0),
        ((1, 1, 2, 2), {}, 0),
        ((1, 1), {"platform": "tpu"}, 0),
        ((1, 1), {"is_independent": True}, 0),
    ],
)
def test_ranks_that_used_jax_alone_are_told_how_to_join(
    processes: tuple[int, ...], options: dict[str, Any], code: int
) -> None:
    ranks = {rank: range(rank, rank + 1) for rank in range(len(processes))}
    state = Attempt(1, ranks, **options)
    for rank, count in enumerate(processes):
        state.add_event(ended(rank, 0, Status(jax="0.10.2", processes=count)), 10.0)
    verdict = decide(state, 10.0)
    assert verdict.code == code
    if code:
        alone = processes.count(1)
        assert f"each of {alone} ranks used JAX alone" in verdict.message
        assert "jax.distributed.initialize()" in verdict.message
        if alone == 2:
            shows("the processes never joined: each of 2 ranks used JAX alone", verdict.message)


@pytest.mark.parametrize("size", [1, 2])
def test_failure_counts_although_every_shell_ended_with_0(size: int) -> None:
    state = attempt(size)
    for rank in range(size):
        status = dataclasses.replace(STEPPING, exit=0)
        state.add_event(error(rank, status=status), 10.0)
    verdict = decide(state, 10.0)
    assert (verdict.code, verdict.rank) == (83, 0) and "boom" in verdict.message


def test_hang_is_not_explained_by_a_rank_that_has_finished() -> None:
    state = attempt(3)
    state.add_event(left(0), 10.0)
    state.add_event(overdue(1), 20.0)
    # A rank in JAX's barrier is not asked.
    state.hang.stacks[1] = stack("/lib/jax/_src/array.py", "_value")
    state.hang.stacks[2] = stack("/home/me/train.py", "read")
    verdict = decide(state, 20.1)
    assert (verdict.code, verdict.rank) == (82, 2)
    assert "rank 2 in step in read (train.py:3)" in verdict.message
    assert "; rank 0 had finished." in verdict.message
    shows("had finished. A program that works on after its last step", verdict.message)


def handled(event: Event) -> Event:
    """Return an event of a program whose wrapper runs on."""
    status = dataclasses.replace(event.status, left=event.kind is EventKind.ERROR)
    return dataclasses.replace(event, status=status, is_handled=True)


GONE = Event(EventKind.GONE, 1, 1, STEPPING)
GONE_MESSAGE = (
    "rank 1's program was killed at step 20, or ended itself by os._exit, behind the process that "
    "started it"
)


@pytest.mark.parametrize(
    ("event", "message", "code"),
    [
        (error(1), "rank 1 raised at step 20: ValueError: boom", 83),
        (GONE, GONE_MESSAGE, 137),
    ],
)
def test_end_behind_a_wrapper_is_no_fault_but_explains_the_peers(
    event: Event, message: str, code: int
) -> None:
    state = attempt()
    state.add_event(handled(event), 10.0)
    assert state.decide_verdict(40.0, {}) is None
    state.add_event(echo(0), 40.0)
    verdict = decide(state, 42.1)
    assert (verdict.code, verdict.rank, verdict.message) == (code, 1, message)
    shows(
        "program was killed…, or ended itself by os._exit, behind the process that started it",
        GONE_MESSAGE,
    )


def test_exception_that_a_wrapper_has_handled_explains_nothing() -> None:
    state = attempt()
    state.add_event(handled(error(1)), 10.0)
    # The wrapper has started its next program.
    state.ranks.update({1: STEPPING})
    state.add_event(echo(0), 80.0)
    assert decide(state, 82.1).rank == 0


def test_ranks_that_end_in_sequence_are_done() -> None:
    state = attempt()
    state.add_event(left(1), 10.0)
    state.add_event(ended(1, 0), 10.5)
    assert state.decide_verdict(99.0, {}) is None
    state.add_event(left(0), 99.0)
    state.add_event(ended(0, 0), 99.1)
    verdict = decide(state, 99.1)
    assert (verdict.cause, verdict.code, verdict.step) == ("done", 0, 20)


def test_abort_after_all_ranks_left_does_not_blame_leaving() -> None:
    state = attempt()
    for rank in (0, 1):
        state.add_event(left(rank), 10.0)
    state.add_event(ended(0, -6, dataclasses.replace(STEPPING, left=True), COORDINATION), 20.0)
    verdict = decide(state, 22.1)
    assert verdict.code == 134


def overdue(rank: int) -> Event:
    return Event(EventKind.HANG, rank, rank, STEPPING, hang=HangFacts("step", 5.0, 5.0, 0))


def stack(file: str, name: str) -> str:
    return f'Current thread 0x01 (most recent call first):\n  File "{file}", line 3 in {name}\n'


def test_hang_verdict_names_the_rank_that_does_not_wait_in_jax() -> None:
    state = attempt(3)
    state.add_event(overdue(0), 10.0)
    assert state.hang.needs_stacks and state.decide_verdict(10.1, {}) is None
    for rank in (0, 1):
        state.hang.stacks[rank] = stack("/lib/jax/_src/array.py", "_value")
    state.hang.stacks[2] = stack("/home/me/train.py", "read")
    verdict = decide(state, 10.2)
    assert (verdict.code, verdict.rank, verdict.host) == (82, 2, 2)
    assert (
        "2 ranks in step in _value (array.py:3), rank 2 in step in read (train.py:3)"
        in verdict.message
    )


def test_rank_without_stacks_is_the_hanging_one() -> None:
    state = attempt()
    state.add_event(overdue(0), 10.0)
    state.hang.stacks[0] = stack("/home/me/train.py", "wait")
    assert state.decide_verdict(10.0 + STACKS_TIMEOUT_S - 0.1, {}) is None
    verdict = decide(state, 10.0 + STACKS_TIMEOUT_S)
    assert verdict.rank == 1 and "without a stack" in verdict.message


@pytest.mark.parametrize(
    "given_up",
    [
        ended(
            1,
            -6,
            text=f"{COORDINATION} DEADLINE_EXCEEDED: Deadline Exceeded\nRPC: "
            "/CoordinationService/Heartbeat",
        ),
        ended(1, -6),  # the dump of many threads has pushed what JAX said out of the last lines
        echo(1),
        error(1, "Orbax: the barrier of the save timed out", TRAINER, code=84),
    ],
)
def test_stalled_rank_is_the_cause_of_failing_peers(given_up: Event) -> None:
    state = attempt(3, dataclasses.replace(TRAINER, phase="save", jax="0.11.2"))
    given_up = dataclasses.replace(
        given_up, status=dataclasses.replace(given_up.status, jax="0.11.2")
    )
    state.add_event(given_up, 10.0)
    heard = dict.fromkeys(range(3), 12.0)
    assert state.decide_verdict(12.1, heard) is None and state.hang.needs_stacks
    state.hang.add_stacks(0, "")
    assert state.decide_verdict(12.2, heard) is None
    state.hang.add_stacks(1, "")  # it is about to end
    state.hang.add_stacks(2, stack("/lib/jax/_src/array.py", "_value"))
    verdict = decide(state, 12.2, heard)
    assert (verdict.code, verdict.rank, verdict.host, verdict.step) == (82, 0, 0, 20)
    assert verdict.message.startswith(
        "rank 0 makes no progress in save at step 20: its process does not run"
    )
    shows("its process does not run, and its peers gave up", verdict.message)


def test_failed_connection_is_believed_once_all_peers_wrote_stacks() -> None:
    state = attempt(2, dataclasses.replace(STEPPING, jax="0.11.2"))
    state.add_event(echo(1, dataclasses.replace(STEPPING, jax="0.11.2")), 10.0)
    assert state.decide_verdict(12.1, {}) is None
    for rank in (0, 1):
        state.hang.add_stacks(rank, stack("/lib/jax/_src/array.py", "_value"))
    verdict = decide(state, 12.2)
    assert (verdict.code, verdict.rank) == (83, 1) and "Gloo" in verdict.message


def test_hang_on_gpus_waits_for_nccl_and_reports_its_answer() -> None:
    lagging = (
        "Communicators...\n#0-0 (1f) MISMATCH\n  Communicator ranks have different AllReduce "
        "operation counts\n"
    )
    lagging += (
        "  2 ranks have launched up to operation 9\n  Rank 1 has launched up to operation "
        "8 -- GPU 0\n"
    )
    fault = "#0-0: rank 1 is behind in AllReduce (8 of 9)"
    verdicts = []
    for answers in ({0: lagging, 1: ""}, {0: "", 1: lagging[:-20]}, {1: lagging}, {}):
        state = attempt(3, platform="cuda")
        state.add_event(overdue(0), 10.0)
        state.hang.stacks |= dict.fromkeys(range(3), stack("/lib/jax/_src/array.py", "_value"))
        assert state.decide_verdict(10.1, {}) is None
        for host, text in answers.items():
            state.hang.add_nccl(host, text)
        at_once = state.decide_verdict(10.2, {})
        assert (at_once is None) == (len(answers) < 2)
        verdict = at_once or state.decide_verdict(10.0 + STACKS_TIMEOUT_S, {})
        assert verdict.code == 82
        verdicts.append(verdict.message.partition("; NCCL: ")[2])
    assert verdicts == [fault, "", fault, ""]


def test_mixed_jax_versions_are_refused() -> None:
    state = attempt()
    state.ranks.update({0: Status(jax="0.10.2"), 1: Status(jax="0.11.2")})
    verdict = decide(state, 0.0)
    assert verdict.code == 64
    assert verdict.message == "rank 1 imported jax 0.11.2, rank 0 imported 0.10.2"


HOST_LOST = "host 1 (rank 1) was lost: connection closed"
NOT_SAVED = "stopped from outside: not saved"
SAVED = {"step": 37, "saved": True, "note": "saved step 37"}
NOTHING = {"step": 30, "saved": False, "note": "nothing new to save after step 30"}
IN_DATA = dataclasses.replace(STEPPING, phase="data")


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        ([dataclasses.replace(TRAINER, stopped=SAVED, exit=80)] * 2, "saved at step 37"),
        ([dataclasses.replace(TRAINER, stopped=NOTHING, exit=80)] * 2, NOTHING["note"]),
        ([TRAINER, dataclasses.replace(TRAINER, phase="data")], "not saved: rank 1 in data"),
        ([dataclasses.replace(TRAINER, phase="compile")] * 2, "not saved: ranks 0, 1 in compile"),
        ([STEPPING, IN_DATA], "not saved: rank 1 in data"),
        ([Status(exit=-15)] * 2, "the program did not report whether it saved"),
        ([Status()] * 2, "not saved: ranks 0, 1 in its program"),
    ],
)
def test_stop_verdict_describes_saved_work(statuses: list[Status], message: str) -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    state.ranks.update(dict(enumerate(statuses)))
    verdict = decide(state, 155.0)
    assert verdict.code == 80 and verdict.cause == "preempted"
    assert verdict.message == f"stopped from outside: {message}"


def test_symptoms_after_a_stop_do_not_replace_it() -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    state.add_event(error(1), 101.0)
    state.add_lost_host(0, "connection closed", 101.0)
    assert state.decide_verdict(101.0, {}) is None
    verdict = decide(state, 155.0)
    assert verdict.code == 80
    assert verdict.message == f"{NOT_SAVED}: rank 1 raised at step 20: ValueError: boom"


@pytest.mark.parametrize(("is_trainer", "until"), [(True, 104.0), (False, 155.0)])
def test_save_does_not_wait_long_for_a_lost_rank(is_trainer: bool, until: float) -> None:
    """As when a pod is deleted with force: it is asked to stop, and killed two seconds later."""
    state = attempt()
    saves = dataclasses.replace(TRAINER, trainer=is_trainer, phase="save")
    state.ranks.update({0: saves, 1: saves})
    state.begin_stop(55.0, 100.0)
    state.add_lost_host(1, "connection closed", 101.0)
    assert state.decide_verdict(until - 0.1, {0: until}) is None
    verdict = decide(state, until, {0: until})
    assert verdict.code == 80


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stopped": SAVED, "exit": 80}, f"saved at step 37; {HOST_LOST}"),
        ({"stopped": NOTHING, "exit": 80}, f"not saved: {HOST_LOST}"),
        ({"exit": -6}, f"not saved: {HOST_LOST}"),
        ({"exit": -6, "committed": 30}, f"not saved: {HOST_LOST}; step 30 is saved"),
    ],
)
def test_host_lost_during_a_stop_is_named_and_not_awaited(
    fields: dict[str, Any], message: str
) -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    state.add_lost_host(1, "connection closed", 101.0)
    assert state.decide_verdict(101.0, {0: 101.0}) is None
    status = dataclasses.replace(TRAINER, **fields)
    event = Event(EventKind.EXIT, 0, 0, status, exit=fields["exit"], text=COORDINATION)
    state.add_event(event, 102.0)
    verdict = decide(state, 102.0, {0: 102.0})
    assert (verdict.code, verdict.message) == (80, f"stopped from outside: {message}")


@pytest.mark.parametrize(
    ("fields", "is_stopping", "code", "message"),
    [
        ({}, False, 81, "host 0 was lost: reset"),
        ({}, True, 80, f"{NOT_SAVED}: host 0 was lost: reset; step 10 is saved"),
        ({"committed": 15}, True, 80, f"{NOT_SAVED}: host 0 was lost: reset; step 15 is saved"),
        (
            {"stopped": SAVED},
            True,
            80,
            "stopped from outside: saved at step 37; host 0 was lost: reset",
        ),
    ],
)
def test_verdict_for_lost_leader_reports_known_facts(
    fields: dict[str, Any], is_stopping: bool, code: int, message: str
) -> None:
    statuses = [dataclasses.replace(TRAINER, **fields), Status()]
    verdict = verdict_for_lost_leader("reset", 0, statuses, 10, is_stopping=is_stopping)
    assert (verdict.code, verdict.message) == (code, message)
    assert (verdict.rank, verdict.host, verdict.step) == (0, 0, 20)


def test_host_lost_after_its_ranks_ended_does_not_affect_a_stop() -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    state.ranks.update({1: dataclasses.replace(TRAINER, stopped=SAVED, exit=80)})
    state.add_lost_host(1, "connection closed", 101.0)
    assert state.decide_verdict(101.0, {0: 101.0}) is None
    state.ranks.update({0: dataclasses.replace(TRAINER, stopped=SAVED, exit=80)})
    verdict = decide(state, 102.0, {0: 102.0})
    assert verdict.message == "stopped from outside: saved at step 37"


def test_reported_save_counts_at_the_stop_deadline() -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    state.ranks.update({0: dataclasses.replace(TRAINER, stopped=SAVED, exit=80)})
    verdict = decide(state, 155.0)
    assert verdict.message == "stopped from outside: saved at step 37; rank 1 in step did not end"


@pytest.mark.parametrize("exit", [256, -128, 2**40, "9", None])
def test_impossible_exit_code_is_malformed(exit: Any) -> None:
    with pytest.raises(ValueError, match="exit must be "):
        Event.from_wire(0, {"kind": "exit", "rank": 0, "exit": exit})


def test_abort_during_a_stop_is_why_nothing_was_saved() -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    state.add_event(ended(1, -6), 101.0)
    verdict = decide(state, 155.0)
    assert verdict.message == f"{NOT_SAVED}: rank 1 was killed by SIGABRT at step 20"


def test_run_that_finishes_during_a_stop_is_done() -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    status = dataclasses.replace(TRAINER, phase="done", done=True, exit=0)
    state.ranks.update(dict.fromkeys((0, 1), status))
    verdict = decide(state, 101.0)
    assert verdict.code == 0


def test_program_that_ends_with_0_during_a_stop_is_stopped() -> None:
    state = attempt()
    state.begin_stop(55.0, 100.0)
    state.ranks.update(dict.fromkeys((0, 1), Status(exit=0)))
    verdict = decide(state, 101.0)
    assert verdict.code == 80


UNHOOKED = Status()  # of a program without our hook: nothing was ever reported
RESET = (
    "Traceback (most recent call last):\n  File ...\nConnectionResetError: Connection reset by peer"
)
BANNER = (
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
)
ASSERTED = f"{BANNER}train: loader.cc:12: next(): Assertion `rows > 0' failed."
FAULTHANDLER = (
    "Fatal Python error: Aborted\n\nCurrent thread 0x01 (most recent call first):\n  "
    'File "a.py", line 1 in f'
)


@pytest.mark.parametrize(
    "cause",
    [
        ended(1, -6, STEPPING, ASSERTED),
        ended(1, -6, UNHOOKED, ASSERTED),
        ended(1, -6, STEPPING, f"{BANNER}{FAULTHANDLER}"),
        ended(1, 134, UNHOOKED, "Aborted (core dumped)"),
        ended(1, 1, UNHOOKED, "Traceback (most recent call last):\n  File ...\nAssertionError: x"),
        ended(1, -11, UNHOOKED),
        error(1, "no rows", type="AssertionError"),
    ],
)
@pytest.mark.parametrize("peer", ["", "lost my peer", RESET, f"{BANNER}exiting"])
@pytest.mark.parametrize("is_first", [True, False])
def test_dead_rank_is_named_instead_of_a_peer_without_our_hook(
    cause: Event, peer: str, is_first: bool
) -> None:
    state = attempt(2, UNHOOKED)
    events = [cause, ended(0, 1, UNHOOKED, peer)]
    for at, event in zip((10.0, 10.2), events if is_first else reversed(events), strict=True):
        state.add_event(event, at)
        verdict = state.decide_verdict(at, {0: at, 1: at})
        if verdict is not None:
            break
    else:
        verdict = state.decide_verdict(12.0, {0: 12.0, 1: 12.0})
    assert verdict is not None and verdict.rank == 1, verdict


@pytest.mark.parametrize(("status", "after_s"), [(STEPPING, 0.5), (UNHOOKED, 2.0)])
def test_bare_exit_code_is_believed_after_a_wait(status: Status, after_s: float) -> None:
    state = attempt(2, status)
    state.add_event(ended(0, 1, status, "good bye"), 10.0)
    assert state.decide_verdict(10.0 + after_s - 0.1, {}) is None
    verdict = decide(state, 10.0 + after_s)
    assert verdict.message.startswith("rank 0's program ended with exit code 1")
    alone = attempt(1, UNHOOKED)
    alone.add_event(ended(0, 1, UNHOOKED, "good bye"), 10.0)
    assert alone.decide_verdict(10.0, {}) is not None


def test_beat_with_all_ranks_ended_still_awaits_exit_events() -> None:
    state = attempt(2, UNHOOKED)
    state.add_event(ended(0, 1, UNHOOKED, "lost my peer"), 10.0)
    state.ranks.update({1: Status(exit=-6)})
    assert state.decide_verdict(10.1, {0: 10.1, 1: 10.1}) is None
    state.add_event(ended(1, -6, UNHOOKED, ASSERTED), 10.2)
    verdict = decide(state, 10.2, {0: 10.1, 1: 10.2})
    assert (verdict.rank, verdict.code) == (1, 134)


def test_later_symptoms_are_cut_and_still_explain_their_ranks() -> None:
    state = attempt(300)
    for rank in range(300):
        state.add_event(ended(rank, -6, text=COORDINATION * 200), 10.0)
    for rank in range(299):
        state.add_event(echo(rank), 10.1)
    heard = dict.fromkeys(range(300), 13.0)
    verdict = decide(state, 13.0, heard)
    assert (verdict.rank, verdict.code) == (299, 134)
    assert len(verdict.traceback or "") <= 500


def test_stacks_of_a_large_gang_are_bounded_and_name_the_rank() -> None:
    state = attempt(400)
    state.add_event(overdue(0), 10.0)
    for rank in range(400):
        frame = (
            ("/home/me/train.py", "read") if rank == 399 else ("/lib/jax/_src/array.py", "_value")
        )
        state.hang.add_stacks(rank, stack(*frame) + '  File "/lib/deep.py", line 1 in f\n' * 500)
    assert sum(map(len, state.hang.stacks.values())) < 5_000_000
    verdict = decide(state, 10.1)
    assert verdict.rank == 399
    assert (
        "399 ranks in step in _value (array.py:3), rank 399 in step in read (train.py:3)"
        in verdict.message
    )


@pytest.mark.parametrize("code", [128, 193, 255])
def test_plain_exit_code_does_not_outweigh_an_exception(code: int) -> None:
    state = attempt(2)
    state.add_event(ended(1, code), 10.0)
    assert state.decide_verdict(10.1, {0: 10.1, 1: 10.1}) is None
    state.add_event(error(0), 10.2)
    verdict = decide(state, 10.2, {0: 10.2, 1: 10.2})
    assert verdict.rank == 0
