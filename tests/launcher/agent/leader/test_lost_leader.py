"""The end of an attempt that host 1 records for a host 0 that was lost."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.leader import reporter
from jaxlaunch.launcher.agent.leader.reporter import LeaderReport
from jaxlaunch.records.summary import AttemptProgress, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs import run_folder
from jaxlaunch.runs.run_folder import RunFolder, RunStarts

GENERATION = 1
LOST = verdict_for_code(contract.LOST, "host 0 was lost: connection closed", rank=0, host=0)


@pytest.fixture
def place() -> Config:
    environ = {contract.LEADER: "10.0.0.1:1", contract.HOSTS: "2", contract.INDEX: "1"}
    environ[contract.UID] = "u"
    job = AgentJob("t", ("true",)).to_json()
    return config.read_config(environ | {contract.JOB: job, contract.GENERATION: str(GENERATION)})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, print)


def make_progress(attempt: int, generation: int = GENERATION, **changes: Any) -> AttemptProgress:
    now = time.time()
    fields = {"at": now - 1, "seconds": {"step": 40.0, "init": 10.0}, **changes}
    return AttemptProgress("u", generation, attempt, now - 60, **fields)


def write_summary(folder: RunFolder, progress: AttemptProgress) -> None:
    summary = Summary(None, step=7, seconds=progress.seconds, restarts={}, of=progress)
    RunStarts(folder, progress.uid).write_summary(summary)


def state_message(last: AttemptProgress, seconds: dict[str, float]) -> dict[str, Any]:
    progress = {"of": dataclasses.asdict(last), "unsafe_s": last.unsafe_s}
    return {"attempt": last.attempt, "seconds": seconds, **progress}


def record_end(
    folder: RunFolder, place: Config, attempt: int, at: float, message: Any = None
) -> None:
    """Record the end of the attempt after host 0 was lost, whose last message is given."""
    report = LeaderReport.from_message(message or {}, attempt, at)
    reporter.record_end_without_leader(folder, place, report, [], LOST)


def test_running_attempt_is_recorded_despite_an_older_local_copy(
    place: Config, folder: RunFolder
) -> None:
    write_summary(
        folder, make_progress(1, generation=0, seconds={"step": 500.0})
    )  # as of when the pods started
    last = make_progress(3, unsafe_s=5.0)
    message = state_message(last, {"step": 700.0, "init": 30.0})  # of all three attempts
    record_end(folder, place, 3, 0.0, message)
    (record,) = folder.read_records("u")
    assert (record.generation, record.attempt, record.started) == (1, 3, last.started)
    assert record.seconds["step"] == 35.0
    assert record.seconds["lost_work"] == 5.0
    assert record.seconds["init"] == 10.0
    result = folder.read_summary("u")
    assert result is not None and result.of is not None and result.of.attempt == 3
    assert result.seconds["step"] + result.seconds["lost_work"] == 700.0


def test_summary_of_the_same_attempt_is_completed(place: Config, folder: RunFolder) -> None:
    steps = {"first_step": 1, "first_committed": 2, "last_committed": 6}
    write_summary(folder, make_progress(1, seconds={"step": 31.0}, **steps))
    record_end(folder, place, 1, 0.0, state_message(make_progress(1), {"step": 40.0}))
    (record,) = folder.read_records("u")
    assert record.attempt == 1
    assert {name: getattr(record, name) for name in steps} == steps
    assert record.seconds["step"] == 40.0  # as reported later than written
    result = folder.read_summary("u")
    assert result is not None and result.step == 7


def test_unreported_attempt_gets_the_next_number(place: Config, folder: RunFolder) -> None:
    record_end(folder, place, 0, time.time())
    record_end(folder, place, 0, time.time())
    assert [record.attempt for record in folder.read_records("u")] == [1, 2]


def test_unreported_attempt_has_seconds(place: Config, folder: RunFolder) -> None:
    began = time.time() - 90
    record_end(folder, place, 0, began)
    (record,) = folder.read_records("u")
    assert 90 <= record.seconds["rendezvous"] <= time.time() - began
    result = folder.read_summary("u")
    # The seconds are rounded.
    limit_s = time.time() - began + 0.001
    assert result is not None and 90 <= sum(result.seconds.values()) <= limit_s


def test_seconds_of_an_older_report_are_not_counted_twice(place: Config, folder: RunFolder) -> None:
    write_summary(folder, make_progress(1))
    message = state_message(make_progress(1), {"step": 40.0})
    record_end(folder, place, 1, 0.0, message)
    record_end(folder, place, 2, 0.0, message)  # lost before it said anything of attempt 2
    records = folder.read_records("u")
    assert [record.attempt for record in records] == [1, 2]
    assert sum(record.seconds.get("step", 0.0) for record in records) == 40.0


def test_host_that_never_joined_does_not_end_a_living_attempt(
    place: Config, folder: RunFolder
) -> None:
    write_summary(folder, make_progress(4))
    record_end(folder, place, 0, time.time())
    result = folder.read_summary("u")
    assert not folder.read_records("u") and result is not None and result.verdict is None


def test_joined_host_ends_an_unreported_attempt(place: Config, folder: RunFolder) -> None:
    write_summary(folder, make_progress(1))
    record_end(folder, place, 1, time.time())
    result = folder.read_summary("u")
    assert [record.attempt for record in folder.read_records("u")] == [1]
    assert result is not None and result.verdict is not None


def test_host_that_never_joined_ends_attempts_of_earlier_pods(
    place: Config, folder: RunFolder
) -> None:
    write_summary(folder, make_progress(4, generation=0))
    record_end(folder, place, 0, time.time())
    records = folder.read_records("u")
    assert [(record.generation, record.attempt) for record in records] == [(0, 4), (1, 5)]


def test_stalled_host_does_not_replace_the_end_of_host_0(place: Config, folder: RunFolder) -> None:
    lost = verdict_for_code(contract.LOST, "host 1 was lost: no message for 10 s", rank=1)
    end = run_folder.close_unfinished(make_progress(2), lost)
    folder.append_record(end)
    summary = Summary(end.verdict, step=9, seconds={}, restarts={}, of=make_progress(2))
    RunStarts(folder, "u").write_summary(summary)
    record_end(folder, place, 2, time.time(), state_message(make_progress(2), {"step": 4.0}))
    assert folder.read_records("u") == [end]
    assert (result := folder.read_summary("u")) is not None and result.verdict == end.verdict
