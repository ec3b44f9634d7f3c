"""The script of docs/your-script.md, run as the page says, prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gang.runs import PATIENCE_S

pytestmark = pytest.mark.computes

PAGE = (Path(__file__).parents[2] / "docs" / "your-script.md").read_text()


def blocks(language: str) -> list[str]:
    """What the page shows in a language; "" for none: commands and their output."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [text for named, text in found if named == language]


def test_a_script_of_one_s_own_trains_on_two_hosts_as_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[0])
    (tmp_path / "mine.yaml").write_text(blocks("yaml")[0])
    command, shown = blocks("")[:2]
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
    for line in shown.splitlines():
        for part in line.split("…"):  # where the run folder is
            assert part in done.stdout
