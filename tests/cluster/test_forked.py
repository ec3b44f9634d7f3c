"""A command that was forked is the command: its streams, its exit code, its folder and its environment."""

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
def test_a_forked_command_does_what_one_of_its_own_does(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nimage: here:1\ncommand: [\n")
    env = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    own = subprocess.run(
        [*COMMAND, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    done = forked.run(arguments, cwd=tmp_path, env=env, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (own.returncode, own.stdout, own.stderr)
