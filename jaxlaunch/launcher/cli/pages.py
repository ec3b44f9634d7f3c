"""The pages of docs/, which are plain text: where they are, their titles, and one section of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

_LINK = re.compile(r"!?\[([^\[\]]+)\]\([^()\s]*\)")
_HEADING = re.compile(r"(#+) (.+)")


def folder() -> Path | None:
    """The folder of the pages: the clone's, or what the package installed; None where there is none."""
    cloned = Path(__file__).resolve().parents[3] / "docs"
    if (cloned / "index.md").is_file():
        return cloned
    for file in metadata.files("jaxlaunch") or ():
        if file.parts[-3:] == ("jaxlaunch", "docs", "index.md"):
            return Path(str(file.locate())).resolve().parent
    return None


def names(docs: Path) -> dict[str, Path]:
    """The pages by the name that `launcher help` takes: `quickstart`, `runbooks/JaxlaunchHang`."""
    return {path.relative_to(docs).with_suffix("").as_posix(): path for path in sorted(docs.rglob("*.md"))}


def title(path: Path) -> str:
    """A page's first heading."""
    with path.open(encoding="utf-8") as page:
        return page.readline().lstrip("# ").strip()


def anchor(heading: str) -> str:
    """What a link to a heading calls it, as GitHub and the site do."""
    return re.sub(r"[^\w\- ]", "", _LINK.sub(r"\1", heading).lower()).replace(" ", "-")


def anchors(page: str) -> list[str]:
    """The anchors of a page's headings, in order."""
    return [anchor(heading) for _, _, heading in headings(page)]


def section(page: str, wanted: str) -> str | None:
    """The part of a page below the heading of that anchor, up to the next heading of its level; None: no such."""
    lines, found = page.splitlines(), list(headings(page))
    for at, (number, level, heading) in enumerate(found):
        if anchor(heading) == wanted:
            ends = (after for after, deeper, _ in found[at + 1 :] if deeper <= level)
            return "\n".join(lines[number : next(ends, len(lines))])
    return None


def headings(page: str) -> Iterator[tuple[int, int, str]]:
    """The number of each heading's line, its level and its text; a comment in an example is none."""
    is_code = False
    for number, line in enumerate(page.splitlines()):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and (found := _HEADING.fullmatch(line)) is not None:
            yield number, len(found[1]), found[2]
