"""Programs with their own step (`jaxlaunch.run`) in a gang: resume, stop, and errors."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.gang import loops
from tests.gang.runs import Result, Running, run_job

pytestmark = pytest.mark.computes

# Rank 1 fails in its data at step 7, or rank 0, whose devices call back, in the step: where the
# environment says so.
FAILING_PROGRAM = """
import os
import jax
import jax.numpy as jnp
import numpy as np
import jaxlaunch

def reward(n):
    if n == 4 and os.environ.get("FAILS") == "step":
        raise ValueError("no reward for 4")
    return np.float32(n)

def step(state, batch):
    gain = jax.experimental.io_callback(reward, jax.ShapeDtypeStruct((), jnp.float32), state["n"])
    return {"n": state["n"] + 1}, {"loss": batch["x"].mean() + 0.0 * gain}

def data(step):
    if step == 7 and jax.process_index() == 1 and os.environ.get("FAILS") == "data":
        raise KeyError("no shard 7")
    return {"x": np.full((4, 2), step, np.float32)}

steps = int(os.environ.get("STEPS", "10"))
jaxlaunch.run(step, lambda: {"n": 0}, data, steps=steps, every=None, log_every=1)
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("example", "moments"), [("gan", [(15, "rank"), (55, "rank")]), ("reinforce", [(35, "all")])]
)
def test_killed_loop_ends_like_an_unbroken_one(
    tmp_path: Path, example: str, moments: list[tuple[int, str]]
) -> None:
    comparison = loops.compare_with_unbroken(tmp_path, example, moments, steps=100)
    assert len(comparison["killed"]) == len(moments), comparison
    reported = [path.name for path in tmp_path.glob("**/reported/*")]
    assert (
        sorted(reported) == sorted(2 * [f"{step}.json" for step in range(10, 101, 10)])
        or example != "gan"
    )
    assert comparison["equal_arrays"], comparison
    assert comparison["equal_metrics"], comparison
    assert comparison["arrays"] > 5, comparison


def make_job(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(FAILING_PROGRAM)
    keys = {"command": ["python", "mine.py"], "code": ".", "restarts": {"in_place": 0, "crash": 0}}
    return {"name": "loop", "hosts": 2, "accelerator": {"type": "cpu", "per_host": 1}} | keys


@pytest.mark.parametrize(
    ("place", "rank", "message"),
    [
        ("data", 1, r"rank 1 raised at step 7: KeyError: 'no shard 7' \(mine\.py:19 in data\)"),
        (
            "step",
            0,
            r"rank 0 raised at step 4: \w+: ValueError: no reward for 4 \(mine\.py:10 in reward\)",
        ),
    ],
)
def test_exception_is_reported_with_rank_step_and_line(
    tmp_path: Path, place: str, rank: int, message: str
) -> None:
    document = make_job(tmp_path) | {"hosts": rank + 1}
    result = run_job(tmp_path, document, env={"FAILS": place})
    assert re.fullmatch(message, result.verdict["message"]), result.verdict
    assert (result.code, result.verdict["rank"]) == (83, rank)


def test_sigterm_saves_and_the_next_run_resumes(tmp_path: Path) -> None:
    steps = {"STEPS": "100000"}
    with Running(tmp_path, make_job(tmp_path), env=steps) as running:
        running.wait_for_step(3)
        text = running.wait_until("metrics", running.scrape)
        assert re.search(
            r'^jaxlaunch_task_metric\{metric="loss",rank="0",split="train"\} \d', text, re.MULTILINE
        ), text
        running.signal(signal.SIGTERM)
        stopped = running.wait()
    assert (stopped.code, stopped.summary["status"]) == (80, "stopped"), stopped.stderr
    saved = stopped.summary["saved"]
    assert saved is not None and saved == stopped.summary["step"]
    result = run_job(tmp_path, make_job(tmp_path), env={"STEPS": str(saved + 5)})
    assert result.code == 0, result.stderr[-3000:]
    assert f"resumed at step {saved} of {saved + 5}" in result.stdout
    assert result.losses == {step: step - 1.0 for step in range(1, saved + 6)}
    assert _read_metrics(result)["loss"] == saved + 4


def _read_metrics(result: Result) -> dict[str, Any]:
    """Return the newest metrics that the agent received."""
    return json.loads((result.folder / "summary.json").read_text())["metrics"]
