"""The status of a run on this machine, from its summary and its agents."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from jaxlaunch.launcher.cli.status import status_command
from jaxlaunch.launcher.local import status
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.local.status import LiveStatus
from jaxlaunch.records.summary import RestartRow, Summary
from jaxlaunch.runs.layout import Holder
from tests.launcher.report import made_runs


@pytest.mark.parametrize(
    ("reached", "saved", "live", "step"),
    [
        (0, 20, LiveStatus(2, 0), 20),
        (0, 20, None, 20),
        (None, 20, LiveStatus(2, None), 20),
        (0, 20, LiveStatus(2, 21), 21),
        (25, 20, LiveStatus(2, 24), 25),
        (0, None, LiveStatus(2, 0), 0),
        (None, None, None, None),
    ],
)
def test_restarted_run_is_at_its_saved_step_until_it_trains(
    tmp_path: Path,
    reached: int | None,
    saved: int | None,
    live: LiveStatus | None,
    step: int | None,
) -> None:
    summary = Summary(None, step=reached, seconds={}, restarts={}, committed=saved)
    assert status.run_status(Run("mine", tmp_path, summary, Holder(1, False)), live).step == step


def test_wide_status_has_the_seconds_of_each_restart_by_cause(tmp_path: Path) -> None:
    restarts = (
        RestartRow(1, None, {"start": 1.5, "first_step": 2.25}),
        RestartRow(2, "crash", {"detect": 0.5, "first_step": 0.75}),
    )
    progress = {"step": 3, "seconds": {}, "restarts": {"crash": 1}, "committed": None}
    made_runs.write(tmp_path, Summary(None, **progress, restart_seconds=restarts), [])
    shown = CliRunner().invoke(status_command, [str(tmp_path), "-o", "wide"]).output
    lines = [line.split() for line in shown.splitlines()]
    header = lines.index(["ATTEMPT", "AFTER", "SECONDS", "DETECT", "START", "FIRST_STEP"])
    assert lines[header + 1 : header + 3] == [
        ["1", "-", "3.75", "0.00", "1.50", "2.25"],
        ["2", "crash", "1.25", "0.50", "0.00", "0.75"],
    ]
