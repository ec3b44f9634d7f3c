"""Which of many symptoms is the cause: tables, no process is started."""

from __future__ import annotations

import dataclasses
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
from jaxlaunch.launcher.agent.leader.attempt import BARRIER_PATIENCE_S, Attempt
from jaxlaunch.launcher.agent.leader.hang import STACKS_TIMEOUT_S
from jaxlaunch.records.verdict import HangFacts, LostHost
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


def error(rank: int, message: str = "boom", status: Status = STEPPING, **fields: Any) -> Event:
    said = {
        "type": "ValueError",
        "message": message,
        "traceback": "Traceback",
        "code": None,
    } | fields
    return Event(EventKind.ERROR, rank, rank, status, error=said)


def echo(rank: int, status: Status = STEPPING) -> Event:
    return Event(
        EventKind.ERROR, rank, rank, status, error=GLOO | {"traceback": "Traceback", "code": None}
    )


def ended(rank: int, code: int, status: Status = STEPPING, text: str = "") -> Event:
    return Event(
        EventKind.EXIT, rank, rank, dataclasses.replace(status, exit=code), exit=code, text=text
    )


def left(rank: int, status: Status = STEPPING) -> Event:
    return Event(EventKind.LEFT, rank, rank, dataclasses.replace(status, left=True, waits=True))


LOST = Event(EventKind.LOST, 2, 2, STEPPING, lost=LostHost(2, "connection closed", 2, 2))
HANG = Event(EventKind.HANG, 1, 1, STEPPING, hang=HangFacts("step", 5.0, 5.0, 1))


@pytest.mark.parametrize(
    ("events", "code", "rank", "words"),
    [
        ([error(1)], 83, 1, "rank 1 raised at step 20: ValueError: boom"),
        # What the trainer says is a sentence for a person: whole, in one line, without the name of
        # its class.
        (
            [
                error(
                    1,
                    "no usable checkpoint:\n  step 3: damaged",
                    dataclasses.replace(STEPPING, trainer=True),
                    code=78,
                )
            ],
            78,
            1,
            "rank 1 ended at step 20: no usable checkpoint: step 3: damaged",
        ),
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
        (
            [ended(0, -6, text=f"{COORDINATION} UNAVAILABLE: {MISSED}")],
            82,
            1,
            "rank 1 stopped sending heartbeats to JAX",
        ),
        ([ended(0, -6), LOST], 81, 2, "host 2 (rank 2) was lost"),
        ([ended(0, -11), echo(1)], 139, 0, "SIGSEGV"),
        (
            [left(1), ended(0, -6, text=COORDINATION)],
            83,
            1,
            "rank 1's program ended while other ranks were still running",
        ),
        (
            [ended(1, 0), echo(0)],
            83,
            1,
            "rank 1's program ended while other ranks were still running",
        ),
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
def test_the_event_closest_to_the_cause_is_the_verdict(
    events: list[Event], code: int, rank: int, words: str
) -> None:
    found = find_root_cause(events)
    assert found is not None
    verdict = verdict_for_event(found[0])
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
def test_what_is_no_fault_has_no_verdict(events: list[Event]) -> None:
    assert find_root_cause(events) is None


def test_a_save_whose_barrier_fails_is_believed_when_no_rank_turns_out_to_have_died() -> None:
    said = (
        "saving step 90 failed: TimeoutError: Timed out while waiting for "
        "async_commit_complete barrier."
    )
    of = attempt()
    of.add_event(error(1, said, TRAINER, code=84), 10.0)
    assert of.decide_verdict(11.0, {}) is None
    alone = of.decide_verdict(12.1, {})
    assert alone is not None and (alone.code, alone.rank) == (84, 1)
    of.add_event(ended(0, -11, TRAINER), 11.5)
    verdict = of.decide_verdict(11.5, {})
    assert verdict is not None and (verdict.code, verdict.rank) == (139, 0)


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
        (
            error(
                0,
                "[external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
                STARTING,
            ),
            83,
        ),
    ],
)
def test_before_the_first_step_only_jax_and_the_system_can_tell_of_a_peer(
    event: Event, code: int
) -> None:
    verdict = verdict_for_event(event)
    assert verdict.code == code and str(event.error["message"]) in verdict.message


@pytest.mark.parametrize("status", [STARTING, STEPPING])
@pytest.mark.parametrize("kind", ["ValueError", "JaxRuntimeError", "ConnectionResetError"])
def test_a_process_without_peers_echoes_nobody(status: Status, kind: str) -> None:
    of = attempt(1)
    of.add_event(error(0, GLOO["message"], status, type=kind), 10.0)
    verdict = of.decide_verdict(10.0, {0: 9.0})
    assert verdict is not None and verdict.code == (83 if status.stepped else 70)


def test_an_abort_of_a_process_without_peers_is_its_own() -> None:
    of = attempt(1)
    of.add_event(ended(0, -6, text=f"{COORDINATION} UNAVAILABLE: {MISSED}"), 10.0)
    verdict = of.decide_verdict(10.0, {0: 9.0})
    assert (
        verdict is not None
        and verdict.code == 134
        and "rank 0 was killed by SIGABRT" in verdict.message
    )


def attempt(size: int = 2, status: Status = STEPPING) -> Attempt:
    made = Attempt(1, {host: range(host, host + 1) for host in range(size)})
    made.ranks.set_range(range(size), status)
    return made


def test_a_clear_cause_is_decided_at_once_and_an_echo_waits_for_it() -> None:
    of = attempt()
    of.add_event(echo(0), 10.0)
    assert of.decide_verdict(10.0, {}) is None
    assert of.decide_verdict(11.9, {}) is None
    of.add_event(ended(1, -9), 11.9)
    verdict = of.decide_verdict(11.9, {})
    assert verdict is not None and verdict.code == 137


def test_an_echo_alone_is_believed_in_the_end() -> None:
    of = attempt()
    of.add_event(echo(0), 10.0)
    verdict = of.decide_verdict(12.1, {})
    assert verdict is not None and "Gloo" in verdict.message


@pytest.mark.parametrize("symptom", [ended(0, -6), ended(0, -6, text=COORDINATION), echo(0)])
def test_what_a_dead_host_makes_of_its_peers_waits_until_every_host_has_spoken(
    symptom: Event,
) -> None:
    of = attempt(3)
    of.add_event(symptom, 10.0)
    assert of.decide_verdict(12.5, {0: 9.0, 1: 12.0, 2: 9.5}) is None
    verdict = of.decide_verdict(12.5, {0: 9.0, 1: 12.0, 2: 12.0})
    assert verdict is not None and verdict.rank == 0
    of.add_lost_host(2, "no message for 10 s", 19.6)
    verdict = of.decide_verdict(20.2, {0: 20.0, 1: 20.0})
    assert verdict is not None and "host 2 (rank 2) was lost" in verdict.message


def test_a_program_that_ends_while_its_peers_go_on_is_named_before_jax_aborts_them_all() -> None:
    of = attempt()
    of.add_event(left(1), 10.0)
    assert of.decide_verdict(10.0 + BARRIER_PATIENCE_S - 0.1, {}) is None
    verdict = of.decide_verdict(10.0 + BARRIER_PATIENCE_S, {})
    assert (
        verdict is not None
        and verdict.message == "rank 1's program ended while other ranks were still running"
    )


def test_ranks_that_end_one_after_the_other_are_done() -> None:
    of = attempt()
    of.add_event(left(1), 10.0)
    of.add_event(ended(1, 0), 10.5)
    assert of.decide_verdict(99.0, {}) is None
    of.add_event(left(0), 99.0)
    of.add_event(ended(0, 0), 99.1)
    verdict = of.decide_verdict(99.1, {})
    assert verdict is not None and (verdict.cause, verdict.code, verdict.step) == ("done", 0, 20)


def test_an_abort_when_everyone_has_left_blames_nobody_for_leaving() -> None:
    of = attempt()
    for rank in (0, 1):
        of.add_event(left(rank), 10.0)
    of.add_event(ended(0, -6, dataclasses.replace(STEPPING, left=True), COORDINATION), 20.0)
    verdict = of.decide_verdict(22.1, {})
    assert verdict is not None and verdict.code == 134


def overdue(rank: int) -> Event:
    return Event(EventKind.HANG, rank, rank, STEPPING, hang=HangFacts("step", 5.0, 5.0, 0))


def stack(file: str, name: str) -> str:
    return f'Current thread 0x01 (most recent call first):\n  File "{file}", line 3 in {name}\n'


def test_a_hang_waits_for_every_stack_and_names_the_rank_that_is_not_waiting_in_jax() -> None:
    of = attempt(3)
    of.add_event(overdue(0), 10.0)
    assert of.hang.needs_stacks and of.decide_verdict(10.1, {}) is None
    for rank in (0, 1):
        of.hang.stacks[rank] = stack("/lib/jax/_src/array.py", "_value")
    of.hang.stacks[2] = stack("/home/me/train.py", "read")
    verdict = of.decide_verdict(10.2, {})
    assert verdict is not None and (verdict.code, verdict.rank, verdict.host) == (82, 2, 2)
    assert (
        "2 ranks in step in _value (array.py:3), rank 2 in step in read (train.py:3)"
        in verdict.message
    )


def test_a_rank_that_cannot_even_dump_its_stacks_is_the_one_that_hangs() -> None:
    of = attempt()
    of.add_event(overdue(0), 10.0)
    of.hang.stacks[0] = stack("/home/me/train.py", "wait")
    assert of.decide_verdict(10.0 + STACKS_TIMEOUT_S - 0.1, {}) is None
    verdict = of.decide_verdict(10.0 + STACKS_TIMEOUT_S, {})
    assert verdict is not None and verdict.rank == 1 and "without a stack" in verdict.message


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
def test_a_rank_that_stands_still_is_the_cause_of_what_its_peers_give_up(given_up: Event) -> None:
    of = attempt(3, dataclasses.replace(TRAINER, phase="save", jax="0.11.2"))
    given_up = dataclasses.replace(
        given_up, status=dataclasses.replace(given_up.status, jax="0.11.2")
    )
    of.add_event(given_up, 10.0)
    heard = dict.fromkeys(range(3), 12.0)
    assert of.decide_verdict(12.1, heard) is None and of.hang.needs_stacks
    of.hang.add_stacks(0, "")
    assert of.decide_verdict(12.2, heard) is None
    of.hang.add_stacks(1, "")  # it is about to end
    of.hang.add_stacks(2, stack("/lib/jax/_src/array.py", "_value"))
    verdict = of.decide_verdict(12.2, heard)
    assert verdict is not None and (verdict.code, verdict.rank, verdict.host, verdict.step) == (
        82,
        0,
        0,
        20,
    )
    assert verdict.message.startswith(
        "rank 0 makes no progress in save at step 20: its process stands still"
    )
    shows("its process stands still, and its peers gave up", verdict.message)


def test_a_failed_connection_is_believed_once_every_peer_has_shown_that_it_runs() -> None:
    of = attempt(2, dataclasses.replace(STEPPING, jax="0.11.2"))
    of.add_event(echo(1, dataclasses.replace(STEPPING, jax="0.11.2")), 10.0)
    assert of.decide_verdict(12.1, {}) is None
    for rank in (0, 1):
        of.hang.add_stacks(rank, stack("/lib/jax/_src/array.py", "_value"))
    verdict = of.decide_verdict(12.2, {})
    assert (
        verdict is not None
        and (verdict.code, verdict.rank) == (83, 1)
        and "Gloo" in verdict.message
    )


def test_a_hang_on_gpus_waits_for_nccl_as_long_as_for_stacks_and_says_what_it_knows() -> None:
    lagging = (
        "Communicators...\n#0-0 (1f) MISMATCH\n  Communicator ranks have different AllReduce "
        "operation counts\n"
    )
    lagging += (
        "  2 ranks have launched up to operation 9\n  Rank 1 has launched up to operation "
        "8 -- GPU 0\n"
    )
    said = "#0-0: rank 1 is behind in AllReduce (8 of 9)"
    verdicts = []
    for answers in ({0: lagging, 1: ""}, {0: "", 1: lagging[:-20]}, {1: lagging}, {}):
        of = Attempt(1, {host: range(host, host + 1) for host in range(3)}, "cuda")
        of.ranks.set_range(range(3), STEPPING)
        of.add_event(overdue(0), 10.0)
        of.hang.stacks |= dict.fromkeys(range(3), stack("/lib/jax/_src/array.py", "_value"))
        assert of.decide_verdict(10.1, {}) is None
        for host, text in answers.items():
            of.hang.add_nccl(host, text)
        at_once = of.decide_verdict(10.2, {})
        assert (at_once is None) == (len(answers) < 2)
        verdict = at_once or of.decide_verdict(10.0 + STACKS_TIMEOUT_S, {})
        assert verdict is not None and verdict.code == 82
        verdicts.append(verdict.message.partition("; NCCL: ")[2])
    assert verdicts == [said, "", said, ""]


def test_two_versions_of_jax_in_one_gang_are_refused_by_rank() -> None:
    of = attempt()
    of.ranks.update({0: Status(jax="0.10.2"), 1: Status(jax="0.11.2")})
    verdict = of.decide_verdict(0.0, {})
    assert verdict is not None and verdict.code == 64
    assert verdict.message == "rank 1 imported jax 0.11.2, rank 0 imported 0.10.2"


SAVED = {"step": 37, "saved": True, "note": "saved step 37"}
NOTHING = {"step": 30, "saved": False, "note": "nothing new to save after step 30"}
IN_DATA = dataclasses.replace(STEPPING, phase="data")


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        ([dataclasses.replace(TRAINER, stopped=SAVED, exit=80)] * 2, "saved at step 37"),
        (
            [dataclasses.replace(TRAINER, stopped=NOTHING, exit=80)] * 2,
            "nothing new to save after step 30",
        ),
        ([TRAINER, dataclasses.replace(TRAINER, phase="data")], "not saved: rank 1 in data"),
        ([dataclasses.replace(TRAINER, phase="compile")] * 2, "not saved: ranks 0, 1 in compile"),
        ([STEPPING, IN_DATA], "not saved: rank 1 in data"),
        ([Status(exit=-15)] * 2, "the program did not report whether it saved"),
        ([Status()] * 2, "not saved: ranks 0, 1 in its program"),
    ],
)
def test_a_stop_says_what_became_of_the_work(statuses: list[Status], message: str) -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.ranks.update(dict(enumerate(statuses)))
    verdict = of.decide_verdict(155.0, {})
    assert verdict is not None and verdict.code == 80 and verdict.cause == "preempted"
    assert verdict.message == f"stopped from outside: {message}"


def test_nothing_that_follows_a_stop_replaces_it() -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.add_event(error(1), 101.0)
    of.add_lost_host(0, "connection closed", 101.0)
    assert of.decide_verdict(101.0, {}) is None
    verdict = of.decide_verdict(155.0, {})
    assert verdict is not None and verdict.code == 80
    assert (
        verdict.message
        == "stopped from outside: not saved: rank 1 raised at step 20: ValueError: boom"
    )


@pytest.mark.parametrize(("is_trainer", "until"), [(True, 104.0), (False, 155.0)])
def test_ranks_that_save_together_do_not_wait_long_for_one_that_is_lost(
    is_trainer: bool, until: float
) -> None:
    """As when a pod is deleted with force: it is asked to stop, and killed two seconds later."""
    of = attempt()
    saves = dataclasses.replace(TRAINER, trainer=is_trainer, phase="save")
    of.ranks.update({0: saves, 1: saves})
    of.begin_stop(55.0, 100.0)
    of.add_lost_host(1, "connection closed", 101.0)
    assert of.decide_verdict(until - 0.1, {0: until}) is None
    verdict = of.decide_verdict(until, {0: until})
    assert verdict is not None and verdict.code == 80


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            {"stopped": SAVED, "exit": 80},
            "saved at step 37; host 1 (rank 1) was lost: connection closed",
        ),
        (
            {"stopped": NOTHING, "exit": 80},
            "not saved: host 1 (rank 1) was lost: connection closed",
        ),
        ({"exit": -6}, "not saved: host 1 (rank 1) was lost: connection closed"),
        (
            {"exit": -6, "committed": 30},
            "not saved: host 1 (rank 1) was lost: connection closed; step 30 is saved",
        ),
    ],
)
def test_a_host_that_is_lost_while_stopping_is_waited_for_no_longer_and_named(
    first: dict[str, Any], message: str
) -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.add_lost_host(1, "connection closed", 101.0)
    assert of.decide_verdict(101.0, {0: 101.0}) is None
    status = dataclasses.replace(TRAINER, **first)
    of.add_event(Event(EventKind.EXIT, 0, 0, status, exit=first["exit"], text=COORDINATION), 102.0)
    verdict = of.decide_verdict(102.0, {0: 102.0})
    assert verdict is not None and (verdict.code, verdict.message) == (
        80,
        f"stopped from outside: {message}",
    )


@pytest.mark.parametrize(
    ("own", "is_stopping", "code", "message"),
    [
        (TRAINER, False, 81, "host 0 was lost: reset"),
        (
            TRAINER,
            True,
            80,
            "stopped from outside: not saved: host 0 was lost: reset; step 10 is saved",
        ),
        (
            dataclasses.replace(TRAINER, committed=15),
            True,
            80,
            "stopped from outside: not saved: host 0 was lost: reset; step 15 is saved",
        ),
        (
            dataclasses.replace(TRAINER, stopped=SAVED),
            True,
            80,
            "stopped from outside: saved at step 37; host 0 was lost: reset",
        ),
    ],
)
def test_a_host_without_its_leader_says_what_it_knows(
    own: Status, is_stopping: bool, code: int, message: str
) -> None:
    verdict = verdict_for_lost_leader("reset", 0, [own, Status()], 10, is_stopping=is_stopping)
    assert (verdict.code, verdict.message) == (code, message)
    assert (verdict.rank, verdict.host, verdict.step) == (0, 0, 20)


def test_a_host_that_is_lost_after_its_ranks_have_ended_is_no_matter_of_a_stop() -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.ranks.update({1: dataclasses.replace(TRAINER, stopped=SAVED, exit=80)})
    of.add_lost_host(1, "connection closed", 101.0)
    assert of.decide_verdict(101.0, {0: 101.0}) is None
    of.ranks.update({0: dataclasses.replace(TRAINER, stopped=SAVED, exit=80)})
    verdict = of.decide_verdict(102.0, {0: 102.0})
    assert verdict is not None and verdict.message == "stopped from outside: saved at step 37"


def test_a_rank_that_reported_its_save_counts_at_the_deadline_where_another_has_not_ended() -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.ranks.update({0: dataclasses.replace(TRAINER, stopped=SAVED, exit=80)})
    verdict = of.decide_verdict(155.0, {})
    assert (
        verdict is not None
        and verdict.message == "stopped from outside: saved at step 37; rank 1 in step did not end"
    )


@pytest.mark.parametrize("exit", [256, -128, 2**40, "9", None])
def test_an_exit_code_that_no_process_ends_with_is_no_event(exit: Any) -> None:
    with pytest.raises(ValueError, match="exit must be "):
        Event.from_wire(0, {"kind": "exit", "rank": 0, "exit": exit})


def test_an_abort_while_stopping_is_what_held_the_save_up() -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.add_event(ended(1, -6), 101.0)
    verdict = of.decide_verdict(155.0, {})
    assert verdict is not None
    assert (
        verdict.message
        == "stopped from outside: not saved: rank 1 was killed by SIGABRT at step 20"
    )


def test_a_run_that_finishes_although_it_was_stop_requested_is_done() -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.ranks.update(
        dict.fromkeys((0, 1), dataclasses.replace(TRAINER, phase="done", done=True, exit=0))
    )
    verdict = of.decide_verdict(101.0, {})
    assert verdict is not None and verdict.code == 0


def test_a_program_that_ends_with_0_when_stop_requested_is_stopped() -> None:
    of = attempt()
    of.begin_stop(55.0, 100.0)
    of.ranks.update(dict.fromkeys((0, 1), Status(exit=0)))
    verdict = of.decide_verdict(101.0, {})
    assert verdict is not None and verdict.code == 80


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
        ended(
            1,
            1,
            UNHOOKED,
            "Traceback (most recent call last):\n  File ...\nAssertionError: no rows",
        ),
        ended(1, -11, UNHOOKED),
        error(1, "no rows", type="AssertionError"),
    ],
    ids=[
        "assert",
        "assert-unhooked",
        "abort",
        "abort-of-a-shell",
        "exception-unhooked",
        "signal",
        "exception",
    ],
)
@pytest.mark.parametrize("peer", ["", "lost my peer", RESET, f"{BANNER}exiting"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_rank_that_died_is_named_and_not_its_peer_without_our_hook(
    cause: Event, peer: str, is_first: bool
) -> None:
    of = attempt(2, UNHOOKED)
    events = [cause, ended(0, 1, UNHOOKED, peer)]
    for at, event in zip((10.0, 10.2), events if is_first else reversed(events), strict=True):
        of.add_event(event, at)
        verdict = of.decide_verdict(at, {0: at, 1: at})
        if verdict is not None:
            break
    else:
        verdict = of.decide_verdict(12.0, {0: 12.0, 1: 12.0})
    assert verdict is not None and verdict.rank == 1, verdict


@pytest.mark.parametrize(("status", "after_s"), [(STEPPING, 0.5), (UNHOOKED, 2.0)])
def test_an_exit_code_alone_is_believed_after_a_while(status: Status, after_s: float) -> None:
    of = attempt(2, status)
    of.add_event(ended(0, 1, status, "good bye"), 10.0)
    assert of.decide_verdict(10.0 + after_s - 0.1, {}) is None
    verdict = of.decide_verdict(10.0 + after_s, {})
    assert verdict is not None and verdict.message.startswith(
        "rank 0's program ended with exit code 1"
    )
    alone = attempt(1, UNHOOKED)
    alone.add_event(ended(0, 1, UNHOOKED, "good bye"), 10.0)
    assert alone.decide_verdict(10.0, {}) is not None


def test_a_beat_that_says_that_everyone_has_ended_does_not_end_the_wait_for_how() -> None:
    of = attempt(2, UNHOOKED)
    of.add_event(ended(0, 1, UNHOOKED, "lost my peer"), 10.0)
    of.ranks.update({1: Status(exit=-6)})
    assert of.decide_verdict(10.1, {0: 10.1, 1: 10.1}) is None
    of.add_event(ended(1, -6, UNHOOKED, ASSERTED), 10.2)
    verdict = of.decide_verdict(10.2, {0: 10.1, 1: 10.2})
    assert verdict is not None and (verdict.rank, verdict.code) == (1, 134)


def test_symptoms_beyond_the_first_are_kept_short_and_an_exception_still_explains_its_rank() -> (
    None
):
    of = attempt(300)
    for rank in range(300):
        of.add_event(ended(rank, -6, text=COORDINATION * 200), 10.0)
    for rank in range(299):
        of.add_event(echo(rank), 10.1)
    heard = dict.fromkeys(range(300), 13.0)
    verdict = of.decide_verdict(13.0, heard)
    assert verdict is not None and (verdict.rank, verdict.code) == (299, 134)
    assert len(verdict.traceback or "") <= 500


def test_the_stacks_of_a_large_gang_stay_bounded_and_still_name_the_rank() -> None:
    of = attempt(400)
    of.add_event(overdue(0), 10.0)
    for rank in range(400):
        frames = (
            [("/home/me/train.py", "read")]
            if rank == 399
            else [("/lib/jax/_src/array.py", "_value")]
        )
        of.hang.add_stacks(
            rank,
            "".join(stack(*frame) for frame in frames)
            + '  File "/lib/deep.py", line 1 in f\n' * 500,
        )
    assert sum(map(len, of.hang.stacks.values())) < 5_000_000
    verdict = of.decide_verdict(10.1, {})
    assert verdict is not None and verdict.rank == 399
    assert (
        "399 ranks in step in _value (array.py:3), rank 399 in step in read (train.py:3)"
        in verdict.message
    )


@pytest.mark.parametrize("code", [128, 193, 255])
def test_an_exit_code_that_is_no_signals_does_not_outweigh_the_exception_of_another_rank(
    code: int,
) -> None:
    of = attempt(2)
    of.add_event(ended(1, code), 10.0)
    assert of.decide_verdict(10.1, {0: 10.1, 1: 10.1}) is None
    of.add_event(error(0), 10.2)
    verdict = of.decide_verdict(10.2, {0: 10.2, 1: 10.2})
    assert verdict is not None and verdict.rank == 0
