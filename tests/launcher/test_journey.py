"""The way of a submitted job through our files stays short: it goes down them, and seldom climbs back."""

from pathlib import Path

import pytest

from tests import journey

FILES, RETURNS = 16, 3

COMMAND = "name: x\nimage: i\naccelerator: {type: cpu}\ncode: .\nqueue: everyone\ncommand: [python, train.py]\n"


@pytest.mark.parametrize("brings", [False, True], ids=["trains", "brings its code and the agent"])
def test_a_submitted_job_goes_through_few_files_and_seldom_back(tmp_path: Path, brings: bool) -> None:
    (tmp_path / "job.yaml").write_text(COMMAND)
    way = journey.walk(tmp_path / "job.yaml" if brings else journey.JOB)
    assert way.steps[0].file == "job/load.py" and way.steps[-1].file == journey.CLIENT
    assert (way.files <= FILES, way.returns <= RETURNS) == (True, True), "\n".join(way.lines())
