"""The README's commands do what it says, in a copy of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled import QUICK_COMPILES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# These call this very suite, or take as long: `make check` and `make test` are CI itself.
NOT_FROM_WITHIN = {"make check", "make quick", "make test", "make bench"}


def commands() -> list[str]:
    """The lines of the README's shell blocks, comments away."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, and the environment that runs this test."""
    folder = tmp_path_factory.mktemp("checkout")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def test_the_readme_is_short_and_shows_the_job_first_that_make_run_trains() -> None:
    assert len(README.splitlines()) <= 150
    first = re.search(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert first is not None and first[1] == "yaml"
    _, _, job = (ROOT / "examples/digits.yaml").read_text().partition("\n")  # the first line is a comment
    assert first[2] == job
    assert f"```yaml\n{job}```" in (ROOT / "docs/quickstart.md").read_text()


def test_the_readme_s_first_job_is_valid(tmp_path: Path) -> None:
    text = re.search(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert text is not None
    (tmp_path / "job.yaml").write_text(text[1])
    done = subprocess.run(
        [Path(sys.prefix) / "bin/launcher", "validate", tmp_path / "job.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_command_of_the_readme_works(checkout: Path) -> None:
    lines = [line for line in commands() if line not in NOT_FROM_WITHIN]
    assert "make run" in lines
    script = "set -ex\n" + "\n".join(lines)
    env = os.environ | QUICK_COMPILES
    done = subprocess.run(["bash", "-c", script], cwd=checkout, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads((checkout / "runs/digits/summary.json").read_text())
    assert (summary["status"], summary["verdict"]["code"]) == ("done", 0)
    assert summary["metrics"]["eval_accuracy"] >= 0.97
    assert summary["metrics"]["eval_examples"] == 360  # every held-out digit, once
    said = f"accuracy {summary['metrics']['eval_accuracy']:.4g}  examples 360"
    assert said in done.stdout


def test_the_tree_of_the_architecture_names_every_folder_of_both_packages() -> None:
    """A reader finds any fact by file name: what the tree leaves out must be below what it names."""
    head, *rows = (
        (ROOT / "docs/architecture.md").read_text().split("## The files")[1].split("```")[1].strip("\n").splitlines()
    )
    middle = head.index("trainer/")
    for package, column in (("launcher", slice(0, middle)), ("trainer", slice(middle, None))):
        named = [found[1] for row in rows if (found := re.match(r"  (\w+/?) {2,}", row[column]))]
        folders = {f"{path.parent.name}/" for path in (ROOT / package).glob("*/*.py")}
        assert {name for name in named if name.endswith("/")} == folders
        assert all((ROOT / package / f"{name}.py").exists() for name in named if not name.endswith("/"))
