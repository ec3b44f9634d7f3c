"""The commands of README and quickstart print what the pages show, in a copy of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tutorials
from tests.compiled import quick_start_env

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900
MARK = "--- command"
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()


def split_commands(block: str) -> list[str]:
    """The lines of a shell block, comments away."""
    return [line.split("#")[0].strip() for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, and the environment that runs this test."""
    folder = tmp_path_factory.mktemp("checkout")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture(scope="module")
def outputs(checkout: Path) -> dict[str, str]:
    """Return what each command prints, run in one shell for README and for quickstart."""
    lines = [
        line
        for page in (README, QUICKSTART)
        for step in tutorials.find_steps(page)
        for line in split_commands(step.text)
    ]
    once = list(dict.fromkeys(lines))
    script = "".join(f"echo {MARK} {number}\n{line}\n" for number, line in enumerate(once))
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=checkout,
        env=os.environ | quick_start_env(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return dict(
        zip(once, re.split(rf"^{MARK} \d+\n", done.stdout, flags=re.MULTILINE)[1:], strict=True)
    )


@pytest.mark.extended
@pytest.mark.parametrize("page", [README, QUICKSTART], ids=["README", "quickstart"])
def test_documented_commands_print_the_documented_output(
    page: str, outputs: dict[str, str]
) -> None:
    shown = [step for step in tutorials.find_steps(page) if step.output]
    assert [split_commands(step.text)[0] for step in shown][:1] == ["make run"]
    for step in shown:
        output = "".join(outputs[line] for line in split_commands(step.text))
        assert list(tutorials.missing_lines(step.output, output)) == []


@pytest.mark.extended
def test_make_run_reaches_the_documented_accuracy(checkout: Path, outputs: dict[str, str]) -> None:
    messages = re.findall(
        r"eval .* accuracy (\S+)  examples 360$", outputs["make run"], re.MULTILINE
    )
    assert messages and float(messages[-1]) >= 0.97  # of every held-out digit, once
    summary = json.loads((checkout / "runs/digits/summary.json").read_text())
    assert (summary["status"], summary["verdict"]["code"]) == ("done", 0)
    assert summary["metrics"]["eval_examples"] == 360
