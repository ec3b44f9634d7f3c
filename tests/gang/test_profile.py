"""Profiles of a run under way: at a step that the job names, and on demand, by two processes; no number changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import HERE, Running, digits, job, launch

pytestmark = pytest.mark.computes

ROOT = HERE.parent.parent
GANG = {"hosts": 2, "per_host": 2}


def profile(run: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`launcher profile RUN`."""
    return subprocess.run(
        [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "profile", str(run), *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KUBECONFIG": "/nowhere"},
    )


def slow(folder: Path) -> dict[str, str]:
    """Steps that take a while, by their own names: a run that waits to be profiled."""
    (folder / "marks").mkdir(parents=True)
    fault = {"kind": "slow", "at": "step", "seconds": 0.05, "mark": str(folder / "marks")}
    return {"FAULT": json.dumps(fault), "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1"}


def assert_adds_up(summary: dict[str, Any], steps: int) -> None:
    assert (summary["steps"], summary["devices"]) == (steps, 2)
    assert abs(sum(summary["seconds"].values()) - summary["step_s"]) < 1e-6 * summary["step_s"]
    assert all(
        summary["seconds"][kind] > 0 for kind in ("matmul", "elementwise", "collectives", "host")
    )


def test_a_run_is_profiled_at_a_step_and_on_demand_and_trains_the_same(tmp_path: Path) -> None:
    plain = launch(tmp_path / "plain", job(digits(steps=12, eval={"every": 6}), **GANG))
    train = digits(
        task="faulty:Faulty", steps=100_000, profile={"at": 4, "steps": 4}, eval={"every": 6}
    )
    with Running(tmp_path / "profiled", job(train, **GANG), env=slow(tmp_path)) as running:
        running.until_step(8)
        asked = profile(running.folder, "--steps", "3", "-o", "json")
        assert asked.returncode == 0, asked.stderr + running.text()[1][-2000:]
        running.until_step(12)
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

    answers = json.loads(asked.stdout)["ranks"]
    assert {rank: one["state"] for rank, one in answers.items()} == {"0": "done", "1": "done"}
    for one in answers.values():
        assert_adds_up(one["summary"], steps=3)
        assert json.loads((Path(one["folder"]) / "summary.json").read_text()) == one["summary"]


def test_what_cannot_be_profiled_is_said_in_a_sentence(tmp_path: Path) -> None:
    nowhere = profile(tmp_path / "nowhere")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "There is no run folder" in nowhere.stderr
    with Running(tmp_path, job(command=["sleep", "1000"])) as running:
        running.until("the agents' addresses", (running.folder / "agents.json").exists)
        refused = profile(running.folder)
        assert refused.returncode == 2
        assert "only the built-in trainer can be profiled" in refused.stderr
        running.signal(signal.SIGTERM)
        running.wait()
    ended = profile(running.folder)
    assert ended.returncode == 2
    assert f"{running.folder} is not running" in ended.stderr
