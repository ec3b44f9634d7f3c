"""The pages of docs/ as plain text for a terminal: where they are, their titles, and one section of one."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

_LINK = re.compile(r"!?\[([^\[\]]+)\]\([^()\s]*\)")
_HEADING = re.compile(r"(#+) (.+)")
_GAP = "  "


def folder() -> Path | None:
    """The folder of the pages: the clone's, or what the package installed; None where there is none."""
    cloned = Path(__file__).resolve().parents[2] / "docs"  # `resolve`: jaxlaunch/launcher is a link
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
        return _plain(page.readline().lstrip("# ").strip())


def anchor(heading: str) -> str:
    """What a link to a heading calls it, as GitHub and the site do."""
    return re.sub(r"[^\w\- ]", "", _LINK.sub(r"\1", heading).lower()).replace(" ", "-")


def anchors(page: str) -> list[str]:
    """Those of a page's headings, in order."""
    return [anchor(heading) for _, _, heading in _headings(page)]


def section(page: str, wanted: str) -> str | None:
    """The part of a page below the heading of that anchor, up to the next heading of its level; None: no such."""
    lines, found = page.splitlines(), list(_headings(page))
    for at, (number, level, heading) in enumerate(found):
        if anchor(heading) == wanted:
            ends = (after for after, deeper, _ in found[at + 1 :] if deeper <= level)
            return "\n".join(lines[number : next(ends, len(lines))])
    return None


def _headings(page: str) -> Iterator[tuple[int, int, str]]:
    """The number of each heading's line, its level and its text; a comment in an example is none."""
    is_code = False
    for number, line in enumerate(page.splitlines()):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and (found := _HEADING.fullmatch(line)) is not None:
            yield number, len(found[1]), found[2]


def text(page: str, width: int) -> str:
    """A page in lines of `width` columns: paragraphs filled, links as their words, tables as columns if they fit."""
    return "\n".join(_rendered(page, width)).strip("\n") + "\n"


def _rendered(page: str, width: int) -> Iterator[str]:
    for kind, lines in _parts(page):
        if kind == "code":
            yield from (f"    {line}".rstrip() for line in lines)
        elif kind == "table":
            yield from _table(lines, width)
        elif kind == "text":
            yield from _filled(" ".join(map(str.strip, lines)), width, indent=len(lines[0]) - len(lines[0].lstrip()))
        else:
            yield from map(_plain, lines)
        if kind == "heading":
            yield ("=" if lines[0].startswith("# ") else "-") * len(_plain(lines[0]))


def _parts(page: str) -> Iterator[tuple[str, list[str]]]:
    """A page's lines by what they are: code, table, heading, text (a paragraph or an item of a list), blank."""
    kind, part = "", list[str]()
    for line in page.splitlines():
        is_fence = line.lstrip().startswith("```")
        if kind == "code":
            if is_fence:
                yield kind, part
                kind, part = "", []
            else:
                part.append(line)
            continue
        now = _kind(line, is_fence)
        if part and (now != kind or now in ("heading", "blank") or _begins_item(line)):
            yield kind, part
            part = []
        kind, part = now, [] if is_fence else [*part, line]
    if part:
        yield kind, part


def _kind(line: str, is_fence: bool) -> str:
    if is_fence:
        return "code"
    if not line.strip():
        return "blank"
    return "table" if line.startswith("|") else "heading" if _HEADING.fullmatch(line) else "text"


def _begins_item(line: str) -> bool:
    return re.match(r"\s*([-*]|\d+\.) ", line) is not None


def _filled(words: str, width: int, indent: int) -> list[str]:
    hang = indent + (2 if _begins_item(words) else 0)
    return textwrap.wrap(
        _plain(words),
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(lines: list[str], width: int) -> Iterator[str]:
    """In columns; where they do not fit, each row as its first cell with the others below it."""
    rows = [[_plain(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    head, rows = rows[0], rows[2:]  # the second line draws the rule
    shown = [head, *rows] if any(head) else rows
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    if sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
        for row in shown:
            yield _GAP.join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        return
    for first, *others in rows:
        yield from textwrap.wrap(first, width, subsequent_indent="  ", break_long_words=False)
        for name, cell in zip(head[1:], others, strict=True):
            if cell:
                yield from _filled(f"{name}: {cell}" if name else cell, width, indent=4)


def _plain(words: str) -> str:
    """The words without Markdown's marks: links as their text, no emphasis, no code quotes."""
    words = _LINK.sub(r"\1", words).replace("**", "").replace("\\|", "|").replace("`", "")
    return re.sub(r"^#+ ", "", words)
