"""What version 0.1 wrote is read: tests/fixtures/version_0.1/run is of a run whose first attempt crashed at step 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.jobs.status import agent_report
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import Beat, Judged, Past, Tail
from jaxlaunch.records.progress_annotation import Recorded
from jaxlaunch.runs.run_folder import RunFolder

HERE = Path(__file__).parents[2] / "fixtures" / "version_0.1" / "run"
UID = "uid-of-0.1"
CRASH = "rank 0 raised at step 4: ValueError: boom"


def test_the_summary_and_the_attempts_of_its_run_folder() -> None:
    folder = RunFolder(HERE, pytest.fail)
    found = folder.summary(UID)
    assert found is not None and found.verdict is not None and found.of is not None
    assert (found.status, found.step, found.saved, found.restarts) == ("done", 9, 4, {"crash": 1})
    assert (found.metrics, found.notes, found.of.attempt) == ({"loss": 1.5}, ["a take-over"], 2)
    assert [(one.attempt, one.cause, one.last_committed) for one in folder.records(UID)] == [
        (1, "crash", 4),
        (2, "done", 4),
    ]
    assert folder.records(UID)[0].verdict.message == CRASH


def test_its_lines_in_the_log_of_host_0() -> None:
    lines = [log_lines.parse(text) for text in (HERE / "leader.log").read_text().splitlines()]
    assert [type(one) for one in lines] == [Beat, Judged, Beat, Judged, Beat, Past, Past, Past, Tail]
    report = agent_report.merge([one for one in lines if one is not None], [])
    assert (report.step, report.committed, report.preempted) == (9, 4, 0)
    assert [(end.attempt, end.result) for end in report.earlier] == [(1, "crash (83)"), (2, "done (0)")]


def test_its_annotation_and_its_termination_message() -> None:
    known = Recorded.from_json((HERE / "annotation.json").read_text(), UID)
    assert known is not None and (known.step, known.committed, known.ends) == (9, 4, {"crash": 1})
    ended = log_lines.parse_termination_message((HERE / "termination.json").read_text())
    assert ended is not None and known.verdict is not None
    assert (ended.verdict.message, known.verdict.message) == (CRASH, CRASH)
