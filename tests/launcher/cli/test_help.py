"""`--help` and `launcher help`."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from jaxlaunch.launcher.cli import help
from jaxlaunch.launcher.cli.main import GROUPS
from tests.launcher.invoke import Launcher
from tests.lint.documents import DOCS, PAGES, ROOT
from tests.pages import read_questions

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_help_lists_groups_and_documentation(run_launcher: Launcher) -> None:
    text = run_launcher("--help").out
    assert all(f"\n{group}:\n" in text for group in GROUPS)
    assert "launcher help lists the pages (docs/index.md)" in text


def test_help_without_topic_lists_all_pages(run_launcher: Launcher) -> None:
    text = run_launcher("help").out
    assert "  quickstart " in text and "On Kubernetes" in text
    assert all(page.relative_to(DOCS).with_suffix("").as_posix() in text for page in PAGES)


@pytest.mark.parametrize("topic", ["quickstart", "quickstart.md", "docs/quickstart.md"])
def test_help_prints_page(run_launcher: Launcher, topic: str) -> None:
    result = run_launcher("help", topic)
    assert (result.code, result.out) == (0, (DOCS / "quickstart.md").read_text().rstrip() + "\n")


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("docs/troubleshooting.md#hangs-and-timeouts", "the compile timeout of … s passed"),
        ("job-yaml#train.mesh", "data parallel: the batch is split"),
    ],
)
def test_help_prints_section_of_page(run_launcher: Launcher, topic: str, expected: str) -> None:
    text = run_launcher("help", topic).out
    assert expected in text and len(text.splitlines()) < 80


def test_help_prints_usage_of_command(run_launcher: Launcher) -> None:
    assert run_launcher("help", "submit").out.startswith("Usage: launcher submit ")


@pytest.mark.parametrize(
    ("topic", "message"),
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
def test_unknown_topic_suggests_nearest(run_launcher: Launcher, topic: str, message: str) -> None:
    result = run_launcher("help", topic)
    assert (result.code, result.out, result.err) == (2, "", message)


@pytest.mark.parametrize(
    ("words", "section"),
    [
        (("out", "of", "memory"), "troubleshooting#out-of-memory"),
        (("OOM",), "troubleshooting#out-of-memory"),
        (("getting", "started"), "quickstart"),
        (("wandb",), "how-do-i#use-weights-and-biases-wandb-mlflow-or-tensorboard"),
    ],
)
def test_other_words_are_searched_for(
    run_launcher: Launcher, words: tuple[str, ...], section: str
) -> None:
    result = run_launcher("help", *words)
    introduction, _, *rows = result.out.splitlines()
    assert (result.code, "launcher help TOPIC" in introduction) == (0, True)
    assert section in [row.split()[0] for row in rows[:5]]


def test_search_answers_the_questions_of_the_site() -> None:
    index = help.index_pages(help.list_pages(DOCS))
    missed = {
        query: names
        for query, page in read_questions()
        for names in [[sections[0].name for sections in index.search(query)[:3]]]
        if page.partition("/")[0] not in names
    }
    assert missed == {}


def test_comments_in_code_blocks_are_not_headings() -> None:
    assert help.find_section("# A\n```\n# B\n```\n## C\nd\n", "b") is None
    assert help.find_section("# A\n## B\nb\n### C\nc\n## D\n", "b") == "## B\nb\n### C\nc"


def test_installed_package_contains_all_pages(monkeypatch: Patch, tmp_path: Path) -> None:
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


def test_installation_without_pages_names_repository(
    run_launcher: Launcher, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(help, "docs_folder", lambda: None)
    result = run_launcher("help")
    assert (result.code, "docs/ of the repository" in result.err) == (2, True)
