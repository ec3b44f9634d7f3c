"""Build the documentation's site in build/site: `python -m tests.pages` (`make docs`).

build/pages has what the generator reads. Long pages are cut in pieces there
(tests/website/pieces.py), and files outside docs/ that a page links to are on the site too: those
in Markdown as pages, others as they are. In the place of a block of Mermaid, which needs a network
to be shown, a page has the drawing that tests/drawings.py made. Afterwards the index of the search
is written. The generator has an environment of its own (tests/environments.py).
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from jaxlaunch.launcher.cli import doc_search
from tests import drawings, environments
from tests.website.links import Site
from tests.website.pieces import Piece

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def page_text(site: Site, source: Path, piece: Piece) -> str:
    """Return the Markdown of one page of the site, with the site's links and drawings."""

    def drawn(_: re.Match[str]) -> str:
        svg = drawings.drawing_path(source).read_text(encoding="utf-8").strip()
        return f'<div class="drawing">{svg}</div>'

    moved = site.moved(source, piece)
    script = (
        f'\n\n<script type="application/json" id="moved">{json.dumps(moved)}</script>\n'
        if moved
        else ""
    )
    file = site.source(source, piece)
    front = f"---\nsource: {file}\n---\n" if file else ""
    return front + drawings.BLOCK.sub(drawn, site.linked(source, piece)) + script


def make_nav(site: Site, entry: Any) -> Any:
    """Return the nav of mkdocs.yml, in which a page of several pieces is a section."""
    if isinstance(entry, list):
        return [make_nav(site, item) for item in entry]
    if isinstance(entry, dict):
        return {title: make_nav(site, below) for title, below in entry.items()}
    first, *other_pieces = site.pages[DOCS / entry]
    if other_pieces:
        return [{"Overview": first.path}, *({piece.title: piece.path} for piece in other_pieces)]
    return entry


def write_pages(folder: Path) -> None:
    """Write what the generator reads: pages and files in `folder`, and its settings next to it."""
    shutil.rmtree(folder, ignore_errors=True)
    site = Site(DOCS)
    for source, pieces in site.pages.items():
        for piece in pieces:
            to = folder / piece.path
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(page_text(site, source, piece), encoding="utf-8")
    for source, path in site.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / path)
    for name in ("site.css", "search.js"):
        shutil.copyfile(DOCS / "theme" / name, folder / name)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    settings["nav"] = [*make_nav(site, settings["nav"]), {"Project": site.outside()}]
    shutil.copytree(DOCS / "theme", folder.parent / "theme", dirs_exist_ok=True)
    (folder.parent / "mkdocs.yml").write_text(
        yaml.safe_dump(settings, sort_keys=False), encoding="utf-8"
    )


def write_index(site: Path) -> None:
    """Write the search's index as a script: a page that is opened as a file may not fetch."""
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    titles = {item["location"]: item["title"] for item in items}
    sections = [
        {
            "location": item["location"],
            "page": html.unescape(titles[item["location"].partition("#")[0]]),
            "title": html.unescape(item["title"]),
            "text": html.unescape(
                re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", item["text"]))
            ).strip(),
        }
        for item in items
    ]
    tables = {
        "SECTIONS": sections,
        "LEFT_OUT": sorted(doc_search.LEFT_OUT),
        "SYNONYMS": doc_search.SYNONYMS,
        "PAGE_FACTORS": doc_search.PAGE_FACTORS,
    }
    script = "".join(f"const {name} = {json.dumps(table)};\n" for name, table in tables.items())
    (site / "search-data.js").write_text(script, encoding="utf-8")


def read_questions() -> list[list[str]]:
    """Return what people ask, and the page of the site that answers it."""
    text = (ROOT / "tests/site/questions.txt").read_text(encoding="utf-8")
    return [line.split(" -> ") for line in text.splitlines() if " -> " in line]


def build_site(folder: Path) -> int:
    """Build `folder`/site; return the generator's exit code, 1 for a dead link. Raises Missing."""
    write_pages(folder / "pages")
    generate = [environments.find_python("docs"), "-m", "zensical", "build", "--clean", "--strict"]
    code = subprocess.run(
        [*generate, "--config-file", folder / "mkdocs.yml"], cwd=folder
    ).returncode
    if code == 0:
        write_index(folder / "site")
    return code


if __name__ == "__main__":
    sys.exit(build_site(ROOT / "build"))
