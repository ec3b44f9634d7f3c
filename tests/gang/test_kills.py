"""A few of the random kills of tests.gang.kills and tests.kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.kills import Kill, carry_out, draw_kill
from tests.gang.runs import run_job
from tests.kills import Event, Series, find_loss_errors, make_document

pytestmark = pytest.mark.extended

# One of each: a rank of two hosts, an agent, host 0's, all of them, and all with the launcher.
SEEDS = ("0:2", "0:30", "0:7", "0:14", "0:13")


@pytest.mark.parametrize(
    "kill",
    [draw_kill(seed, None, False) for seed in SEEDS],
    ids=lambda kill: f"{kill.target}-{kill.seed}",
)
def test_killed_run_has_the_right_cause_rank_step_restarts_and_seconds(
    tmp_path: Path, kill: Kill
) -> None:
    line = carry_out(kill, tmp_path)
    assert not line["wrong"], line


def test_seeds_cover_every_kind_of_kill() -> None:
    assert {draw_kill(seed, None, False).target for seed in SEEDS} == {
        "child",
        "agent",
        "leader",
        "gang",
        "all",
    }


EVENTS = (
    Event("0", 2, "agent", "SEGV", "save", victim=0, after=5, delay_s=0.1),
    Event("1", 2, "leader", "KILL", "stop", victim=0, after=2, delay_s=0.1),
    Event("2", 2, "child", "TERM", "step", victim=1, after=3, delay_s=0.1),
    Event("3", 2, "all", "KILL", "save", victim=0, after=3, delay_s=0.1),
)


def test_disturbed_training_keeps_its_saves_and_has_equal_losses(tmp_path: Path) -> None:
    undisturbed = run_job(tmp_path / "undisturbed", make_document(2)).losses
    series = Series(tmp_path / "series", 2)
    lines = [series.carry_out(event) for event in EVENTS]
    assert not [line for line in lines if line["wrong"]], lines
    assert find_loss_errors(series, undisturbed) == []
