"""SIGTERM at any moment: the run saves, exits with 80, and the next run resumes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Result, Running, digits_block, fault_env, make_job, wait_until_gone

SLOW_READ = 100  # records: a few steps, and what is read ahead of them
# A run from the start and, for one, another that resumes from where the first was stopped.
STARTS = {"step": 1, "compile": 1, "eval": 2, "save": 1, "data": 1}


def faulty_job(**keys: Any) -> dict[str, Any]:
    train = digits_block(
        task="faulty:Faulty", steps=100_000, eval={"every": 5}, checkpoint={"every": 7}
    )
    return make_job(train, **{"hosts": 2, "per_host": 1, "grace": "300s"} | keys)


def run_and_stop(folder: Path, place: str, env: dict[str, str], marks: Path, **keys: Any) -> Result:
    """Run until the fault's mark exists, then send SIGTERM; no process may outlive the run."""
    with Running(folder, faulty_job(**keys), env=env) as running:
        if place == "step":
            last_steps = [int(line) for line in logged_steps(folder / "run")][-1:] or [0]
            running.wait_for_step(last_steps[0] + 3)
        else:
            running.wait_for_file(marks / f"slow-{keys.get('hosts', 2) - 1}")
        pids = running.pids()
        running.signal(signal.SIGTERM)
        result = running.wait()
        wait_until_gone(pids)
    return result


def logged_steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    if file.exists():
        return [json.loads(line)["step"] for line in file.read_text().splitlines()]
    return []


@pytest.mark.parametrize("at", STARTS)
def test_sigterm_saves_and_the_next_run_resumes(tmp_path: Path, at: str) -> None:
    step = 0
    for number in range(STARTS[at]):
        marks = tmp_path / f"marks-{number}"
        fault = {"step": SLOW_READ, "rank": 1} if at == "data" else {}
        env = {} if at == "step" else fault_env(marks, "slow", at, seconds=1.5, **fault)
        # A standby process goes with the run.
        keys: dict[str, Any] = {"restarts": {"in_place": 1}} if at == "step" else {}
        if at == "compile":
            keys["hosts"] = 1
        result = run_and_stop(tmp_path / "job", at, env, marks, **keys)
        assert result.code == 80, result.stderr[-3000:]
        verdict = result.verdict
        assert verdict["cause"] == "preempted"
        if step > 0:
            assert f"resumed at step {step} of 100000" in result.stdout
        saved = result.summary["step"] or 0
        assert (
            f"saved at step {saved}" in verdict["message"]
            or "nothing new to save" in verdict["message"]
        )
        # An evaluation is made up for first.
        assert saved >= step if at in ("compile", "eval") else saved > step
        step = saved
    steps = logged_steps(tmp_path / "job" / "run")
    assert steps == list(range(1, step + 1))


def test_endless_data_wait_is_named_at_the_deadline(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    env = fault_env(marks, "slow", "data", step=SLOW_READ, rank=1, seconds=3600)
    with Running(tmp_path / "job", faulty_job(grace="12s"), env=env) as running:
        running.wait_for_file(marks / "slow-1")  # what was read ahead is still to be used up
        running.wait_until(
            "rank 1's wait",
            lambda: 'jaxlaunch_phase{rank="1",phase="data"} 1' in running.scrape(host=1),
        )
        pids = running.pids()
        running.signal(signal.SIGTERM)
        result = running.wait()
        wait_until_gone(pids)
    assert result.code == 80
    assert "not saved: rank 1 in data" in result.verdict["message"]
