"""The end of an attempt that host 1 writes for a host 0 that was lost, with a folder of its own or a shared one."""

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
    environ = {
        contract.LEADER: "10.0.0.1:1",
        contract.HOSTS: "2",
        contract.INDEX: "1",
        contract.UID: "u",
    }
    job = AgentJob("t", ("true",)).to_json()
    return config.read_config(environ | {contract.JOB: job, contract.GENERATION: str(GENERATION)})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, print)


def of(attempt: int, generation: int = GENERATION, **changes: Any) -> AttemptProgress:
    now = time.time()
    return AttemptProgress(
        "u",
        generation,
        attempt,
        now - 60,
        **{"at": now - 1, "seconds": {"step": 40.0, "init": 10.0}, **changes},
    )


def keep(folder: RunFolder, of: AttemptProgress) -> None:
    RunStarts(folder, of.uid).write_summary(
        Summary(None, step=7, seconds=of.seconds, restarts={}, of=of)
    )


def gang(last: AttemptProgress, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "attempt": last.attempt,
        "of": dataclasses.asdict(last),
        "seconds": seconds,
        "unsafe_s": last.unsafe_s,
    }


def test_the_attempt_that_ran_is_ended_and_not_an_older_one_of_an_own_copy_of_the_folder(
    place: Config, folder: RunFolder
) -> None:
    keep(folder, of(1, generation=0, seconds={"step": 500.0}))  # as of when the pods started
    last = of(3, unsafe_s=5.0)
    said = gang(last, {"step": 700.0, "init": 30.0})  # of all three attempts
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message(said, 3, 0.0), [], LOST
    )
    (record,) = folder.read_records("u")
    assert (record.generation, record.attempt, record.started) == (1, 3, last.started)
    assert (record.seconds["step"], record.seconds["lost_work"], record.seconds["init"]) == (
        35.0,
        5.0,
        10.0,
    )
    found = folder.read_summary("u")
    assert found is not None and found.of is not None and found.of.attempt == 3
    assert found.seconds["step"] + found.seconds["lost_work"] == 700.0


def test_the_summary_of_the_same_attempt_on_shared_storage_is_ended(
    place: Config, folder: RunFolder
) -> None:
    keep(folder, of(1, seconds={"step": 31.0}, last_committed=6, first_committed=2))
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message(gang(of(1), {"step": 40.0}), 1, 0.0), [], LOST
    )
    (record,) = folder.read_records("u")
    assert (record.attempt, record.first_committed, record.last_committed) == (1, 2, 6)
    assert record.seconds["step"] == 40.0  # as reported later than written
    found = folder.read_summary("u")
    assert found is not None and found.step == 7


def test_an_attempt_has_a_number_after_the_last_where_host_0_never_reported(
    place: Config, folder: RunFolder
) -> None:
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message({}, 0, time.time()), [], LOST
    )
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message({}, 0, time.time()), [], LOST
    )
    assert [record.attempt for record in folder.read_records("u")] == [1, 2]


def test_an_attempt_of_a_host_0_that_never_reported_is_not_stored_without_its_seconds(
    place: Config, folder: RunFolder
) -> None:
    began = time.time() - 90
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message({}, 0, began), [], LOST
    )
    (record,) = folder.read_records("u")
    assert 90 <= record.seconds["rendezvous"] <= time.time() - began
    found = folder.read_summary("u")
    assert (
        found is not None and 90 <= sum(found.seconds.values()) <= time.time() - began + 0.001
    )  # rounded


def test_the_seconds_of_a_report_of_the_attempt_before_are_not_counted_twice(
    place: Config, folder: RunFolder
) -> None:
    keep(folder, of(1))
    said = gang(of(1), {"step": 40.0})
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message(said, 1, 0.0), [], LOST
    )
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message(said, 2, 0.0), [], LOST
    )  # lost before it said anything of attempt 2
    records = folder.read_records("u")
    assert [record.attempt for record in records] == [1, 2]
    assert sum(record.seconds.get("step", 0.0) for record in records) == 40.0


def test_a_host_that_never_joined_ends_no_attempt_of_a_host_0_that_lives(
    place: Config, folder: RunFolder
) -> None:
    keep(folder, of(4))
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message({}, 0, time.time()), [], LOST
    )
    found = folder.read_summary("u")
    assert not folder.read_records("u") and found is not None and found.verdict is None


def test_a_host_that_joined_ends_the_attempt_that_host_0_started_and_never_reported(
    place: Config, folder: RunFolder
) -> None:
    keep(folder, of(1))
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message({}, 1, time.time()), [], LOST
    )
    found = folder.read_summary("u")
    assert [record.attempt for record in folder.read_records("u")] == [1]
    assert found is not None and found.verdict is not None


def test_a_host_that_never_joined_ends_what_earlier_pods_left_and_its_own_attempt(
    place: Config, folder: RunFolder
) -> None:
    keep(folder, of(4, generation=0))
    reporter.record_end_without_leader(
        folder, place, LeaderReport.from_message({}, 0, time.time()), [], LOST
    )
    assert [(record.generation, record.attempt) for record in folder.read_records("u")] == [
        (0, 4),
        (1, 5),
    ]


def test_a_host_that_was_held_up_does_not_replace_the_end_that_host_0_wrote_without_it(
    place: Config, folder: RunFolder
) -> None:
    ended = run_folder.close_unfinished(
        of(2),
        verdict_for_code(contract.LOST, "host 1 (rank 1) was lost: no message for 10 s", rank=1),
    )
    folder.append_record(ended)
    RunStarts(folder, "u").write_summary(
        Summary(ended.verdict, step=9, seconds={}, restarts={}, of=of(2))
    )
    reporter.record_end_without_leader(
        folder,
        place,
        LeaderReport.from_message(gang(of(2), {"step": 4.0}), 2, time.time()),
        [],
        LOST,
    )
    assert folder.read_records("u") == [ended]
    assert (found := folder.read_summary("u")) is not None and found.verdict == ended.verdict
