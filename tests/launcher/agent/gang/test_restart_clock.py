"""The seconds of a restart, by cause."""

from __future__ import annotations

from jaxlaunch.launcher.agent.gang.restart_clock import RestartClock


def test_every_second_from_the_last_sign_of_life_to_the_first_step_has_one_cause() -> None:
    clock = RestartClock()
    clock.enter("start", 100.0)
    for cause, at in (("import", 100.5), ("rendezvous", 102.0), ("step", 102.5), ("first_step", 103.0)):
        clock.enter(cause, at)
    clock.stepped(104.0)
    clock.enter("data", 105.0)  # of the loop: the start is over
    first = {"start": 0.5, "import": 1.5, "rendezvous": 1.0, "first_step": 1.0}
    assert clock.seconds(200.0) == first
    clock.begin("decide", 210.0, 10.0, 210.5)
    assert clock.last == first
    for cause, at in (("replace", 211.0), ("start", 215.0), ("data", 216.0), ("first_step", 216.5)):
        clock.enter(cause, at)
    again = {"detect": 10.0, "decide": 0.5, "end": 0.5, "replace": 4.0, "start": 1.0, "data": 0.5, "first_step": 3.5}
    assert clock.seconds(220.0) == again and list(clock.seconds(220.0)) == list(again)
