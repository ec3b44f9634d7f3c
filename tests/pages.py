"""The documentation's site: `python -m tests.pages`, which is `make docs`, builds build/site from docs/ and mkdocs.yml.

Of each page build/pages has a copy for the site. A link to a file outside docs/ leads nowhere there: its words stay, in
code where they are a path. In the place of a block of Mermaid, which needs a network to be shown, it has the drawing
that tests/drawings.py made. The generator has an environment of its own (tests/environments.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import drawings, environments

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s#:]+)[^()\s]*\)")


def text(page: Path) -> str:
    """A page's text without links that leave docs/, with its drawing."""

    def kept(link: re.Match[str]) -> str:
        is_inside = (page.parent / link[2]).resolve().is_relative_to(DOCS)
        return link[0] if is_inside else f"`{link[1]}`" if "/" in link[1] else link[1]

    def drawn(_: re.Match[str]) -> str:
        return f'<div class="drawing">{drawings.of(page).read_text(encoding="utf-8").strip()}</div>'

    return drawings.BLOCK.sub(drawn, _LINK.sub(kept, page.read_text(encoding="utf-8")))


def write(folder: Path) -> None:
    """Writes every page and the style below `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy2(DOCS / "site.css", folder)
    for page in DOCS.rglob("*.md"):
        to = folder / page.relative_to(DOCS)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text(page), encoding="utf-8")


def build() -> int:
    """Builds the site; the generator's exit code, which a dead link on a page makes 1."""
    write(ROOT / "build" / "pages")
    generate = [environments.python("docs"), "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(generate, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(build())
