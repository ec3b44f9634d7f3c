"""Where the seconds of a run go."""

from __future__ import annotations

import pytest

from jaxlaunch.launcher.agent.gang.clock import Clock, RestartClock
from jaxlaunch.records.run_numbers import goodput_ratio


def test_clock_counts_uncommitted_steps_of_a_failed_attempt_as_lost_work() -> None:
    clock = Clock(0.0)
    clock.enter_cause("init", 10.0)
    clock.enter_cause("step", 15.0)
    for step in range(1, 11):
        clock.record_step(step, 15.0 + step)
    clock.record_commit(6)
    clock.enter_cause("data", 25.0)
    clock.end_failed_attempt(27.0)
    seconds = clock.seconds_by_cause(30.0)
    assert sum(seconds.values()) == pytest.approx(30.0)
    assert seconds["rendezvous"] == 10.0
    assert seconds["init"] == 5.0
    assert seconds["data"] == 2.0
    assert seconds["down"] == 3.0
    assert (seconds["step"], seconds["lost_work"]) == (6.0, 4.0)


def test_clock_keeps_seconds_of_earlier_generations() -> None:
    clock = Clock(0.0)
    clock.add_earlier_seconds({"step": 100.0, "down": 7.0})
    clock.enter_cause("step", 1.0)
    clock.end_failed_attempt(3.0)
    seconds = clock.seconds_by_cause(3.0)
    assert (seconds["step"], seconds["lost_work"], seconds["down"]) == (100.0, 2.0, 7.0)


def test_clock_of_a_finished_attempt_has_no_lost_work() -> None:
    clock = Clock(0.0)
    clock.enter_cause("step", 0.0)
    clock.enter_cause("done", 5.0)
    clock.end_finished_attempt(5.0)
    assert clock.seconds_by_cause(5.0)["lost_work"] == 0.0
    assert goodput_ratio(clock.seconds_by_cause(5.0)) == 1.0


def test_goodput_falls_during_a_hang() -> None:
    clock = Clock(0.0)
    clock.enter_cause("step", 10.0)
    for step in range(1, 11):
        clock.record_step(step, 10.0 + step)
        clock.record_commit(step)
    seconds = [clock.seconds_by_cause(now) for now in (20.0, 24.0, 25.0, 40.0, 120.0)]
    goodputs = [goodput_ratio(row) or 0.0 for row in seconds]
    # Steps of 1 s may take 3 s, and 2 s in addition.
    assert [row["lost_work"] for row in seconds] == [0.0, 0.0, 0.0, 15.0, 95.0]
    assert goodputs[2] > goodputs[3] > goodputs[4]
    assert sum(seconds[-1].values()) == pytest.approx(120.0)

    # The step was only slow, and counts once it is complete.
    clock.record_step(11, 120.0)
    assert clock.seconds_by_cause(120.0)["step"] == 110.0
    clock.enter_cause("eval", 120.0)
    assert clock.seconds_by_cause(400.0)["lost_work"] == 0.0

    # The hang that ends an attempt loses all seconds since its last commit.
    clock.enter_cause("step", 400.0)
    clock.end_failed_attempt(500.0)
    seconds = [clock.seconds_by_cause(now) for now in (500.0, 600.0)]
    assert [(row["step"], row["lost_work"]) for row in seconds] == [(10.0, 200.0)] * 2


def test_goodput_is_zero_without_a_step() -> None:
    assert goodput_ratio(Clock(0.0).seconds_by_cause(9.0)) is None


def test_restart_clock_assigns_every_second_to_one_cause() -> None:
    clock = RestartClock()
    clock.enter_cause("start", 100.0)
    for cause, at in (
        ("import", 100.5),
        ("rendezvous", 102.0),
        ("step", 102.5),
        ("first_step", 103.0),
    ):
        clock.enter_cause(cause, at)
    clock.complete_first_step(104.0)
    clock.enter_cause("data", 105.0)  # of the loop: the start is over
    first = {"start": 0.5, "import": 1.5, "rendezvous": 1.0, "first_step": 1.0}
    assert clock.seconds_by_cause(200.0) == first
    clock.begin("decide", 210.0, 10.0, 210.5)
    assert clock.last_seconds == first
    for cause, at in (("replace", 211.0), ("start", 215.0), ("data", 216.0), ("first_step", 216.5)):
        clock.enter_cause(cause, at)
    again = {"detect": 10.0, "decide": 0.5, "end": 0.5, "replace": 4.0, "start": 1.0}
    again |= {"data": 0.5, "first_step": 3.5}
    assert clock.seconds_by_cause(220.0) == again and list(clock.seconds_by_cause(220.0)) == list(
        again
    )


def test_step_is_overdue_after_three_times_the_usual_and_two_seconds() -> None:
    clock = Clock(0.0)
    clock.enter_cause("step", 10.0)
    for step in range(1, 6):
        clock.record_step(step, 10.0 + step)
    assert clock.overdue_since(19.9) is None and clock.overdue_since(20.1) == 15.0
    clock.enter_cause("data", 21.0)
    assert clock.overdue_since(22.0) == 15.0
    for cause, at in (("eval", 23.0), ("step", 90.0)):
        clock.enter_cause(cause, at)
    assert clock.overdue_since(94.0) is None and clock.overdue_since(96.0) == 90.0
    clock.record_step(6, 96.5)
    assert clock.overdue_since(97.0) is None
    clock.end_failed_attempt(200.0)
    assert clock.overdue_since(300.0) is None
