"""Two runs with one checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from tests.gang.runs import Running, digits_block, make_job, run_job


def test_folder_of_a_live_run_is_refused_and_of_a_killed_one_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoints")
    endless = make_job(
        digits_block(steps=1_000_000, checkpoint={"path": path, "every": 5}, log_every=1)
    )
    finite = make_job(digits_block(steps=5, checkpoint={"path": path}))
    with Running(tmp_path / "first", endless) as first:
        first.wait_for_step(12)
        second = run_job(tmp_path / "second", finite)
        assert second.code == 78
        assert f"{path} belongs to run" in second.verdict["message"]
        first.kill()
    saved = max(int(step.name) for step in Path(path).iterdir() if step.name.isdecimal())
    third = run_job(
        tmp_path / "third",
        make_job(digits_block(steps=saved + 5, checkpoint={"path": path}, log_every=1)),
    )
    assert third.code == 0, third.stderr[-3000:]
    assert min(third.losses) > 5  # it resumed from a step that the first one saved
