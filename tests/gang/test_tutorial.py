"""The files of a tutorial, run as its page says, print what the page shows, but for numbers and folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tutorials
from tests.gang.runs import PATIENCE_S

pytestmark = pytest.mark.computes

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "commands"),
    [("your-script.md", 1), ("your-model.md", 1), ("your-loop.md", 1), ("fine-tune.md", 5), ("tutorials.md", 1)],
)
def test_a_tutorial_does_what_its_page_shows(page: str, commands: int, tmp_path: Path) -> None:
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    ran = 0
    for step in tutorials.steps((DOCS / page).read_text()):
        if step.file is not None:
            (tmp_path / step.file).write_text(step.text)
            continue
        done = subprocess.run(
            ["bash", "-euc", step.text],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert step.output and list(tutorials.missing(step.output, done.stdout)) == []
        ran += len(step.text.splitlines())
    assert ran == commands
