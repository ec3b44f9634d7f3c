"""SIGTERM, whenever it comes: saved, exit 80, and the next run goes on from there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Result, Running, digits, job, until_gone

READS = 100  # records: a few steps, and what is read ahead of them
# A run from the start and, for some, one that resumes from where the other was stopped.
TIMES = {"step": 2, "compile": 1, "eval": 2, "save": 1, "data": 1}


def faulty(folder: Path, at: str, **fault: Any) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    return {
        "FAULT": json.dumps({"kind": "slow", "at": at, "mark": str(folder), "seconds": 1.5} | fault)
    }


def document(**keys: Any) -> dict[str, Any]:
    train = digits(task="faulty:Faulty", steps=100_000, eval={"every": 5}, checkpoint={"every": 7})
    return job(train, hosts=2, per_host=1, **{"grace": "300s"} | keys)


def stop(folder: Path, name: str, env: dict[str, str], marks: Path, **keys: Any) -> Result:
    """Runs until the fault's mark is there, then sends SIGTERM; nothing of the run may outlive it."""
    with Running(folder, document(**keys), env=env) as running:
        if name == "step":
            last = [int(line) for line in steps_of(folder / "run")][-1:] or [0]
            running.until_step(last[0] + 3)
        else:
            running.until_file(marks / "slow-1")
        pids = running.tree()
        running.signal(signal.SIGTERM)
        result = running.wait()
        until_gone(pids)
    return result


def steps_of(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return (
        [json.loads(line)["step"] for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )


@pytest.mark.parametrize("at", TIMES)
def test_a_sigterm_saves_and_the_next_run_goes_on_from_that_step(tmp_path: Path, at: str) -> None:
    step = 0
    for number in range(TIMES[at]):
        marks = tmp_path / f"marks-{number}"
        env = (
            {}
            if at == "step"
            else faulty(marks, at, **({"step": READS, "rank": 1} if at == "data" else {}))
        )
        standby = {} if number else {"restarts": {"in_place": 1}}  # it goes with the run
        result = stop(tmp_path / "job", at, env, marks, **standby)
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
        assert (
            saved >= step if at in ("compile", "eval") else saved > step
        )  # an evaluation is made up for first
        step = saved
    steps = steps_of(tmp_path / "job" / "run")
    assert steps == list(range(1, step + 1))


def test_a_data_wait_that_does_not_end_is_named_at_the_deadline(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    env = faulty(marks, "data", step=READS, rank=1, seconds=3600)
    with Running(tmp_path / "job", document(grace="12s"), env=env) as running:
        running.until_file(marks / "slow-1")  # what was read ahead is still to be used up
        running.until(
            "rank 1's wait",
            lambda: 'jaxlaunch_phase{rank="1",phase="data"} 1' in running.scrape(host=1),
        )
        pids = running.tree()
        running.signal(signal.SIGTERM)
        result = running.wait()
        until_gone(pids)
    assert result.code == 80
    assert "not saved: rank 1 in data" in result.verdict["message"]
