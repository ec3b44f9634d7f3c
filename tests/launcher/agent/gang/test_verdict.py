"""Which of many symptoms is the cause: tables, no process is started."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launcher.agent.attempt import BARRIER_PATIENCE_S, STACKS_S, Attempt
from launcher.agent.progress import Status
from launcher.agent.verdict import Event, Kind, decide, verdict_of

GLOO = {"type": "ValueError", "message": "Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:4711"}
STEPPING = Status(phase="step", step=20, stepped=True)
TRAINER = dataclasses.replace(STEPPING, trainer=True)
MISSED = "The following tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks have crashed."
COORDINATION = "Terminating process because the JAX distributed service detected fatal errors."


def error(rank: int, message: str = "boom", status: Status = STEPPING, **fields: Any) -> Event:
    said = {"type": "ValueError", "message": message, "traceback": "Traceback", "code": None} | fields
    return Event(Kind.ERROR, rank, rank, status, error=said)


def echo(rank: int, status: Status = STEPPING) -> Event:
    return Event(Kind.ERROR, rank, rank, status, error=GLOO | {"traceback": "Traceback", "code": None})


def ended(rank: int, code: int, status: Status = STEPPING, text: str = "") -> Event:
    return Event(Kind.EXIT, rank, rank, dataclasses.replace(status, exit=code), exit=code, text=text)


def left(rank: int, status: Status = STEPPING) -> Event:
    return Event(Kind.LEFT, rank, rank, dataclasses.replace(status, left=True, waits=True))


LOST = Event(Kind.LOST, 2, 2, STEPPING, text="host 2 (rank 2) was lost: connection closed")
HANG = Event(Kind.HANG, 1, 1, STEPPING, text="rank 1 makes no progress")


@pytest.mark.parametrize(
    ("events", "code", "rank", "words"),
    [
        ([error(1)], 83, 1, "rank 1 raised at step 20: ValueError: boom"),
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
        ([ended(0, -6, text=COORDINATION), ended(1, 3)], 83, 1, "ended with exit code 3 at step 20"),
        ([ended(0, -6, text="Check failed: x == y"), echo(1)], 134, 0, "SIGABRT"),
        (
            [ended(0, -6, text=f"{COORDINATION} UNAVAILABLE: {MISSED}")],
            82,
            1,
            "rank 1 stopped sending heartbeats to JAX",
        ),
        ([ended(0, -6), LOST], 81, 2, "host 2 (rank 2) was lost"),
        ([ended(0, -11), echo(1)], 139, 0, "SIGSEGV"),
        ([left(1), ended(0, -6, text=COORDINATION)], 83, 1, "rank 1's program ended, peers went on"),
        ([ended(1, 0), echo(0)], 83, 1, "rank 1's program ended, peers went on"),
        ([left(1), error(0)], 83, 0, "boom"),
        ([HANG, echo(0)], 82, 1, "no progress"),
        ([HANG, error(2)], 83, 2, "boom"),
        ([echo(0)], 83, 0, "Gloo"),
        ([error(1, status=TRAINER, code=84)], 84, 1, "boom"),
        ([error(1, "Gloo said no", status=TRAINER, code=76), error(0)], 76, 1, "Gloo said no"),
        ([error(1, status=STEPPING, code=84)], 83, 1, "boom"),
        ([error(1, status=Status(phase="init"))], 70, 1, "rank 1 raised in init: ValueError: boom"),
        ([error(1, status=Status())], 83, 1, "boom"),
        ([echo(1, Status(phase="init", trainer=True))], 83, 1, "Gloo"),
        ([ended(1, 3, Status(phase="init", trainer=True))], 70, 1, "exit code 3 in init"),
        ([ended(1, 65, Status(phase="init", trainer=True))], 65, 1, "exit code 65"),
        ([ended(1, 65, Status())], 83, 1, "exit code 65"),
        ([ended(1, 0, TRAINER)], 83, 1, "rank 1's program ended at step 20, before its last step"),
        ([Event(Kind.UNSTARTABLE, 0, 0, text="nope: No such file")], 70, 0, "could not be started: nope"),
    ],
)
def test_the_event_closest_to_the_cause_is_the_verdict(events: list[Event], code: int, rank: int, words: str) -> None:
    found = decide(events)
    assert found is not None
    verdict = verdict_of(found[0])
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
    assert decide(events) is None


def attempt(size: int = 2, status: Status = STEPPING) -> Attempt:
    made = Attempt(1, {host: range(host, host + 1) for host in range(size)})
    made.see(dict.fromkeys(range(size), status))
    return made


def test_a_clear_cause_is_decided_at_once_and_an_echo_waits_for_it() -> None:
    of = attempt()
    of.hear(echo(0), 10.0)
    assert of.verdict(10.0, {}) is None
    assert of.verdict(11.9, {}) is None
    of.hear(ended(1, -9), 11.9)
    verdict = of.verdict(11.9, {})
    assert verdict is not None and verdict.code == 137


def test_an_echo_alone_is_believed_in_the_end() -> None:
    of = attempt()
    of.hear(echo(0), 10.0)
    verdict = of.verdict(12.1, {})
    assert verdict is not None and "Gloo" in verdict.message


@pytest.mark.parametrize("symptom", [ended(0, -6), ended(0, -6, text=COORDINATION), echo(0)])
def test_what_a_dead_host_makes_of_its_peers_waits_until_every_host_has_spoken(symptom: Event) -> None:
    of = attempt(3)
    of.hear(symptom, 10.0)
    assert of.verdict(12.5, {0: 9.0, 1: 12.0, 2: 9.5}) is None
    verdict = of.verdict(12.5, {0: 9.0, 1: 12.0, 2: 12.0})
    assert verdict is not None and verdict.rank == 0
    of.lost(2, "no word for 10 s", 19.6)
    verdict = of.verdict(20.2, {0: 20.0, 1: 20.0})
    assert verdict is not None and "host 2 (rank 2) was lost" in verdict.message


def test_a_program_that_ends_while_its_peers_go_on_is_named_before_jax_aborts_them_all() -> None:
    of = attempt()
    of.hear(left(1), 10.0)
    assert of.verdict(10.0 + BARRIER_PATIENCE_S - 0.1, {}) is None
    verdict = of.verdict(10.0 + BARRIER_PATIENCE_S, {})
    assert verdict is not None and verdict.message == "rank 1's program ended, peers went on"


def test_ranks_that_end_one_after_the_other_are_done() -> None:
    of = attempt()
    of.hear(left(1), 10.0)
    of.hear(ended(1, 0), 10.5)
    assert of.verdict(99.0, {}) is None
    of.hear(left(0), 99.0)
    of.hear(ended(0, 0), 99.1)
    verdict = of.verdict(99.1, {})
    assert verdict is not None and (verdict.cause, verdict.code, verdict.step) == ("done", 0, 20)


def test_an_abort_when_everyone_has_left_blames_nobody_for_leaving() -> None:
    of = attempt()
    for rank in (0, 1):
        of.hear(left(rank), 10.0)
    of.hear(ended(0, -6, dataclasses.replace(STEPPING, left=True), COORDINATION), 20.0)
    verdict = of.verdict(22.1, {})
    assert verdict is not None and verdict.code == 134


def overdue(rank: int) -> Event:
    return Event(Kind.HANG, rank, rank, STEPPING, text="step budget of 5 s was missed first by rank 0, after 5 s")


def stack(file: str, name: str) -> str:
    return f'Current thread 0x01 (most recent call first):\n  File "{file}", line 3 in {name}\n'


def test_a_hang_waits_for_every_stack_and_names_the_rank_that_is_not_waiting_in_jax() -> None:
    of = attempt(3)
    of.hear(overdue(0), 10.0)
    assert of.wants_stacks and of.verdict(10.1, {}) is None
    for rank in (0, 1):
        of.stacks[rank] = stack("/lib/jax/_src/array.py", "_value")
    of.stacks[2] = stack("/home/me/train.py", "read")
    verdict = of.verdict(10.2, {})
    assert verdict is not None and (verdict.code, verdict.rank, verdict.host) == (82, 2, 2)
    assert "2 ranks in step in _value (array.py:3), rank 2 in step in read (train.py:3)" in verdict.message


def test_a_rank_that_cannot_even_dump_its_stacks_is_the_one_that_hangs() -> None:
    of = attempt()
    of.hear(overdue(0), 10.0)
    of.stacks[0] = stack("/home/me/train.py", "wait")
    assert of.verdict(10.0 + STACKS_S - 0.1, {}) is None
    verdict = of.verdict(10.0 + STACKS_S, {})
    assert verdict is not None and verdict.rank == 1 and "without a stack" in verdict.message


def test_two_versions_of_jax_in_one_gang_are_refused_by_rank() -> None:
    of = attempt()
    of.see({0: Status(jax="0.10.2"), 1: Status(jax="0.11.2")})
    verdict = of.verdict(0.0, {})
    assert verdict is not None and verdict.code == 64
    assert verdict.message == "rank 1 imported jax 0.11.2, rank 0 0.10.2"


SAVED = {"step": 37, "saved": True, "note": "saved step 37"}
NOTHING = {"step": 30, "saved": False, "note": "nothing new to save after step 30"}
IN_DATA = dataclasses.replace(STEPPING, phase="data")


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        ([dataclasses.replace(TRAINER, stopped=SAVED, exit=80)] * 2, "saved at step 37"),
        ([dataclasses.replace(TRAINER, stopped=NOTHING, exit=80)] * 2, "nothing new to save after step 30"),
        ([TRAINER, dataclasses.replace(TRAINER, phase="data")], "not saved: rank 1 in data"),
        ([dataclasses.replace(TRAINER, phase="compile")] * 2, "not saved: ranks 0, 1 in compile"),
        ([STEPPING, IN_DATA], "not saved: rank 1 in data"),
        ([Status(exit=-15)] * 2, "the program did not say whether it saved"),
        ([Status()] * 2, "not saved: ranks 0, 1 in its program"),
    ],
)
def test_a_stop_says_what_became_of_the_work(statuses: list[Status], message: str) -> None:
    of = attempt()
    of.stop(55.0, 100.0)
    of.see(dict(enumerate(statuses)))
    verdict = of.verdict(155.0, {})
    assert verdict is not None and verdict.code == 80 and verdict.cause == "preempted"
    assert verdict.message == f"stopped from outside: {message}"


def test_nothing_that_follows_a_stop_replaces_it() -> None:
    of = attempt()
    of.stop(55.0, 100.0)
    of.hear(error(1), 101.0)
    of.lost(0, "connection closed", 101.0)
    assert of.verdict(101.0, {}) is None
    verdict = of.verdict(155.0, {})
    assert verdict is not None and verdict.code == 80
    assert verdict.message == "stopped from outside: not saved: rank 1 raised at step 20: ValueError: boom"


def test_an_abort_while_stopping_is_what_held_the_save_up() -> None:
    of = attempt()
    of.stop(55.0, 100.0)
    of.hear(ended(1, -6), 101.0)
    verdict = of.verdict(155.0, {})
    assert verdict is not None
    assert verdict.message == "stopped from outside: not saved: rank 1 was killed by SIGABRT at step 20"


def test_a_run_that_finishes_although_it_was_told_to_stop_is_done() -> None:
    of = attempt()
    of.stop(55.0, 100.0)
    of.see(dict.fromkeys((0, 1), dataclasses.replace(TRAINER, phase="done", done=True, exit=0)))
    verdict = of.verdict(101.0, {})
    assert verdict is not None and verdict.code == 0


def test_a_program_that_ends_with_0_when_told_to_stop_is_stopped() -> None:
    of = attempt()
    of.stop(55.0, 100.0)
    of.see(dict.fromkeys((0, 1), Status(exit=0)))
    verdict = of.verdict(101.0, {})
    assert verdict is not None and verdict.code == 80
