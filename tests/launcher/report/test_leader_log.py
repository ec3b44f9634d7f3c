"""What the log of a leader says about a run: curves, attempts, and the phases of the ranks."""

from __future__ import annotations

import dataclasses

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.launcher.report.leader_log import LeaderLog
from jaxlaunch.launcher.report.timeline import build_timeline, rank_phases
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import PastLine, TailLine
from jaxlaunch.records.rank_history import Column, decode_letters
from jaxlaunch.records.summary import RankMemory, StartRecord
from jaxlaunch.records.verdict import verdict_for_code
from tests.launcher.report.made_jobs import BEGAN, beats, ended


def make_log(*, has_trainer: bool = True) -> LeaderLog:
    return LeaderLog("1234", has_trainer=has_trainer)


def test_heartbeats_are_rows_of_the_curves() -> None:
    log = make_log()
    log.add_records(beats(20))
    loss, evals = log.metrics.curves["loss"], log.evals.curves["loss"]
    assert [point[0] for point in loss.points] == [*range(10, 210, 10)]
    assert loss.points[1][1] == BEGAN + 15
    # A mean over the held-out set is a point only where it changes.
    assert len(evals.points) < 20 and evals.points[-1][2] == 0.8
    assert "eval_loss" not in log.metrics.curves
    # The seconds of an interval are the difference of two heartbeats.
    step, _, wall_s, parts = log.metrics.intervals.items[-1]
    assert (step, wall_s, parts) == (200, 15.0, {"data": 1.0, "eval": 0.0, "save": 0.0})


def test_metrics_of_other_programs_keep_their_names() -> None:
    log = make_log(has_trainer=False)
    log.add_records(beats(3))
    assert "eval_loss" in log.metrics.curves and not log.evals.curves


def test_records_that_are_read_again_add_nothing() -> None:
    records = beats(6)
    log, once = make_log(), make_log()
    once.add_records(records)
    for start in range(5):
        log.add_records(records[: start + 2])
        log.add_records(records[start:])
    assert log.metrics.curves["loss"].points == once.metrics.curves["loss"].points
    assert log.ranks.columns == once.ranks.columns


def test_resumed_attempt_replaces_the_steps_that_it_repeats() -> None:
    first = beats(10)
    # The steps since the last save, 50 s, become lost work when the attempt has ended.
    lost = {**first[-1].seconds, "step": first[-1].seconds["step"] - 50.0, "lost_work": 50.0}
    # The gang was down for a second when this heartbeat was written.
    seconds = {**lost, "down": 1.0}
    between = dataclasses.replace(first[-1], at=BEGAN + 147, stage="gather", seconds=seconds)
    again = beats(5, attempt=2, began=BEGAN + 160, first_step=70, seconds={**lost, "down": 14.0})
    log = make_log()
    log.add_records(
        [
            *first,
            ended(137, "rank 1 was killed", attempt=1, at=BEGAN + 145, rank=1),
            between,
            *again,
        ]
    )
    steps = [point[0] for point in log.metrics.curves["loss"].points]
    assert steps == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]
    (record,) = log.list_attempts()
    assert (record.attempt, record.cause, record.rank) == (1, "killed", 1)
    assert (record.started, record.ended) == (BEGAN, BEGAN + 146)
    assert record.seconds == {"step": 76.0, "data": 9.0, "lost_work": 50.0}
    running = log.running_attempt([record])
    assert running is not None and running.seconds == {"step": 56.0, "data": 4.0, "down": 14.0}
    start = StartRecord(1, "1234", BEGAN)
    timeline = build_timeline([start], [record], log.metrics.intervals.items, running, {})
    assert [attempt.number for attempt in timeline.attempts] == [1, 2]
    assert timeline.seconds_by_cause["lost_work"] == pytest.approx(50.0)
    assert timeline.wall_s == pytest.approx(220.0)


def test_attempt_without_a_later_heartbeat_ends_with_its_verdict() -> None:
    log = make_log()
    log.add_records([*beats(3), ended(83, "rank 0 raised X", attempt=1, at=BEGAN + 40)])
    (record,) = log.list_attempts()
    # The ten seconds after the last heartbeat belong to its phase.
    assert record.ended == BEGAN + 40 and record.seconds == {"step": 38.0, "data": 2.0}
    assert log.running_attempt([record]) is None


def test_attempt_has_the_memory_of_the_rank_that_ended_it() -> None:
    memory = RankMemory(3, 1, 7.0, 7.9, 8.0)
    line = ended(137, "rank 3 was killed by SIGKILL", attempt=1, at=BEGAN + 40, rank=3)
    text = log_lines.format_line(dataclasses.replace(line, memory=memory))
    assert (read_line := log_lines.parse_line(text)) is not None
    log = make_log()
    log.add_records([*beats(3), read_line])
    assert [record.memory for record in log.list_attempts()] == [memory]


def test_leader_that_was_killed_has_the_end_of_its_termination_message() -> None:
    log = make_log()
    log.add_records(beats(3))
    end = AttemptEnd(verdict_for_code(contract.LOST, "host 1 lost the leader"), 1, 0)
    (record,) = log.list_attempts([end])
    assert (record.attempt, record.verdict.code, record.ended) == (1, contract.LOST, BEGAN + 30)
    assert record.seconds == {"step": 28.0, "data": 2.0}


def test_new_pods_continue_the_log_of_earlier_ones() -> None:
    log = make_log()
    log.add_records(beats(3))
    seconds = {"init": 5.0, "step": 28.0, "data": 2.0}
    verdict = verdict_for_code(137, "rank 0 was killed", rank=0)
    place = {"at": BEGAN + 90, "attempt": 1, "generation": 0}
    past = [
        PastLine(**place, attempts=1, ends={"killed": 1}),
        PastLine(**place, verdict=verdict, seconds=seconds, ended=BEGAN + 35),
        TailLine(**place, rank=0, lines=["the last words"]),
    ]
    log.add_records([*past, *beats(2, attempt=2, began=BEGAN + 95, first_step=40)])
    (record,) = log.list_attempts()
    assert (record.started, record.ended, record.seconds) == (BEGAN, BEGAN + 35, seconds)
    running = log.running_attempt([record])
    assert running is not None and (running.attempt, running.started) == (2, BEGAN + 95)
    assert [point[0] for point in log.metrics.curves["loss"].points] == [10, 20, 30, 40, 50]
    assert log.tails == {0: ["the last words"]}


def test_phases_of_ranks_that_a_heartbeat_does_not_list() -> None:
    def letters(**fields: object) -> str:
        log = make_log()
        log.add_records(beats(1, **fields))
        return "".join(decode_letters(log.ranks.columns[0]))

    listed = list(range(16))
    assert letters(phases={"step": [0, 2], "data": [1]}, counts={"step": 2, "data": 1}) == "sds"
    # Only one phase has more ranks than are listed, so they are all in it.
    phases = {"step": listed, "ended": [17]}
    assert letters(phases=phases, counts={"step": 19, "ended": 1}) == "s" * 17 + "x" + "ss"
    phases = {"step": listed, "data": [*range(16, 32)]}
    shown = letters(phases=phases, counts={"step": 17, "data": 17})
    assert shown == "s" * 16 + "d" * 16 + "--"
    assert (
        letters(phases={"joining": [0], "unsaid": [1]}, counts={"joining": 1, "unsaid": 1}) == "--"
    )


def test_history_of_ranks_says_that_it_has_no_steps() -> None:
    log = make_log()
    log.add_records(beats(4))
    timeline = build_timeline([StartRecord(1, "1234", BEGAN)], [], [], log.running_attempt([]), {})
    heat = rank_phases(log.ranks, timeline, has_lag=False)
    assert heat is not None and heat["has_lag"] is False and heat["ranks"] == 2
    assert [column[:2] for column in heat["columns"]] == [[0.0, 15.0], [15.0, 30.0], [30.0, 45.0]]
    assert all(isinstance(column, Column) for column in log.ranks.columns)
