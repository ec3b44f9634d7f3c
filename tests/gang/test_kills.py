"""Runs that are killed at random moments, a few of tests.gang.kills: the records say what happened, to the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.kills import Kill, draw, once

# One of each: a rank of two hosts, an agent, host 0's, all of them, and all with the launcher.
SEEDS = ("0:2", "0:30", "0:7", "0:14", "0:13")


@pytest.mark.parametrize(
    "kill", [draw(seed, None, False) for seed in SEEDS], ids=lambda kill: f"{kill.target}-{kill.seed}"
)
def test_a_killed_run_has_the_right_cause_rank_step_restarts_and_seconds(tmp_path: Path, kill: Kill) -> None:
    line = once(kill, tmp_path)
    assert not line["wrong"], line


def test_the_kills_of_the_suite_are_of_every_kind() -> None:
    assert {draw(seed, None, False).target for seed in SEEDS} == {"child", "agent", "leader", "gang", "all"}
