"""The seconds that earlier attempts spent."""

from __future__ import annotations

from jaxlaunch import contract
from jaxlaunch.records.summary import AttemptRecord
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.history import sum_seconds


def record(started: float, ended: float, **seconds: float) -> AttemptRecord:
    verdict = verdict_for_code(contract.LOST, "host 0 was lost")
    return AttemptRecord("u", 0, 1, verdict.cause, 0, None, None, seconds, verdict, started, ended)


def test_gaps_between_attempts_belong_to_down() -> None:
    found = sum_seconds(
        [record(100.0, 140.0, step=40.0), record(160.0, 200.0, step=30.0, init=10.0)], 230.0
    )
    assert found["down"] == 50.0 and sum(found.values()) == 130.0


def test_the_seconds_of_a_first_attempt_that_was_stored_without_them_do_not_vanish() -> None:
    found = sum_seconds([record(100.0, 136.8), record(140.0, 200.0, step=60.0)], 200.0)
    assert found["step"] == 60.0 and found["down"] == 40.0


def test_the_seconds_before_the_start_of_an_attempt_are_its_own() -> None:
    assert (
        sum(sum_seconds([record(110.0, 140.0, rendezvous=10.0, step=30.0)], 150.0).values()) == 50.0
    )
