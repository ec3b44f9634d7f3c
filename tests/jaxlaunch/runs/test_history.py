"""What follows an attempt, from the records of all attempts."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import Requeue
from jaxlaunch.launcher.agent.gang.root_cause import Event, EventKind, failure_for_event
from jaxlaunch.records.summary import AttemptRecord
from jaxlaunch.records.verdict import Failure, FailureKind, verdict_for_code
from jaxlaunch.runs.history import (
    SILENT_PROGRESS_S,
    decide_next,
    fails_job,
    generations_without_progress,
    give_up_verdict,
    give_up_verdict_unrecorded,
    made_progress,
    newest_saved_step,
    preemptions_without_progress,
    restarts_by_cause,
)


def attempt_record(
    attempt: int, code: int = contract.CRASH, committed: int | None = None, generation: int = 0
) -> AttemptRecord:
    verdict = verdict_for_code(code, f"error {attempt}", rank=1)
    return AttemptRecord(
        "u",
        generation,
        attempt,
        verdict.cause,
        1,
        committed,
        committed,
        {},
        verdict,
        attempt,
        attempt,
    )


@pytest.mark.parametrize(
    ("records", "limit", "should_restart", "code", "message"),
    [
        ([attempt_record(1)], 3, True, 83, "error 1"),
        ([attempt_record(1)], 0, False, 83, "error 1"),
        ([attempt_record(1), attempt_record(2), attempt_record(3)], 3, True, 83, "error 3"),
        (
            [attempt_record(1), attempt_record(2), attempt_record(3), attempt_record(4)],
            3,
            False,
            83,
            "error 1",
        ),
        (
            [
                attempt_record(1),
                attempt_record(2),
                attempt_record(3, committed=10),
                attempt_record(4),
                attempt_record(5),
            ],
            3,
            True,
            83,
            "error 5",
        ),
        (
            [attempt_record(1, committed=10), attempt_record(2, committed=10), attempt_record(3)],
            2,
            False,
            83,
            "error 1",
        ),
        ([attempt_record(1, contract.HANG), attempt_record(2)], 1, False, 82, "error 1"),
        ([attempt_record(1, contract.NOT_FINITE)], 3, False, 76, "error 1"),
        ([attempt_record(1, contract.PREEMPTED)], 3, False, 80, "error 1"),
        ([attempt_record(1, contract.DONE)], 3, False, 0, "error 1"),
        ([attempt_record(1, 137)], 3, True, 137, "error 1"),
        ([attempt_record(1), attempt_record(2, generation=1)], 1, True, 83, "error 2"),
        (
            [attempt_record(1), attempt_record(2, generation=1), attempt_record(3, generation=1)],
            1,
            False,
            83,
            "error 1",
        ),
        (
            [attempt_record(1), attempt_record(2, generation=1), attempt_record(3, generation=2)],
            0,
            False,
            79,
            "the first error was: error 1",
        ),
        (
            [
                attempt_record(1, committed=5),
                attempt_record(2, generation=1),
                attempt_record(3, generation=2),
            ],
            0,
            False,
            83,
            "error 1",
        ),
        (
            [
                attempt_record(1),
                attempt_record(2, generation=1),
                attempt_record(3, 5, 7, generation=2),
            ],
            0,
            False,
            5,
            "error 3",
        ),
        (
            [
                attempt_record(1),
                attempt_record(2, contract.PREEMPTED, generation=1),
                attempt_record(3, generation=2),
            ],
            0,
            False,
            83,
            "error 1",
        ),
    ],
)
def test_decision_after_attempt(
    records: list[AttemptRecord], limit: int, should_restart: bool, code: int, message: str
) -> None:
    move = decide_next(records, limit, all_hosts_alive=True)
    assert (move.should_restart, move.verdict.code) == (should_restart, code)
    assert message in move.verdict.message


@pytest.mark.parametrize(
    ("code", "earlier_codes", "fails"),
    [
        (contract.CRASH, [contract.CRASH] * 2, True),
        (contract.CRASH, [contract.CRASH, contract.PREEMPTED], False),
        (contract.BAD_DATA, [], True),
        (contract.PREEMPTED, [contract.CRASH] * 2, False),
        (contract.DONE, [], False),
    ],
)
def test_job_fails_if_no_new_pods_follow(code: int, earlier_codes: list[int], fails: bool) -> None:
    codes = [*earlier_codes, code]
    records = [attempt_record(n, code, generation=n) for n, code in enumerate(codes)]
    generation = len(earlier_codes)
    assert fails_job(records[-1].verdict, records, generation, crash_limit=2) is fails


def test_restored_step_is_no_progress() -> None:
    restored = [
        dataclasses.replace(attempt_record(n, generation=n), last_committed=40) for n in range(3)
    ]
    assert made_progress(restored) == [False] * 3
    assert decide_next(restored, 0, all_hosts_alive=True).verdict.code == contract.NO_PROGRESS
    assert made_progress([*restored, attempt_record(4, committed=60)])[-1]


def test_lost_agent_prevents_restart_in_place() -> None:
    assert not decide_next(
        [attempt_record(1, contract.LOST)], 3, all_hosts_alive=False
    ).should_restart


def test_stopped_generations_are_not_fruitless() -> None:
    stopped = [attempt_record(index, contract.PREEMPTED, generation=index) for index in range(9)]
    assert generations_without_progress(stopped) == 0


def preempted_record(
    attempt: int, committed: int | None = None, generation: int = 0
) -> AttemptRecord:
    return attempt_record(attempt, contract.PREEMPTED, committed, generation)


def test_preemption_limit_ends_as_no_progress() -> None:
    past = [preempted_record(index, generation=index) for index in range(3)]
    verdict = give_up_verdict(past, 3, 3)
    assert verdict is not None and verdict.code == contract.NO_PROGRESS
    assert (
        "no newly committed step in 3 preemptions in a row, of 3 (restarts.preempted)"
        in verdict.message
    )
    assert give_up_verdict(past, 3, None) is None and give_up_verdict(past, 3, 4) is None
    should_restart = give_up_verdict(
        [preempted_record(index) for index in range(3)], 0, 3
    )  # Kueue's: pods of the same generation
    assert should_restart is not None and should_restart.code == contract.NO_PROGRESS


def test_limit_applies_without_checkpoints() -> None:
    assert give_up_verdict_unrecorded(generation=24, crash_limit=5, preempted_limit=20) is None
    assert give_up_verdict_unrecorded(generation=99, crash_limit=5, preempted_limit=None) is None
    verdict = give_up_verdict_unrecorded(generation=25, crash_limit=5, preempted_limit=20)
    assert verdict is not None and verdict.code == contract.NO_PROGRESS
    assert (
        "in at least 20 preemptions in a row, of 20 (restarts.preempted): the job keeps no"
        in verdict.message
    )


def test_only_new_commit_resets_preemptions() -> None:
    past = [
        preempted_record(1),
        preempted_record(2, committed=10),
        preempted_record(3),
        attempt_record(4),
        preempted_record(5),
    ]
    assert preemptions_without_progress(past) == 2
    assert preemptions_without_progress([*past, preempted_record(6, committed=20)]) == 0
    assert preemptions_without_progress([]) == 0


def test_long_silent_attempt_counts_as_progress() -> None:
    long = dataclasses.replace(preempted_record(1), ended=1 + SILENT_PROGRESS_S + 1)
    assert preemptions_without_progress([long]) == 0
    stepped = dataclasses.replace(
        long, verdict=verdict_for_code(contract.PREEMPTED, "stopped", step=5)
    )
    assert preemptions_without_progress([stepped]) == 1


def test_long_wait_for_hosts_is_no_progress() -> None:
    long = dataclasses.replace(preempted_record(1), ended=1 + SILENT_PROGRESS_S + 1)
    waited = dict.fromkeys(contract.CLOCK_CAUSES, 0.0) | {
        "rendezvous": SILENT_PROGRESS_S,
        "down": 1.0,
    }
    assert preemptions_without_progress([dataclasses.replace(long, seconds=waited)]) == 1
    assert (
        preemptions_without_progress([dataclasses.replace(long, seconds=waited | {"init": 700.0})])
        == 0
    )


def test_all_ends_but_last_are_restarts() -> None:
    assert restarts_by_cause(
        [attempt_record(1), attempt_record(2), attempt_record(3, 137), attempt_record(4, 0)]
    ) == {
        "crash": 2,
        "killed": 1,
    }
    assert restarts_by_cause([attempt_record(1), attempt_record(2)], attempt=3) == {"crash": 2}
    assert restarts_by_cause([]) == {} and restarts_by_cause([], attempt=1) == {}


TRACE = (
    'Traceback (most recent call last):\n  File "/x/train.py", line {line}, in main\n    '
    "build()\nValueError: no\n"
)


def exception_record(name: str, message: str, code: int | None = None) -> Failure:
    """Return what a host reports of an exception."""
    return failure_for_event(
        Event(EventKind.ERROR, 0, 0, error={"type": name, "message": message, "code": code})
    )


def exit_record(code: int) -> Failure:
    return Failure(FailureKind.EXIT_CODE, exit_code=code)


NO_LAYER = exception_record("ValueError", "no such layer")
KEY = exception_record("KeyError", "3")
SIGKILL = Failure(FailureKind.SIGNAL, signal=9)
SIGSEGV = Failure(FailureKind.SIGNAL, signal=11)


def failure_record(
    attempt: int,
    failure: Failure = NO_LAYER,
    trace: str = TRACE.format(line=3),
    *,
    rank: int = 0,
    step: int | None = None,
    committed: int | None = None,
    took_s: float = 5.0,
    code: int = contract.CRASH,
) -> AttemptRecord:
    """An attempt that crashed, `took_s` seconds after its start."""
    facts = dataclasses.replace(failure, rank=rank)
    verdict = verdict_for_code(code, facts, rank=rank, step=step, traceback=trace)
    return AttemptRecord(
        "u",
        attempt,
        attempt,
        verdict.cause,
        rank,
        committed,
        committed,
        {},
        verdict,
        100.0,
        100.0 + took_s,
    )


@pytest.mark.parametrize(
    "records",
    [
        [failure_record(1), failure_record(2)],
        [failure_record(1), failure_record(2, rank=3)],
        [failure_record(1), failure_record(2, KEY), failure_record(3, KEY)],
        [
            failure_record(1, exception_record("ValueError", "at 0x7f01, pid 17")),
            failure_record(2, exception_record("ValueError", "at 0x7f99, pid 18")),
        ],
        [
            failure_record(1, exception_record("ValueError", "option reduce='nccl'")),
            failure_record(2, exception_record("ValueError", "option reduce='nccl'")),
        ],
        [failure_record(n, exit_record(2), "python: can't open file 'x.py'") for n in (1, 2)],
        [failure_record(n, exit_record(1), "") for n in (1, 2)],
        [failure_record(n, exit_record(3), f"at {n}:14:07") for n in (1, 2)],
        [failure_record(1), failure_record(2, exception_record("ValueError", "another word"))],
        [failure_record(n, step=7) for n in (1, 2)],
        # The first attempt saved step 5 and failed at step 7; the second one resumed at step 5.
        [failure_record(1, step=7, committed=5), failure_record(2, step=7)],
        [failure_record(n, exit_record(3), f"attempt {n}", step=7) for n in (1, 2)],
        [failure_record(n, SIGSEGV, "", step=7, code=139) for n in (1, 2)],
        # The last report of a process that is killed may be lost.
        [failure_record(n, SIGSEGV, "", step=6 + n, code=139) for n in (1, 2)],
        [failure_record(n, exit_record(139), "", step=7) for n in (1, 2)],
        # The hook is in another folder in each pod.
        [failure_record(n, trace=TRACE.format(line=3).replace("/x/", f"/{n}/")) for n in (1, 2)],
        # What stopped the attempt between the two says nothing about the program.
        [
            failure_record(1, step=7),
            attempt_record(2, contract.PREEMPTED),
            failure_record(3, step=7),
        ],
        [
            failure_record(1, step=7),
            failure_record(2, SIGKILL, "", code=137, step=3),
            failure_record(3, step=7),
        ],
    ],
)
def test_repeated_failure_ends_run(
    records: list[AttemptRecord],
) -> None:
    move = decide_next(records, 3, True)
    assert (move.should_restart, move.verdict.code) == (False, contract.STARTUP)
    first = records[-2 if records[-2].verdict.failure.kind is not FailureKind.OTHER else 0].verdict
    if first.failure.signal == signal.SIGKILL:
        first = records[0].verdict
    assert move.verdict.message.startswith(first.message)
    assert move.verdict.traceback == first.traceback


@pytest.mark.parametrize(
    "records",
    [
        [failure_record(1)],
        [failure_record(1), failure_record(2, trace=TRACE.format(line=4))],
        [failure_record(1), failure_record(2, KEY)],
        [failure_record(1, step=7), failure_record(2, step=8)],
        [failure_record(1, step=7), failure_record(2)],
        [failure_record(1, step=7, committed=5), failure_record(2, step=7, committed=6)],
        [failure_record(1, took_s=4000.0), failure_record(2)],
        [failure_record(1, step=7), failure_record(2, KEY, step=7), failure_record(3, step=7)],
        [failure_record(n, SIGSEGV, "", step=6 * n, code=139) for n in (1, 2)],
        [
            failure_record(1, exit_record(3), "", step=7),
            failure_record(2, exit_record(4), "", step=7),
        ],
        # JAX aborts the peers of a rank that dies.
        [
            failure_record(
                n, Failure(FailureKind.SIGNAL, signal=6, may_be_echo=True), "", step=7, code=134
            )
            for n in (1, 2)
        ],
        [failure_record(n, exit_record(137), "", step=7) for n in (1, 2)],
        [
            failure_record(n, exception_record("OSError", "[Errno 28] No space left on device"))
            for n in (1, 2)
        ],
        [
            failure_record(n, exception_record("ReadTimeout", "read timed out"), step=7)
            for n in (1, 2)
        ],
        [
            failure_record(n, exception_record("URLError", "<urlopen error [Errno 101] x>"), step=7)
            for n in (1, 2)
        ],
        [
            failure_record(
                n, exception_record("ConnectionRefusedError", "[Errno 111] Connection refused")
            )
            for n in (1, 2)
        ],
        [
            failure_record(
                n,
                exception_record(
                    "JaxRuntimeError", "UNAVAILABLE: failed to connect to all addresses"
                ),
            )
            for n in (1, 2)
        ],
        [
            failure_record(
                n,
                exception_record("ValueError", "Gloo all-reduce failed: Connection closed by peer"),
            )
            for n in (1, 2)
        ],
        [failure_record(n, Failure(FailureKind.LEFT_EARLY), "") for n in (1, 2)],
        [failure_record(n, SIGKILL, "", code=137) for n in (1, 2)],
        [failure_record(1, exit_record(2), "x"), failure_record(2, exit_record(3), "x")],
    ],
)
def test_transient_failure_or_progress_restarts(records: list[AttemptRecord]) -> None:
    assert decide_next(records, 3, True).should_restart


def requeue_record(attempt: int, requeue: Requeue, committed: int | None = None) -> AttemptRecord:
    failure = Failure(FailureKind.REQUEUED, exit_code=42, requeue=requeue, detail=requeue.value)
    return failure_record(attempt, failure, "", committed=committed, code=requeue.code)


@pytest.mark.parametrize(
    ("requeues", "in_place_limit", "should_restart", "code"),
    [
        ([Requeue.FREE] * 3, 1, True, contract.REQUEUED),
        # New pods, which count toward nothing.
        ([Requeue.FREE], 0, False, contract.REQUEUED),
        ([Requeue.FREE_NEW_PODS], 3, False, contract.REQUEUED),
        ([Requeue.FREE] * 4, 1, False, contract.NO_PROGRESS),
        ([Requeue.CHARGED], 1, True, contract.REQUEUED_CHARGED),
        ([Requeue.CHARGED_NEW_PODS], 1, False, contract.REQUEUED_CHARGED),
        ([Requeue.CHARGED] * 3, 0, False, contract.NO_PROGRESS),
    ],
)
def test_requested_restart_is_counted_as_asked(
    requeues: list[Requeue], in_place_limit: int, should_restart: bool, code: int
) -> None:
    records = [requeue_record(number, requeue) for number, requeue in enumerate(requeues)]
    move = decide_next(records, in_place_limit, True, preempted_limit=4)
    assert (move.should_restart, move.verdict.code) == (should_restart, code)
    saved = [*records[:-1], requeue_record(9, requeues[-1], committed=5)]
    again = decide_next(saved, in_place_limit, True, preempted_limit=4)
    assert again.verdict.code == requeues[-1].code


def test_free_restart_does_not_hide_an_error() -> None:
    records = [requeue_record(1, Requeue.FREE), failure_record(2)]
    move = decide_next(records, 0, True, preempted_limit=4)
    assert (move.should_restart, move.verdict.code) == (False, contract.CRASH)
    assert "no such layer" in move.verdict.message


@pytest.mark.parametrize(
    "words", ["No space left on device", "Disk quota exceeded", "RESOURCE: [ENOSPC] write"]
)
def test_full_disk_prevents_restart_in_place(words: str) -> None:
    errors = [
        exception_record("StorageError", f"saving failed: {text}", contract.STORAGE)
        for text in (words, "stale handle")
    ]
    full, broken = (failure_record(1, error, step=5, code=contract.STORAGE) for error in errors)
    move = decide_next([full], 3, True)
    assert (move.should_restart, move.verdict.code) == (
        False,
        contract.STORAGE,
    ) and words in move.verdict.message
    assert decide_next([broken], 3, True).should_restart


def test_full_disk_verdict_outranks_earlier_failures() -> None:
    full = failure_record(
        2,
        exception_record("StorageError", "saving failed: No space left on device"),
        step=5,
        code=contract.STORAGE,
    )
    for earlier in (failure_record(1, step=5), failure_record(1, SIGKILL, code=137, step=5)):
        move = decide_next([earlier, full], 3, True)
        assert (move.should_restart, move.verdict.code) == (False, contract.STORAGE)
        assert "No space left on device" in move.verdict.message


@pytest.mark.parametrize(
    ("records", "step"),
    [
        ([], None),
        ([attempt_record(1)], None),
        (
            [
                attempt_record(1),
                dataclasses.replace(attempt_record(2), seconds={"restore": 3.0, "step": 0.2}),
            ],
            0,
        ),
        (
            [
                attempt_record(1),
                dataclasses.replace(attempt_record(2), seconds={"lost_work": 0.2}),
                attempt_record(3),
            ],
            0,
        ),
        ([attempt_record(1, committed=10), attempt_record(2, committed=30), attempt_record(3)], 30),
    ],
)
def test_newest_saved_step(records: list[AttemptRecord], step: int | None) -> None:
    assert newest_saved_step(records) == step
    assert newest_saved_step(records, generation=1) == (step if records else 0)
