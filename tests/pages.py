"""The documentation's site: `python -m tests.pages`, which is `make docs`, builds build/site from docs/ and mkdocs.yml.

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

from tests import drawings, environments
from tests.website.links import Site
from tests.website.pieces import Piece

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text(site: Site, source: Path, piece: Piece) -> str:
    """The Markdown of one page of the site: its links lead to pages of the site, its drawing is a drawing."""

    def drawn(_: re.Match[str]) -> str:
        return (
            f'<div class="drawing">{drawings.of(source).read_text(encoding="utf-8").strip()}</div>'
        )

    moved = site.moved(source, piece)
    script = (
        f'\n\n<script type="application/json" id="moved">{json.dumps(moved)}</script>\n'
        if moved
        else ""
    )
    file = site.source(source, piece)
    front = f"---\nsource: {file}\n---\n" if file else ""
    return front + drawings.BLOCK.sub(drawn, site.linked(source, piece)) + script


def nav(site: Site, entry: Any) -> Any:
    """The nav of mkdocs.yml, in which a page of several pieces is a section."""
    if isinstance(entry, list):
        return [nav(site, each) for each in entry]
    if isinstance(entry, dict):
        return {title: nav(site, below) for title, below in entry.items()}
    first, *others = site.pages[DOCS / entry]
    if others:
        return [{"Overview": first.path}, *({piece.title: piece.path} for piece in others)]
    return entry


def write(folder: Path) -> None:
    """Writes what the generator reads: pages and files in `folder`, which is emptied first, and its settings beside."""
    shutil.rmtree(folder, ignore_errors=True)
    site = Site(DOCS)
    for source, pieces in site.pages.items():
        for piece in pieces:
            to = folder / piece.path
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(text(site, source, piece), encoding="utf-8")
    for source, path in site.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / path)
    for name in ("site.css", "search.js"):
        shutil.copyfile(DOCS / "theme" / name, folder / name)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    settings["nav"] = [*nav(site, settings["nav"]), {"Project": site.outside()}]
    shutil.copytree(DOCS / "theme", folder.parent / "theme", dirs_exist_ok=True)
    (folder.parent / "mkdocs.yml").write_text(
        yaml.safe_dump(settings, sort_keys=False), encoding="utf-8"
    )


def index(site: Path) -> None:
    """Writes the search's index as a script, from the generator's: a page that is opened as a file may not fetch."""
    found = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    titles = {each["location"]: each["title"] for each in found}
    sections = [
        {
            "location": each["location"],
            "page": html.unescape(titles[each["location"].partition("#")[0]]),
            "title": html.unescape(each["title"]),
            "text": html.unescape(
                re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", each["text"]))
            ).strip(),
        }
        for each in found
    ]
    (site / "search-data.js").write_text(
        f"const SECTIONS = {json.dumps(sections)};\n", encoding="utf-8"
    )


def build(folder: Path) -> int:
    """Builds `folder`/site; the generator's exit code: 1 for a dead link on a page. Raises environments.Missing."""
    write(folder / "pages")
    generate = [environments.python("docs"), "-m", "zensical", "build", "--clean", "--strict"]
    code = subprocess.run(
        [*generate, "--config-file", folder / "mkdocs.yml"], cwd=folder
    ).returncode
    if code == 0:
        index(folder / "site")
    return code


if __name__ == "__main__":
    sys.exit(build(ROOT / "build"))
