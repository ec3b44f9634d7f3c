"""The pages as their site takes them: `python -m tests.pages build/pages` copies docs/ for `make docs`.

A link to a file outside docs/ leads nowhere on the site: its words stay, in code where they are a path.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s#:]+)[^()\s]*\)")


def text(page: Path) -> str:
    """A page's text without links that leave docs/."""

    def kept(link: re.Match[str]) -> str:
        is_inside = (page.parent / link[2]).resolve().is_relative_to(DOCS)
        return link[0] if is_inside else f"`{link[1]}`" if "/" in link[1] else link[1]

    return _LINK.sub(kept, page.read_text(encoding="utf-8"))


def write(folder: Path) -> None:
    """Writes every page below `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in DOCS.rglob("*.md"):
        to = folder / page.relative_to(DOCS)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text(page), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
