"""The built site in a real browser, from files: its search, page lengths and links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch.launcher.cli import help as documentation
from tests import pages
from tests.launcher.report import browser
from tests.website import pieces

pytestmark = [
    pytest.mark.skipif(not browser.is_here(), reason="there is no chromium"),
    pytest.mark.extended,
]

TALLEST = 15_000  # px, on a screen of 400 px


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    assert pages.build_site(folder) == 0
    return folder / "site"


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Page]:
    with browser.page() as opened:
        yield opened


def found(chromium: browser.Page, query: str) -> list[str]:
    """The pages that the open search lists, best first."""
    addresses = chromium.value(
        "(() => { const field = document.querySelector('#search input'); field.value = "
        f"{json.dumps(query)};"
        " field.dispatchEvent(new Event('input'));"
        " return [...document.querySelectorAll('#search a:not(.within)')].map((each) => "
        "each.href); })()"
    )
    return [address.partition("/site/")[2].partition(".html")[0] for address in addresses]


def test_the_search_finds_the_page_of_a_question_among_the_first_three(
    chromium: browser.Page, site: Path
) -> None:
    asked = pages.read_questions()
    chromium.open(
        (site / "job-yaml" / "train.html").as_uri()
    )  # of a folder below: links have to find their way up
    chromium.value(
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))"
    )
    chromium.until("document.querySelector('#search[open]') !== null")
    missed = {
        query: found(chromium, query)[:4]
        for query, page in asked
        if page not in found(chromium, query)[:3]
    }
    assert len(asked) >= 115 and missed == {}
    assert found(chromium, "zebra") == [] and chromium.value(
        "document.querySelector('#search p').textContent"
    )
    whole = re.compile(r"\bs[hH]{2}\b|ssh\b", re.IGNORECASE)
    texts = {page: (site / f"{page}.html").read_text() for page in found(chromium, "ssh")}
    assert [
        page for page, text in texts.items() if not whole.search(text)
    ] == []  # not `SetupFailed` or `sshare`
    found(chromium, "time limit")
    first = chromium.value("document.querySelector('#search a').href")
    assert first == f"{(site / 'how-do-i.html').as_uri()}#set-a-time-limit-stop-or-cancel-a-job"
    assert chromium.errors == []


def test_no_page_is_endless_on_a_phone_and_nothing_is_asked_of_a_network(
    chromium: browser.Page, site: Path
) -> None:
    """The longest texts are measured: others are a fraction of them."""
    every = sorted(
        site.rglob("*.html"),
        key=lambda page: len(re.sub(r"<nav.*?</nav>", "", page.read_text(), flags=re.S)),
    )
    heights = {}
    for page in every[-12:]:
        chromium.open(page.as_uri(), 400)
        heights[page.name] = chromium.value("document.documentElement.scrollHeight")
    assert {name: height for name, height in heights.items() if height > TALLEST} == {}
    assert [url for url in chromium.requests if not url.startswith(("file:", "data:"))] == []


def test_anchors_of_a_page_that_was_split_lead_to_its_pieces(
    chromium: browser.Page, site: Path
) -> None:
    chromium.open((site / "troubleshooting.html").as_uri() + "#hangs-in-nccl")
    chromium.until("location.pathname.endsWith('/troubleshooting/devices-hosts-and-hangs.html')")
    assert chromium.value("document.querySelector(location.hash).textContent").startswith(
        "Hangs in NCCL"
    )
    for name in pieces.SPLIT:
        if (source := pages.DOCS / name).exists():
            parts = [site / piece.path for piece in pieces.split_page(name, source.read_text())]
            html = "".join(part.with_suffix(".html").read_text() for part in parts)
            assert [
                anchor
                for anchor in documentation.list_anchors(source.read_text())
                if f'id="{anchor}"' not in html
            ] == []


def test_a_page_leads_to_its_neighbours_and_its_source_and_files_outside_docs_are_there(
    site: Path,
) -> None:
    text = (site / "job-yaml" / "train-mesh.html").read_text()
    assert 'href="../job-yaml.md.txt">Source<' in text and (site / "job-yaml.md.txt").is_file()
    assert 'rel="prev"' in text and 'rel="next"' in text
    assert (site / "project" / "helm-launcher-readme.html").is_file()
    assert (site / "project" / "examples" / "digits.yaml.txt").read_text().count("name: digits")
    links = {
        (page.parent / link).resolve()
        for page in site.rglob("*.html")
        if page.name != "404.html"  # its links are absolute, since it stands for any address
        for link in re.findall(r'href="([^":#?]+)["#]', page.read_text())
    }
    assert [link for link in links if not link.exists()] == []
