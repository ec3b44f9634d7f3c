"""The seconds that earlier attempts spent."""

from __future__ import annotations

from jaxlaunch import contract
from jaxlaunch.records.summary import AttemptRecord
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.history import sum_seconds


def attempt_record(started: float, ended: float, **seconds: float) -> AttemptRecord:
    verdict = verdict_for_code(contract.LOST, "host 0 was lost")
    return AttemptRecord("u", 0, 1, verdict.cause, 0, None, None, seconds, verdict, started, ended)


def test_gaps_between_attempts_count_as_down() -> None:
    seconds = sum_seconds(
        [
            attempt_record(100.0, 140.0, step=40.0),
            attempt_record(160.0, 200.0, step=30.0, init=10.0),
        ],
        230.0,
    )
    assert seconds["down"] == 50.0 and sum(seconds.values()) == 130.0


def test_unknown_seconds_of_first_attempt_count_as_down() -> None:
    seconds = sum_seconds(
        [attempt_record(100.0, 136.8), attempt_record(140.0, 200.0, step=60.0)], 200.0
    )
    assert seconds["step"] == 60.0 and seconds["down"] == 40.0


def test_seconds_before_start_belong_to_attempt() -> None:
    assert (
        sum(sum_seconds([attempt_record(110.0, 140.0, rendezvous=10.0, step=30.0)], 150.0).values())
        == 50.0
    )
