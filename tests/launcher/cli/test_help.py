"""What `--help` shows beside click's own, and `launcher help`."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest

from jaxlaunch.launcher.cli import examples, pages
from jaxlaunch.launcher.cli.main import COMMANDS, GROUPS, cli
from tests.launcher.invoke import launcher
from tests.launcher.test_docs import DOCS, PAGES, ROOT
from tests.launcher.test_docs import anchors as anchors_of

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

LINES = [line for each in (examples.FIRST, *examples.EXAMPLES.values()) for line in each]


def test_every_command_is_in_one_group_and_has_examples() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(COMMANDS)
    assert set(examples.EXAMPLES) == set(COMMANDS)


def on_pages() -> Iterator[str]:
    """Every line that begins with `launcher`, of the blocks of README and all pages; usage lines (`[…]`) aside."""
    for page in (ROOT / "README.md", *PAGES):
        for language, block in re.findall(r"^ *```(.*)\n([^`]*)^ *```", page.read_text(), re.MULTILINE):
            if language in ("", "sh", "sh cluster", "bash"):
                lines = re.findall(r"^ *(launcher [a-z].*)", block.replace("\\\n", ""), re.MULTILINE)
                yield from (line for line in lines if " [" not in line.partition("#")[0])


@pytest.mark.parametrize("line", list(dict.fromkeys((*LINES, *on_pages()))))
def test_the_command_line_of_an_example_is_accepted(line: str) -> None:
    for command in line.partition(" | ")[0].partition(" > ")[0].split(" && "):
        program, name, *arguments = shlex.split(command, comments=True)
        found = cli.get_command(click.Context(cli), name)
        assert program == "launcher" and found is not None
        found.make_context(name, arguments)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_examples_that_fit_a_terminal(name: str, capsys: Capture, monkeypatch: Patch) -> None:
    text = launcher(capsys, monkeypatch, *filter(None, [name]), "--help").out
    shown = text[text.index("Examples:") :].splitlines()
    assert len(shown) >= 2 and max(map(len, shown)) <= 96


def test_help_names_the_groups_and_where_to_read_more(capsys: Capture, monkeypatch: Patch) -> None:
    text = launcher(capsys, monkeypatch, "--help").out
    assert all(f"\n{group}:\n" in text for group in GROUPS)
    assert "launcher help lists the pages (docs/index.md)" in text


def test_without_a_topic_it_lists_every_page_by_its_title(capsys: Capture, monkeypatch: Patch) -> None:
    text = launcher(capsys, monkeypatch, "help").out
    assert "  quickstart " in text and "On Kubernetes" in text
    assert all(page.relative_to(DOCS).with_suffix("").as_posix() in text for page in PAGES)


@pytest.mark.parametrize("topic", ["quickstart", "quickstart.md", "docs/quickstart.md"])
def test_a_topic_is_a_page_as_it_is_written(topic: str, capsys: Capture, monkeypatch: Patch) -> None:
    left = launcher(capsys, monkeypatch, "help", topic)
    assert (left.code, left.out) == (0, (DOCS / "quickstart.md").read_text().rstrip() + "\n")


@pytest.mark.parametrize(
    ("topic", "has"),
    [
        ("docs/troubleshooting.md#hangs-and-timeouts", "the compile timeout of … s passed"),
        ("job-yaml#train.mesh", "data parallel: the batch is split"),
    ],
)
def test_a_link_that_a_command_prints_is_a_topic(topic: str, has: str, capsys: Capture, monkeypatch: Patch) -> None:
    text = launcher(capsys, monkeypatch, "help", topic).out
    assert has in text and len(text.splitlines()) < 80


def test_a_command_that_has_no_page_is_a_topic(capsys: Capture, monkeypatch: Patch) -> None:
    assert launcher(capsys, monkeypatch, "help", "submit").out.startswith("Usage: launcher submit ")


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("trobleshooting", "No page or command is called trobleshooting.\n  hint: did you mean troubleshooting?\n"),
        ("zebra", "No page or command is called zebra.\n  hint: `launcher help` lists the pages.\n"),
        ("data#nothing", "The page data has no section nothing.\n  hint: `launcher help data` shows the whole page.\n"),
    ],
)
def test_an_unknown_topic_leaves_2_with_the_nearest(topic: str, said: str, capsys: Capture, monkeypatch: Patch) -> None:
    left = launcher(capsys, monkeypatch, "help", topic)
    assert (left.code, left.out, left.err) == (2, "", said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_and_section_can_be_shown(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(pages.anchors(text)) == anchors_of(page)
    assert all(pages.section(text, anchor) for anchor in pages.anchors(text))


def test_a_comment_of_an_example_is_no_heading() -> None:
    assert pages.section("# A\n```\n# B\n```\n## C\nd\n", "b") is None
    assert pages.section("# A\n## B\nb\n### C\nc\n## D\n", "b") == "## B\nb\n### C\nc"


def test_an_installed_package_has_every_page(monkeypatch: Patch, tmp_path: Path) -> None:
    """`launcher help` finds them among the files of the distribution."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    shipped = {path for patterns in listed.values() for pattern in patterns for path in ROOT.glob(pattern)}
    assert shipped == set(PAGES)
    installed = tmp_path / "share/jaxlaunch/docs/index.md"
    installed.parent.mkdir(parents=True)
    installed.write_text("# x\n")
    file = metadata.PackagePath("../../../share/jaxlaunch/docs/index.md")
    monkeypatch.setattr(file, "dist", type("Dist", (), {"locate_file": staticmethod(lambda _: installed)}), False)
    monkeypatch.setattr(metadata, "files", lambda _: [file])
    monkeypatch.setattr(pages, "__file__", str(tmp_path / "lib/launcher/cli/pages.py"))
    assert pages.folder() == installed.parent


def test_an_installation_without_pages_says_where_they_are(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pages, "folder", lambda: None)
    left = launcher(capsys, monkeypatch, "help")
    assert (left.code, "docs/ of the repository" in left.err) == (2, True)
