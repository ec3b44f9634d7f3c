"""Two runs, one checkpoint folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.gang.runs import Running, digits, job, launch, until_gone


def test_a_second_live_run_is_refused_and_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints")
    endless = job(digits(steps=1_000_000, checkpoint={"path": path, "every": 5}, log_every=1))
    finite = job(digits(steps=5, checkpoint={"path": path}))
    with Running(tmp_path / "first", endless) as first:
        first.until_step(12)
        second = launch(tmp_path / "second", finite)
        assert second.code == 78
        assert f"{path} belongs to run" in second.verdict["message"]
        pids = first.tree()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        first.process.wait()
        until_gone(pids)
    third = launch(
        tmp_path / "third", job(digits(steps=1_000, checkpoint={"path": path}, log_every=1))
    )
    assert third.code == 0, third.stderr[-3000:]
    assert min(third.losses) > 5  # it went on from a step that the first one saved
