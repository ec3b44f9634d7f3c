"""A forked command behaves like a fresh one: streams, exit code, folder and environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster import forked
from tests.cluster.command import COMMAND


@pytest.mark.parametrize(
    "arguments", [["--version"], ["validate", "job.yaml"], ["nonesuch"], ["list"]]
)
def test_forked_command_behaves_like_a_fresh_one(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nimage: here:1\ncommand: [\n")
    env = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    fresh = subprocess.run(
        [*COMMAND, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    done = forked.run_forked(arguments, cwd=tmp_path, env=env, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (
        fresh.returncode,
        fresh.stdout,
        fresh.stderr,
    )
