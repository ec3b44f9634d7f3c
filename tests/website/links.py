"""Where everything is on the site: pages, their pieces, and the files outside docs/ that pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from tests.website import pieces
from tests.website.pieces import Piece

_LINK = re.compile(r"(\]\()([^()\s#:]*)(#[^()\s]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


class Site:
    """The pages of the site with their pieces, and the files that are copied, each with its path there."""

    def __init__(self, docs: Path) -> None:
        self._docs = docs
        self.pages: dict[Path, list[Piece]] = {}
        self.files: dict[Path, str] = {}
        waiting = sorted(docs.rglob("*.md"))
        while waiting:
            page = waiting.pop()
            if page not in self.pages:
                text = _listing(page) if page.is_dir() else page.read_text(encoding="utf-8")
                self.pages[page] = pieces.of(self._path(page), text)
                self.files |= {page: f"{self._path(page)}.txt"} if page.is_file() else {}
                waiting += self._linked(page, text)

    def outside(self) -> list[dict[str, str]]:
        """The nav's entries for the pages that are not in docs/."""
        found = [
            pieces for page, pieces in self.pages.items() if not page.is_relative_to(self._docs)
        ]
        return [
            {piece.title: piece.path}
            for every in sorted(found, key=lambda each: each[0].path)
            for piece in every
        ]

    def linked(self, source: Path, piece: Piece) -> str:
        """A piece's text with links to pages, pieces and files of the site."""

        def led(link: re.Match[str]) -> str:
            target = _target(source, link[2])
            path, anchor = self._to(target, (link[3] or "").removeprefix("#"))
            return f"{link[1]}{_relative(path, piece.path)}{anchor and '#'}{anchor})"

        parts = _CODE.split(piece.text)
        return "".join(part if at % 2 else _LINK.sub(led, part) for at, part in enumerate(parts))

    def source(self, source: Path, piece: Piece) -> str | None:
        """The path from a piece to the file that it is from; None for the list of a folder."""
        return _relative(self.files[source], piece.path) if source in self.files else None

    def moved(self, source: Path, piece: Piece) -> dict[str, str]:
        """For the own page of several: its anchors that are on other pieces now, each with where."""
        first, *others = self.pages[source]
        found = (
            {}
            if piece is not first
            else {each: other.path for other in reversed(others) for each in other.anchors}
        )
        html = {
            each: f"{_relative(path, piece.path).removesuffix('.md')}.html#{each}"
            for each, path in found.items()
        }
        return {each: path for each, path in html.items() if each not in first.anchors}

    def _linked(self, page: Path, text: str) -> list[Path]:
        """Pages outside docs/ that a page links to; other files are noted to be copied."""
        found = {_target(page, link[2]) for link in _LINK.finditer(_CODE.sub("", text))}
        self.files |= {
            each: self._path(each) + _shown(each)
            for each in found
            if not _is_page(each) and each.is_file()
        }
        return [each for each in found if _is_page(each)]

    def _path(self, page: Path) -> str:
        if page.is_relative_to(self._docs):
            return page.relative_to(self._docs).as_posix()
        name = page.relative_to(self._docs.parent).as_posix()
        return "project/" + (
            f"{name.removesuffix('.md').lower().replace('/', '-')}.md" if _is_page(page) else name
        )

    def _to(self, target: Path, anchor: str) -> tuple[str, str]:
        if target not in self.pages:
            return self.files[target], ""
        first, *others = self.pages[target]
        piece = next((each for each in (*others, first) if anchor in each.anchors), first)
        is_first = bool(piece.anchors) and piece.anchors[0] == anchor and piece is not first
        return piece.path, "" if is_first else anchor


def _shown(file: Path) -> str:
    """What a file's name gets behind it: browsers show text, and save what they do not know."""
    return "" if file.suffix in (".svg", ".png") else ".txt"


def _is_page(path: Path) -> bool:
    """Whether it becomes a page. The list of all changes is too long for one, and is text anyway."""
    return path.is_dir() or path.suffix == ".md" and path.name != "CHANGELOG.md"


def _target(page: Path, link: str) -> Path:
    """The file or folder that a link names; the page itself where it names none."""
    return ((page if page.is_dir() else page.parent) / link).resolve() if link else page


def _relative(path: str, start: str) -> str:
    return posixpath.relpath(path, posixpath.dirname(start) or ".")


def _listing(folder: Path) -> str:
    rows = "".join(
        f"- [{each.name}]({each.name})\n" for each in sorted(folder.iterdir()) if each.is_file()
    )
    return f"# {folder.name}\n\n{rows}"
