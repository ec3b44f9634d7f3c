"""The sentences of verdicts: golden texts, and that no decision depends on their words."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import Requeue
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.root_cause import (
    Event,
    EventKind,
    find_root_cause,
    verdict_for_event,
    verdict_for_lost_leader,
)
from jaxlaunch.records import codec, log_lines
from jaxlaunch.records.log_lines import MAX_ANNOTATION_BYTES, ProgressAnnotation
from jaxlaunch.records.summary import AttemptRecord
from jaxlaunch.records.verdict import (
    CATALOG,
    DiskExcess,
    ExceptionFacts,
    Failure,
    FailureKind,
    HangFacts,
    LostHost,
    Numbers,
    RendezvousFacts,
    StopFacts,
    StopOutcome,
    StopReason,
    Verdict,
    render_failure,
    render_numbers,
    verdict_for_code,
)
from jaxlaunch.runs import history

HANG = HangFacts(
    "step",
    60.0,
    61.0,
    3,
    "rank 3 in step in f (x.py:1)",
    Numbers((0, 1), 2),
    Numbers((3,), 1),
    "no answer",
)
LOST = Failure(
    FailureKind.HOST_LOST, lost_hosts=(LostHost(1, "connection closed", 2, 3, agent_signal=9),)
)
RAISED = Failure(
    FailureKind.EXCEPTION,
    rank=1,
    phase="data",
    step=20,
    exception=ExceptionFacts("ValueError", "boom"),
)
FULL = ExceptionFacts(
    "StorageError", "saving failed: [Errno 28] No space left", errno=28, is_storage_full=True
)
EXCESS = DiskExcess(1, 4 * 2**20, 3 * 2**20)


def stop_failure(
    outcome: StopOutcome | None, reason: StopReason = StopReason.OUTSIDE, **facts: Any
) -> Failure:
    cause = facts.pop("cause", None)
    detail = facts.pop("detail", "")
    lost = facts.pop("lost_hosts", ())
    stop = StopFacts(reason, outcome, **facts)
    return Failure(FailureKind.STOPPED, stop=stop, cause=cause, detail=detail, lost_hosts=lost)


# Every kind, with its exit code and its sentence.
CASES: list[tuple[int, Failure, str]] = [
    (83, Failure(FailureKind.OTHER, detail="as told"), "as told"),
    (64, Failure(FailureKind.REFUSED, detail="host 1 has jax 1"), "host 1 has jax 1"),
    (0, Failure(FailureKind.DONE, count=1), "the process finished"),
    (0, Failure(FailureKind.DONE, count=2), "every process finished"),
    (
        0,
        Failure(FailureKind.DONE, count=2, cause=Failure(FailureKind.SIGNAL, rank=1, signal=6)),
        "every process reported that it had finished; after that, rank 1 was killed by SIGABRT",
    ),
    (83, RAISED, "rank 1 raised in data at step 20: ValueError: boom"),
    (
        84,
        Failure(FailureKind.TRAINER_ERROR, rank=1, exception=FULL),
        f"rank 1 ended: {FULL.message}",
    ),
    (
        83,
        Failure(FailureKind.EXIT_CODE, rank=0, exit_code=3),
        "rank 0's program ended with exit code 3",
    ),
    (
        137,
        Failure(FailureKind.SIGNAL, rank=0, signal=9),
        "rank 0 was killed by SIGKILL (by the kernel because memory ran out, or by a person)",
    ),
    (
        190,
        Failure(FailureKind.SIGNAL, rank=0, signal=62, step=5),
        "rank 0 was killed by signal 62 at step 5",
    ),
    (
        137,
        Failure(FailureKind.OOM_KILLED, rank=0, signal=9),
        "rank 0 was OOMKilled: its container reached its memory limit",
    ),
    (
        70,
        Failure(FailureKind.NOT_STARTED, rank=0, detail="no file x"),
        "rank 0 could not be started: no file x",
    ),
    (
        70,
        Failure(FailureKind.NOT_STARTED, rank=0, exit_code=127),
        "rank 0 could not be started: exit code 127",
    ),
    (
        70,
        Failure(FailureKind.NO_TRAINER, rank=0),
        "rank 0's program ended with exit code 0 before the trainer began",
    ),
    (
        83,
        Failure(FailureKind.ENDED_EARLY, rank=0, step=5),
        "rank 0's program ended at step 5, before its last step",
    ),
    (
        83,
        Failure(FailureKind.LEFT_EARLY, rank=0),
        "rank 0's program ended while other ranks were still running",
    ),
    (
        83,
        Failure(FailureKind.SHUTDOWN_TIMEOUT, rank=0),
        "rank 0 had not ended when the shutdown timeout of JAX passed on another rank, and JAX "
        "aborted all of them: leave shutdown_timeout_seconds out of jax.distributed.initialize(), "
        "or raise it",
    ),
    (
        83,
        Failure(FailureKind.UNFINISHED, rank=1, step=5),
        "rank 1's Python process ended at step 5 without its exit handlers, as by a signal, and "
        "its shell with exit code 0: without `set -o pipefail` a pipeline has the exit code of its "
        "last command",
    ),
    (
        64,
        Failure(FailureKind.NEVER_JOINED, count=2),
        "the processes never joined: each of 2 ranks used JAX alone (jax.process_count() was 1). "
        "Call jax.distributed.initialize(), without arguments and before any other use of JAX; if "
        "each process shall work alone, set `independent: true` in job.yaml",
    ),
    (
        82,
        Failure(
            FailureKind.HANG,
            rank=3,
            step=5,
            hang=HangFacts("step", 60.0, 61.0, 3, "rank 3 in step in f", ended=Numbers((0,), 1)),
        ),
        "rank 3 makes no progress at step 5 (the step timeout of 60 s passed first on rank 3, "
        "after 61 s): rank 3 in step in f; rank 0 had finished. A program that works on after its "
        'last step first calls jaxlaunch.report(phase="done")',
    ),
    (
        137,
        Failure(FailureKind.PROGRAM_GONE, rank=1, step=4),
        "rank 1's program was killed at step 4, or ended itself by os._exit, behind the process "
        "that started it",
    ),
    (
        82,
        Failure(FailureKind.HANG, rank=3, step=5, hang=HANG),
        "rank 3 makes no progress at step 5 (the step timeout of 60 s passed first on rank 3, "
        "after 61 s): "
        "rank 3 in step in f (x.py:1); ranks 0, 1 wait for rank 3; NCCL: no answer",
    ),
    (
        82,
        Failure(FailureKind.HANG, rank=0, hang=HangFacts(), cause=RAISED),
        "rank 0 makes no progress: its process does not run, and its peers gave up: "
        "rank 1 raised in data at step 20: ValueError: boom",
    ),
    (
        82,
        Failure(FailureKind.HEARTBEATS_MISSED, rank=2),
        "rank 2 stopped sending heartbeats to JAX, which then aborted its peers",
    ),
    (
        64,
        Failure(FailureKind.MIXED_VERSIONS, versions={0: "0.10", 2: "0.11"}),
        "rank 2 imported jax 0.11, rank 0 imported 0.10",
    ),
    (
        81,
        LOST,
        "host 1 (ranks 2 to 3) was lost: connection closed "
        "(its agent was killed by SIGKILL (by the kernel because memory ran out, or by a person))",
    ),
    (
        81,
        Failure(FailureKind.HOST_LOST, lost_hosts=(LostHost(0),)),
        "host 0 was lost: its agent was killed before it could write how the attempt ended",
    ),
    (
        81,
        Failure(
            FailureKind.NOT_JOINED,
            rendezvous=RendezvousFacts(
                Numbers((2, 5), 2), 30.0, "timeouts.rendezvous", ("host 2 is old",)
            ),
        ),
        "rendezvous: hosts 2, 5 did not join within 30 s (timeouts.rendezvous); refused: "
        "host 2 is old",
    ),
    (
        81,
        Failure(
            FailureKind.CANNOT_JOIN, detail="refused", rendezvous=RendezvousFacts(address="a:1")
        ),
        "rendezvous: cannot join host 0 at a:1: refused",
    ),
    (
        83,
        dataclasses.replace(
            RAISED, rendezvous=RendezvousFacts(Numbers((0,), 1), 300.0, "timeouts.replace")
        ),
        "rank 1 raised in data at step 20: ValueError: boom; no other host 0 within 300 s "
        "(timeouts.replace)",
    ),
    (81, Failure(FailureKind.AGENT_ENDED, exit_code=1), "host 0's agent ended with exit code 1"),
    (81, Failure(FailureKind.AGENT_ENDED, signal=15), "host 0's agent was killed by SIGTERM"),
    (
        81,
        Failure(FailureKind.AGENTS_KILLED, signal=15),
        "every agent was killed: host 0's was killed by SIGTERM",
    ),
    (
        83,
        Failure(FailureKind.UNRECORDED, exit_code=83),
        "a process crashed; the agents could not write more about it into the run folder",
    ),
    (
        81,
        Failure(FailureKind.RUN_KILLED),
        "launcher and agents were killed together, or the machine was restarted, before they could "
        "write how it ended",
    ),
    (80, stop_failure(StopOutcome.NOT_JOINED), "stopped from outside before every host had joined"),
    (80, stop_failure(StopOutcome.NO_RANK), "stopped from outside: it held no rank"),
    (
        77,
        stop_failure(
            StopOutcome.BETWEEN_ATTEMPTS, StopReason.DEADLINE, deadline_s=90.0, cause=RAISED
        ),
        "the job's deadline of 90 s passed, after: rank 1 raised in data at step 20: "
        "ValueError: boom",
    ),
    (
        80,
        stop_failure(
            StopOutcome.SAVED,
            saved_step=7,
            late={"data": Numbers((1,), 1)},
            lost_hosts=(LostHost(0, "reset"),),
        ),
        "stopped from outside: saved at step 7; host 0 was lost: reset; rank 1 in data did not end",
    ),
    (80, stop_failure(StopOutcome.NOT_SAVED), "stopped from outside: not saved"),
    (
        80,
        stop_failure(StopOutcome.NOT_SAVED, detail="the step is saved already"),
        "stopped from outside: the step is saved already",
    ),
    (
        80,
        stop_failure(StopOutcome.NOT_REPORTED),
        "stopped from outside: the program did not report whether it saved",
    ),
    (
        80,
        stop_failure(StopOutcome.NOT_SAVED, late={"": Numbers((0, 1), 2)}, was_killed=True),
        "stopped from outside: not saved: ranks 0, 1 in its program, killed",
    ),
    (
        80,
        stop_failure(StopOutcome.NOT_SAVED, cause=RAISED, committed_step=7),
        "stopped from outside: not saved: rank 1 raised in data at step 20: ValueError: boom; "
        "step 7 is saved",
    ),
    (
        80,
        stop_failure(StopOutcome.NOT_SAVED, cause=RAISED, deleted_step=7),
        "stopped from outside: not saved: rank 1 raised in data at step 20: ValueError: boom; "
        "step 7 was saved, and somebody deleted it",
    ),
    (
        80,
        stop_failure(None, StopReason.USER, committed_step=5, deleted_step=7),
        "stopped by you; step 5 is saved; step 7 was, and somebody deleted it",
    ),
    (80, stop_failure(None, StopReason.USER), "stopped by you; nothing is saved"),
    (
        80,
        stop_failure(StopOutcome.NOT_SAVED, StopReason.GROWTH, hosts=4, hosts_before=2),
        "stopped to continue with 4 hosts instead of 2: not saved",
    ),
    (
        84,
        stop_failure(StopOutcome.NOT_JOINED, StopReason.DISK_EXCEEDED, excess=EXCESS),
        "host 1 uses 4 MiB of ephemeral storage, over its limit of 3 MiB (resources.ephemeral), "
        "for which its pod is "
        "evicted before every host had joined",
    ),
    (
        80,
        stop_failure(StopOutcome.SAVED, StopReason.INTERRUPT, saved_step=7),
        "stopped by Ctrl-C: saved at step 7",
    ),
    (
        85,
        Failure(FailureKind.REQUEUED, rank=1, exit_code=42, requeue=Requeue.FREE, detail="free"),
        "rank 1's program ended with exit code 42, which asks for another run (restarts.codes: "
        "free)",
    ),
    (
        70,
        Failure(FailureKind.REPEATED, cause=RAISED, detail="the last line"),
        "rank 1 raised in data at step 20: ValueError: boom (the last line); another attempt "
        "failed in the same way and saved no new step",
    ),
    (
        79,
        Failure(FailureKind.NO_PROGRESS, count=3, cause=RAISED),
        "no newly committed step in 3 sets of pods; the first error was: "
        "rank 1 raised in data at step 20: ValueError: boom",
    ),
    (
        79,
        Failure(FailureKind.PREEMPTED_TOO_OFTEN, count=3, limit=3, cause=LOST),
        "no newly committed step in 3 preemptions in a row, of 3 (restarts.preempted): host 1 "
        "(ranks 2 to 3) was lost: "
        "connection closed (its agent was killed by SIGKILL (by the kernel because memory ran out, "
        "or by a person))",
    ),
    (
        79,
        Failure(FailureKind.PREEMPTED_TOO_OFTEN, count=3, limit=3),
        "no newly committed step in at least 3 preemptions in a row, of 3 (restarts.preempted): "
        "the job keeps no checkpoints",
    ),
]
FREE_TEXT = (FailureKind.OTHER, FailureKind.REFUSED)
STEPPING = Status(phase="step", step=20, stepped=True)
GLOO = {
    "type": "ValueError",
    "message": "Gloo all-reduce failed: Connection closed by peer",
    "code": None,
}
EVENTS = [
    Event(EventKind.ERROR, 0, 0, STEPPING, error=GLOO),
    Event(
        EventKind.ERROR, 1, 1, STEPPING, error={"type": "KeyError", "message": "3", "code": None}
    ),
    Event(
        EventKind.ERROR,
        1,
        1,
        STEPPING,
        error={"type": "StorageError", "message": "disk quota exceeded", "code": 84},
    ),
    Event(EventKind.EXIT, 1, 1, dataclasses.replace(STEPPING, exit=-9), exit=-9, oom=True),
    Event(EventKind.EXIT, 1, 1, dataclasses.replace(STEPPING, exit=3), exit=3, text="bye"),
    Event(EventKind.LOST, 1, 1, STEPPING, lost=LostHost(1, "connection closed", 1, 1)),
    Event(EventKind.HANG, 1, 1, STEPPING, hang=HANG),
    Event(EventKind.UNSTARTABLE, 1, 1, text="nope"),
]


def replace_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put nonsense in the place of every word of the catalog."""
    for name, template in CATALOG.items():
        parts = re.split(r"(\{[^}]*\})", template)
        replaced = [
            part if part.startswith("{") else re.sub(r"[A-Za-z']+", "zq", part) for part in parts
        ]
        monkeypatch.setitem(CATALOG, name, "".join(replaced))


def attempt_record(attempt: int, verdict: Verdict) -> AttemptRecord:
    return AttemptRecord(
        "u", attempt, attempt, verdict.cause, verdict.rank, None, None, {}, verdict, 1.0, 2.0
    )


def list_decisions(verdict: Verdict) -> Any:
    """Return what follows from a verdict: after one, two and three attempts, and without pods."""
    histories = [
        [attempt_record(number, verdict) for number in range(1, count + 1)] for count in (1, 2, 3)
    ]
    moves = [history.decide_next(records, 2, all_hosts_alive=True) for records in histories]
    given_up = history.give_up_verdict(histories[2], 4, 3)
    return (
        (
            verdict.code,
            verdict.cause,
            verdict.rank,
            verdict.host,
            verdict.step,
            verdict.failure,
            verdict.is_full_disk,
        ),
        [
            (move.should_restart, move.verdict.code, move.verdict.cause, move.verdict.failure)
            for move in moves
        ],
        history.preemptions_without_progress(histories[2]),
        given_up and (given_up.code, given_up.failure),
    )


def list_verdicts() -> list[Verdict]:
    """Return verdicts of every kind, also those of events and of hosts without a leader."""
    verdicts = [verdict_for_code(code, failure, rank=1) for code, failure, _ in CASES]
    verdicts += [verdict_for_event(event) for event in EVENTS]
    for first in EVENTS:
        for second in EVENTS:
            verdicts_value = find_root_cause([first, second])
            assert verdicts_value is not None
            verdicts.append(verdict_for_event(verdicts_value[0]))
    statuses = [
        dataclasses.replace(STEPPING, committed=10, stopped={"saved": saved})
        for saved in (True, False)
    ]
    return verdicts + [
        verdict_for_lost_leader("reset", 0, [status], 10, is_stopping=is_stopping)
        for status in statuses
        for is_stopping in (True, False)
    ]


def test_every_kind_has_case_and_sentence() -> None:
    assert {failure.kind for _, failure, _ in CASES} == set(FailureKind)
    for _, failure, sentence in CASES:
        assert render_failure(failure) == sentence


def test_decisions_do_not_depend_on_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    expected_value = list_verdicts()
    expected = [list_decisions(verdict) for verdict in expected_value]
    replace_catalog(monkeypatch)
    after = list_verdicts()
    assert [list_decisions(verdict) for verdict in after] == expected
    for old, new in zip(expected_value, after, strict=True):
        if old.failure.kind not in FREE_TEXT:
            assert "zq" in new.message and new.message != old.message


def test_facts_round_trip_and_newer_kind_is_other() -> None:
    for verdict in list_verdicts():
        text = json.dumps(verdict.to_json())
        assert codec.read_record(Verdict, codec.parse_record(text)) == verdict
    fields = verdict_for_code(83, RAISED).to_json()
    fields["failure"]["kind"] = "of_next_year"
    parsed = codec.read_record(Verdict, fields)
    assert parsed.failure.kind is FailureKind.OTHER and parsed.facts.detail == parsed.message


def test_sentence_without_facts_becomes_cause() -> None:
    verdict = verdict_for_code(contract.CRASH, "it broke")
    assert render_failure(Failure(FailureKind.NO_PROGRESS, count=3, cause=verdict.facts)).endswith(
        ": it broke"
    )


def test_long_list_of_numbers_is_cut() -> None:
    assert render_numbers(list(range(30)), "rank").endswith("18, 19 and 10 more")
    assert Numbers.from_sequence(range(30)).count == 30


@pytest.mark.parametrize("letter", ["x", "é", "\N{PILE OF POO}"])
def test_long_verdict_is_cut_and_keeps_kind(
    letter: str,
) -> None:
    exception = ExceptionFacts("ValueError", 2000 * letter, errno=28)
    raised = Failure(FailureKind.EXCEPTION, rank=1, exception=exception)
    verdict = verdict_for_code(
        79, Failure(FailureKind.NO_PROGRESS, count=3, cause=raised), traceback=8000 * letter
    )
    text = log_lines.format_termination_message(log_lines.TerminationMessage(verdict, 0))
    end = log_lines.parse_termination_message(text)
    assert len(text) <= log_lines.MAX_MESSAGE_BYTES and end is not None
    annotation = ProgressAnnotation("u", 1.0, "ended", 1, 0, verdict=verdict).to_json()
    recorded = ProgressAnnotation.from_json(annotation, "u")
    assert (
        len(annotation) <= MAX_ANNOTATION_BYTES
        and recorded is not None
        and recorded.verdict is not None
    )
    for parsed in (end.verdict, recorded.verdict):
        assert (parsed.failure.kind, parsed.failure.errno) == (FailureKind.NO_PROGRESS, 28)
        assert verdict.message.startswith(parsed.message) and len(parsed.message) > 100


def test_facts_are_read_without_json() -> None:
    """Host 1 reads host 0's last report so, when host 0 was lost after its verdict."""
    for verdict in list_verdicts():
        assert codec.read_record(Verdict, verdict.to_json()) == verdict


def test_many_refusals_leave_space_for_message() -> None:
    refused = tuple(
        f"host {host} (llama-{host} on node-{host}, pod llama-{host}-x7c5f) belongs to another "
        "set of pods: "
        "it has generation 3, host 0 has generation 4"
        for host in range(1, 50)
    )
    wait = RendezvousFacts(
        Numbers.from_sequence(range(1, 50)), 600.0, "timeouts.rendezvous", refused
    )
    not_joined = Failure(FailureKind.NOT_JOINED, rendezvous=wait)
    for failure in (not_joined, Failure(FailureKind.NO_PROGRESS, count=3, cause=not_joined)):
        verdict = verdict_for_code(contract.LOST, failure, rank=1, host=1)
        end = log_lines.parse_termination_message(
            log_lines.format_termination_message(log_lines.TerminationMessage(verdict, 0))
        )
        recorded = ProgressAnnotation.from_json(
            ProgressAnnotation("u", 1.0, "ended", 1, 0, verdict=verdict).to_json(), "u"
        )
        assert end is not None and len(end.verdict.message) > 2000
        assert (
            recorded is not None
            and recorded.verdict is not None
            and len(recorded.verdict.message) > 400
        )
