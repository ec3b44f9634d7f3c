"""The files of a tutorial, run as its page says, print what the page shows, but for numbers and folders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gang.runs import PATIENCE_S

pytestmark = pytest.mark.computes

DOCS = Path(__file__).parents[2] / "docs"
_NUMBER = re.compile(r"\b\d[\d.]*(e[-+]\d+)?k?\b")


def blocks(page: str, language: str) -> list[str]:
    """What a page shows in a language; "" for none: commands and their output."""
    text = (DOCS / page).read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [text for named, text in found if named == language]


@pytest.mark.parametrize(("page", "program"), [("your-script.md", "train.py"), ("your-model.md", "stripes.py")])
def test_a_tutorial_does_what_its_page_shows(page: str, program: str, tmp_path: Path) -> None:
    command, shown = blocks(page, "")[:2]
    (tmp_path / program).write_text(blocks(page, "python")[0])
    (tmp_path / command.split()[-1]).write_text(blocks(page, "yaml")[0])
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command.split(),
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    said = _NUMBER.sub("0", done.stdout)
    for line in shown.splitlines():
        for part in line.split("…"):  # where the run folder is
            assert _NUMBER.sub("0", part) in said
