"""The documentation holds together: pages are on the site and reachable, links lead somewhere, jobs are valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch import contract
from jaxlaunch.launcher.agent.host.environment import TRAINER
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.local import trainer_process
from tests import cli_page, drawings
from tests.launcher.invoke import launcher

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "helm/launcher/README.md", *PAGES]
_FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


# What people type into the search of the site, which looks through the words of all pages.
SEARCHED = (
    *("timeout", "tensor parallel", "mixed precision", "gradient checkpointing", "torchrun"),
    *("OOM", "NCCL", "multislice", "preemption", "root cause"),
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files and the anchors that a page's relative links name; examples in code are no links."""
    text = re.sub(r"`[^`\n]*`", "`code`", _FENCED.sub("", page.read_text(encoding="utf-8")))
    for target in _LINK.findall(text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield ((page.parent / path).resolve() if path else page), anchor


def anchors(page: Path) -> set[str]:
    """Those that its headings have, by the rule that GitHub and Python-Markdown share for our headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def listed(nav: Any) -> Iterator[str]:
    """The pages of a nav, however deep."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(entry)


@pytest.mark.parametrize("words", SEARCHED)
def test_a_search_finds_the_words_of_the_field(words: str) -> None:
    assert any(words.lower() in page.read_text(encoding="utf-8").lower() for page in PAGES)


@pytest.mark.parametrize("page", READ, ids=name)
def test_every_link_leads_to_a_file_and_its_heading(page: Path) -> None:
    for path, anchor in links(page):
        assert path.exists(), f"{name(page)} links to {path}, which does not exist"
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), f"{name(page)}: {path.name}#{anchor}"


def test_every_block_of_code_is_one_on_the_site_too() -> None:
    """Of a language in two words (`sh cluster`) the site makes no block; GitHub does."""
    words = re.compile(r"^ *```\S+ +\S.*", re.MULTILINE)
    assert {name(page): found for page in PAGES if (found := words.findall(page.read_text()))} == {}


def test_every_page_is_on_the_site_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/name:", "")
    nav = list(listed(yaml.safe_load(text)["nav"]))
    assert sorted(nav) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_page_can_be_reached_from_another() -> None:
    reached = {path for page in PAGES for path, _ in links(page) if path != page}
    assert [name(page) for page in PAGES if page not in reached and page != DOCS / "index.md"] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_page_leads_to_another(page: Path) -> None:
    assert any(path != page for path, _ in links(page))


def test_the_first_page_lists_all_but_the_runbooks() -> None:
    listed = {path for path, _ in links(DOCS / "index.md")}
    assert [name(page) for page in DOCS.glob("*.md") if page not in listed and page.stem != "index"] == []


def test_every_drawing_on_the_site_is_that_of_its_page() -> None:
    """When it is not: python -m tests.drawings"""
    assert [name(page) for page, source in drawings.sources() if not drawings.is_current(page, source)] == []
    assert [name(page) for page in PAGES if len(drawings.BLOCK.findall(page.read_text(encoding="utf-8"))) > 1] == []


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    """When it is not: python -m tests.cli_page > docs/cli.md"""
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == cli_page.markdown()


def test_every_exit_code_is_listed_with_its_cause_and_what_follows() -> None:
    then = {
        contract.Action.COMPLETE: "the job is complete",
        contract.Action.FAIL: "the job fails",
        contract.Action.RESTART: "restarts with new pods; counts",
        contract.Action.RESTART_UNCHARGED: "restarts with new pods; does not count toward `restarts.crash`",
    }
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (DOCS / "exit-codes.md").read_text().splitlines()
        if re.match(r"\| \d", line)
    ]
    known = [(str(one.code), f"`{one.cause}`", then[one.action]) for one in contract.OUTCOMES.values()]
    assert [(row[0], row[1], row[4]) for row in rows] == known
    places = {one.code: "yes" if one.in_place else "no" for one in contract.OUTCOMES.values()} | {contract.DONE: ""}
    assert {int(row[0]): row[3] for row in rows} == places


def test_the_page_of_the_environment_names_variables_and_phases_that_there_are() -> None:
    text = (DOCS / "environment.md").read_text()
    known = {value for value in vars(contract).values() if isinstance(value, str)}
    named = set(re.findall(r"`(JAX(?:LAUNCH)?_[A-Z_]+[A-Z])`", text)) - {"JAX_PLATFORMS", "JAX_OPTIMIZATION_LEVEL"}
    assert all(f"`{name}`" in text for of_platform in TRAINER.values() for name in of_platform)
    assert named and named <= known
    assert all(f"`{phase}`" in text for phase in contract.PHASES)


def jobs() -> Iterator[tuple[str, str]]:
    """Every whole job that a page shows, beside where."""
    for page in (ROOT / "README.md", *PAGES):
        for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)):
            if re.search(r"^name: ", block, re.MULTILINE) and re.search(r"^accelerator: ", block, re.MULTILINE):
                yield f"{name(page)}, yaml {number}", block


@pytest.mark.extended
@pytest.mark.parametrize("command", ["validate", "plan"])
def test_the_first_cluster_job_on_tpus_fits_as_its_page_says(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That on GPUs: tests/gang/test_tutorial.py."""
    page = (DOCS / "first-cluster-job.md").read_text()
    (tmp_path / "job.yaml").write_text(re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])
    assert f"launcher {command} job.yaml" in page
    assert launcher(capsys, monkeypatch, command, str(tmp_path / "job.yaml")).code == 0


@pytest.mark.parametrize("job", [pytest.param(text, id=where) for where, text in jobs()])
def test_every_job_on_a_page_is_valid(job: str) -> None:
    assert load.parse(job).name


@pytest.mark.extended
@pytest.mark.parametrize("job", [pytest.param(text, id=where) for where, text in jobs()])
def test_every_job_on_a_page_can_be_planned(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that needs no trainer: what a job lacks for a cluster is a note, and an error with --cluster."""
    monkeypatch.setattr(trainer_process, "is_installed", lambda: False)
    (tmp_path / "job.yaml").write_text(job)
    done = launcher(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"))
    assert done.code == 0
    required = launcher(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"), "--cluster")
    assert required.code == (2 if "note: on a cluster: " in done.out else 0)
