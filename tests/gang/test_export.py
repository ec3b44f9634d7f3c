"""A run's checkpoint, exported by its name's folder, starts another run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gang.runs import digits, job, launch

pytestmark = pytest.mark.computes

GPT2 = {"kind": "gpt2", "layers": 1, "width": 32, "heads": 2, "vocab": 64, "length": 16}


def test_what_one_run_learned_another_starts_from(tmp_path: Path) -> None:
    keys = {"data": {"source": "synthetic"}, "mesh": {"fsdp": 2}, "batch": 8, "steps": 30}
    train = digits(task="lm", model=GPT2, **keys)
    first = launch(tmp_path / "first", job(train, hosts=2, per_host=1))
    assert first.code == 0, first.stderr[-4000:]
    command = [
        sys.executable,
        "-m",
        "jaxlaunch.launcher.cli.main",
        "export",
        str(first.folder),
        "--to",
        str(tmp_path / "hf"),
    ]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'hf'}: GPT2LMHeadModel of step 30, 15,328 parameters in float32, 1 file\n"
    train |= {"model": GPT2 | {"init_from": str(tmp_path / "hf")}, "steps": 1}
    second = launch(tmp_path / "second", job(train))
    assert second.code == 0, second.stderr[-4000:]
    assert second.losses[1] < first.losses[1] - 1.0
