"""The benchmark of the leader, at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import leader
from jaxlaunch.launcher.agent.io.link import HEARTBEAT_S

pytestmark = pytest.mark.extended

HOSTS, RANKS = 200, 4
SLACK = 3  # an issue's bounds, times this


def test_verdict_reaches_two_hundred_hosts_quickly(tmp_path: Path) -> None:
    result = leader.measure_gang(HOSTS, RANKS, 3.0, tmp_path)
    assert 0.5 * HOSTS / HEARTBEAT_S < result.beats_per_s < 1.5 * HOSTS / HEARTBEAT_S
    assert result.share < SLACK * leader.MAX_SHARE and result.peak_mb < leader.MAX_MB
    assert result.verdict_s < SLACK * leader.MAX_VERDICT_S
    assert "rank 4 raised at step" in (tmp_path / "leader.log").read_text()
