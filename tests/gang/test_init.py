"""`launcher init` writes one short file and its code, which trains."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.compiled import quick_start_env
from tests.gang.runs import run_launcher

pytestmark = [pytest.mark.computes, pytest.mark.extended]

# The files of a kind, and what makes its run short.
KINDS: dict[str, tuple[list[str], list[str]]] = {
    "classify": (["my-job.yaml"], ["train.epochs=1"]),
    "lm": (["my-job.yaml"], ["train.steps=4"]),
    "own": (["my-job.yaml", "my_job.py"], ["train.steps=40", "train.log_every=40"]),
    "command": (["my-job.yaml", "my_job.py"], []),
}


def call_launcher(folder: Path, *arguments: str) -> str:
    """Run a command in `folder` and return its output; it must succeed."""
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    done = run_launcher(*arguments, env=quick_start_env() | {"PATH": path}, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_init_writes_a_short_job_that_runs(kind: str, tmp_path: Path) -> None:
    files, overrides = KINDS[kind]
    output = call_launcher(tmp_path, "init", "my-job", "--kind", kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert all(file in output for file in files)
    texts = [(tmp_path / file).read_text() for file in files]
    assert all(len(text.splitlines()) <= 60 for text in texts) and "@" not in texts[0]
    call_launcher(tmp_path, "run", "my-job.yaml", "restarts.in_place=0", *overrides)
    metrics = json.loads((tmp_path / "runs" / "my-job" / "summary.json").read_text())["metrics"]
    if kind == "own":
        assert metrics["eval_examples"] == 64 and metrics["eval_distance"] < 0.5
    assert metrics["loss"] < {"classify": 3.0, "lm": 6.0, "own": 0.5, "command": 0.01}[kind]


def test_init_does_not_overwrite_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("mine")
    with pytest.raises(AssertionError, match="own.py already exists"):
        call_launcher(tmp_path, "init", "own", "--kind", "own")
    assert [path.name for path in tmp_path.iterdir()] == ["own.py"]
    assert (tmp_path / "own.py").read_text() == "mine"
