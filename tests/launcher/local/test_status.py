"""The status of a run on this machine, from its summary and its agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.local import status
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.local.status import LiveStatus
from jaxlaunch.records.summary import Summary
from jaxlaunch.runs.layout import Holder


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
