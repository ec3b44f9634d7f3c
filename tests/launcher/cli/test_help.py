"""What `--help` shows beside click's own, and `launcher help`."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from jaxlaunch.launcher.cli import help
from jaxlaunch.launcher.cli.main import GROUPS
from tests.launcher.invoke import launcher
from tests.lint.documents import DOCS, PAGES, ROOT

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_help_names_the_groups_and_where_to_read_more(capsys: Capture, monkeypatch: Patch) -> None:
    text = launcher(capsys, monkeypatch, "--help").out
    assert all(f"\n{group}:\n" in text for group in GROUPS)
    assert "launcher help lists the pages (docs/index.md)" in text


def test_without_a_topic_it_lists_every_page_by_its_title(
    capsys: Capture, monkeypatch: Patch
) -> None:
    text = launcher(capsys, monkeypatch, "help").out
    assert "  quickstart " in text and "On Kubernetes" in text
    assert all(page.relative_to(DOCS).with_suffix("").as_posix() in text for page in PAGES)


@pytest.mark.parametrize("topic", ["quickstart", "quickstart.md", "docs/quickstart.md"])
def test_a_topic_is_a_page_as_it_is_written(
    topic: str, capsys: Capture, monkeypatch: Patch
) -> None:
    left = launcher(capsys, monkeypatch, "help", topic)
    assert (left.code, left.out) == (0, (DOCS / "quickstart.md").read_text().rstrip() + "\n")


@pytest.mark.parametrize(
    ("topic", "has"),
    [
        ("docs/troubleshooting.md#hangs-and-timeouts", "the compile timeout of … s passed"),
        ("job-yaml#train.mesh", "data parallel: the batch is split"),
    ],
)
def test_a_link_that_a_command_prints_is_a_topic(
    topic: str, has: str, capsys: Capture, monkeypatch: Patch
) -> None:
    text = launcher(capsys, monkeypatch, "help", topic).out
    assert has in text and len(text.splitlines()) < 80


def test_a_command_that_has_no_page_is_a_topic(capsys: Capture, monkeypatch: Patch) -> None:
    assert launcher(capsys, monkeypatch, "help", "submit").out.startswith("Usage: launcher submit ")


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        (
            "trobleshooting",
            "No page or command is called trobleshooting.\n  hint: did you mean troubleshooting?\n",
        ),
        (
            "zebra",
            "No page or command is called zebra.\n  hint: `launcher help` lists the pages.\n",
        ),
        (
            "data#nothing",
            "The page data has no section nothing.\n  hint: `launcher help data` shows the "
            "whole page.\n",
        ),
    ],
)
def test_an_unknown_topic_leaves_2_with_the_nearest(
    topic: str, said: str, capsys: Capture, monkeypatch: Patch
) -> None:
    left = launcher(capsys, monkeypatch, "help", topic)
    assert (left.code, left.out, left.err) == (2, "", said)


def test_a_comment_of_an_example_is_no_heading() -> None:
    assert help.find_section("# A\n```\n# B\n```\n## C\nd\n", "b") is None
    assert help.find_section("# A\n## B\nb\n### C\nc\n## D\n", "b") == "## B\nb\n### C\nc"


def test_an_installed_package_has_every_page(monkeypatch: Patch, tmp_path: Path) -> None:
    """`launcher help` finds them among the files of the distribution."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "data-files"
    ]
    shipped = {
        path for patterns in listed.values() for pattern in patterns for path in ROOT.glob(pattern)
    }
    assert shipped == set(PAGES)
    installed = tmp_path / "share/jaxlaunch/docs/index.md"
    installed.parent.mkdir(parents=True)
    installed.write_text("# x\n")
    file = metadata.PackagePath("../../../share/jaxlaunch/docs/index.md")
    monkeypatch.setattr(
        file, "dist", type("Dist", (), {"locate_file": staticmethod(lambda _: installed)}), False
    )
    monkeypatch.setattr(metadata, "files", lambda _: [file])
    monkeypatch.setattr(help, "__file__", str(tmp_path / "lib/launcher/cli/help.py"))
    assert help.docs_folder() == installed.parent


def test_an_installation_without_pages_says_where_they_are(
    capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(help, "docs_folder", lambda: None)
    left = launcher(capsys, monkeypatch, "help")
    assert (left.code, "docs/ of the repository" in left.err) == (2, True)
