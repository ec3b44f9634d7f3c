"""The output of `.ci/release`. `python -m tests.lint` checks workflows and versions."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from tests import needs

ROOT = Path(__file__).parents[2]


def run_release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / ".ci/release", *arguments], cwd=folder, capture_output=True, text=True
    )


def test_release_notes_are_the_section_of_the_release(tmp_path: Path) -> None:
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0]\n\n- new\n\n## [0.1.0]\n\n- old\n"
    )
    assert run_release(tmp_path, "notes", "0.2.0").stdout == "- new\n"
    assert "has no section [0.3.0]" in run_release(tmp_path, "notes", "0.3.0").stderr
    changes.write_text("## [Unreleased]\n\n- newer\n\n## [0.1.0]\n\n- old\n")
    refused = run_release(tmp_path, "notes", "0.1.0")
    assert refused.returncode == 1
    assert "move them to a section [0.1.0]" in refused.stderr
    assert refused.stdout == ""


def test_package_has_absolute_links_and_project_urls(tmp_path: Path) -> None:
    needs.a_clone()
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert run_release(tmp_path, "links", "https://git.example/o/r", "v1.0.0").returncode == 0
    text = (tmp_path / "README.md").read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^()\s]+)\)", text)
    assert pictures[0] == "https://git.example/o/r/actions/workflows/ci.yaml/badge.svg"
    assert all(
        item.startswith("https://git.example/o/r/raw/v1.0.0/docs/pictures/")
        for item in pictures[1:]
    )
    targets = re.findall(r"\]\(([^()\s]+)\)", text)
    assert targets and all(target.startswith("https://") for target in targets)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Changelog"] == "https://git.example/o/r/blob/v1.0.0/CHANGELOG.md"
