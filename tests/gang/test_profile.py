"""Profiles of a run by two processes, at a configured step and on demand, change no number."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import HERE, Running, digits_block, fault_env, make_job, run_job, run_launcher

pytestmark = pytest.mark.computes

ROOT = HERE.parent.parent
GANG = {"hosts": 2, "per_host": 2}


def run_profile(run: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run_launcher("profile", run, *args, env={"KUBECONFIG": "/nowhere"})


def slow_env(folder: Path) -> dict[str, str]:
    """Return the variables of a run with slow steps, whose programs keep their metadata."""
    fault = fault_env(folder / "marks", "slow", "step", seconds=0.05)
    return fault | {"JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1"}


def assert_adds_up(summary: dict[str, Any], steps: int) -> None:
    assert (summary["steps"], summary["devices"]) == (steps, 2)
    assert abs(sum(summary["seconds"].values()) - summary["step_s"]) < 1e-6 * summary["step_s"]
    assert all(
        summary["seconds"][kind] > 0 for kind in ("matmul", "elementwise", "collectives", "host")
    )


def test_profiled_run_has_the_same_losses(tmp_path: Path) -> None:
    plain = run_job(tmp_path / "plain", make_job(digits_block(steps=12, eval={"every": 6}), **GANG))
    train = digits_block(
        task="faulty:Faulty", steps=100_000, profile={"at": 4, "steps": 4}, eval={"every": 6}
    )
    with Running(tmp_path / "profiled", make_job(train, **GANG), env=slow_env(tmp_path)) as running:
        running.wait_for_step(8)
        requested = run_profile(running.folder, "--steps", "3", "-o", "json")
        assert requested.returncode == 0, requested.stderr + running.read_output()[1][-2000:]
        running.wait_for_step(12)
        running.signal(signal.SIGTERM)
        result = running.wait()
    assert result.code == 80, result.stderr[-3000:]
    assert {step: result.losses[step] for step in plain.losses} == plain.losses  # to the bit

    for rank in (0, 1):
        folder = result.folder / "profiles" / "step-4" / f"rank-{rank}"
        assert list(folder.rglob("*.xplane.pb")) and list(folder.rglob("*.trace.json.gz"))
        assert_adds_up(json.loads((folder / "summary.json").read_text()), steps=4)
    assert result.stdout.count("profile of steps 4-7 on 2 devices of rank 0") == 1
    assert any(note.startswith("profile of steps 4-7: ") for note in result.summary["notes"])

    answers = json.loads(requested.stdout)["ranks"]
    assert {rank: answer["state"] for rank, answer in answers.items()} == {"0": "done", "1": "done"}
    for answer in answers.values():
        assert_adds_up(answer["summary"], steps=3)
        assert (
            json.loads((Path(answer["folder"]) / "summary.json").read_text()) == answer["summary"]
        )


def test_profile_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    nowhere = run_profile(tmp_path / "nowhere")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "There is no run folder" in nowhere.stderr
    with Running(tmp_path, make_job(command=["sleep", "1000"])) as running:
        running.wait_until("the agents' addresses", (running.folder / "agents.json").exists)
        refused = run_profile(running.folder)
        assert refused.returncode == 2
        assert "only the built-in trainer can be profiled" in refused.stderr
        running.signal(signal.SIGTERM)
        running.wait()
    after_end = run_profile(running.folder)
    assert after_end.returncode == 2
    assert f"{running.folder} is not running" in after_end.stderr
