"""The files of a tutorial print what its page shows, except for numbers and folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tutorials
from tests.compiled import quick_start_env
from tests.gang.runs import PATIENCE_S, assert_success, run_job

pytestmark = [pytest.mark.computes, pytest.mark.extended]

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS.parent / "examples"


@pytest.mark.parametrize(
    ("page", "commands"),
    [
        ("your-script.md", 1),
        ("your-model.md", 2),
        ("your-loop.md", 1),
        ("workstation-gpu.md", 1),
        ("fine-tune.md", 5),
        ("first-cluster-job.md", 4),  # what needs a cluster runs in tests/cluster/test_readme.py
    ],
)
def test_tutorial_prints_what_its_page_shows(page: str, commands: int, tmp_path: Path) -> None:
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    executed = 0
    for step in tutorials.find_steps((DOCS / page).read_text()):
        if step.file is not None:
            (tmp_path / step.file).write_text(step.text)
            continue
        result = subprocess.run(
            ["bash", "-euc", step.text],
            cwd=tmp_path,
            env=os.environ | quick_start_env() | {"PATH": path},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
        )
        assert result.returncode == 0, result.stdout[-3000:]
        assert step.output and list(tutorials.missing_lines(step.output, result.stdout)) == []
        executed += len(step.text.splitlines())
    assert executed == commands


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("mnist", "accuracy 0.88 of 297 digits held out, on 8 devices"),
        ("large_model", "loss 1.18 on 8 devices, each with (4, 32, 8); restored as saved: True"),
        ("transformations", "loss 0.7659 -> 0.7237 on 8 devices"),
    ],
)
def test_tutorial_example_prints_its_result(name: str, output: str, tmp_path: Path) -> None:
    document = yaml.safe_load((EXAMPLES / "tutorials" / f"{name}.yaml").read_text())
    result = assert_success(run_job(tmp_path, document | {"code": str(EXAMPLES / "tutorials")}))
    assert list(tutorials.missing_lines(output, result.stdout)) == []
    assert output in (DOCS / "from-pytorch.md").read_text()
    assert result.summary["restarts"] == {}
    if name == "mnist":
        assert float(result.stdout.partition("accuracy ")[2].split()[0]) > 0.8
