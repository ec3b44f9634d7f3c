"""The places on the site of pages, their pieces, and files outside docs/ that pages link to."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from tests.website import pieces
from tests.website.pieces import Piece

_LINK = re.compile(r"(\]\()([^()\s#:]*)(#[^()\s]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


class Site:
    """The pages of the site with their pieces, and the copied files with their paths."""

    def __init__(self, docs: Path) -> None:
        self._docs = docs
        self.pages: dict[Path, list[Piece]] = {}
        self.files: dict[Path, str] = {}
        waiting = sorted(docs.rglob("*.md"))
        while waiting:
            page = waiting.pop()
            if page not in self.pages:
                text = _listing(page) if page.is_dir() else page.read_text(encoding="utf-8")
                self.pages[page] = pieces.split_page(self._path(page), text)
                self.files |= {page: f"{self._path(page)}.txt"} if page.is_file() else {}
                waiting += self._linked(page, text)

    def outside(self) -> list[dict[str, str]]:
        """Return the entries of the navigation for pages that are not in docs/."""
        pages = [
            pieces for page, pieces in self.pages.items() if not page.is_relative_to(self._docs)
        ]
        return [
            {piece.title: piece.path}
            for every in sorted(pages, key=lambda pieces: pieces[0].path)
            for piece in every
        ]

    def linked(self, source: Path, piece: Piece) -> str:
        """Return the text of a piece with links to pages, pieces and files of the site."""

        def led(link: re.Match[str]) -> str:
            target = _target(source, link[2])
            path, anchor = self._to(target, (link[3] or "").removeprefix("#"))
            return f"{link[1]}{_relative(path, piece.path)}{anchor and '#'}{anchor})"

        parts = _CODE.split(piece.text)
        return "".join(part if at % 2 else _LINK.sub(led, part) for at, part in enumerate(parts))

    def source(self, source: Path, piece: Piece) -> str | None:
        """Return the path from a piece to its source file; None for the list of a folder."""
        return _relative(self.files[source], piece.path) if source in self.files else None

    def moved(self, source: Path, piece: Piece) -> dict[str, str]:
        """Return the anchors of a split page that are on other pieces now, with their links."""
        first, *others = self.pages[source]
        path_by_anchor = (
            {}
            if piece is not first
            else {anchor: other.path for other in reversed(others) for anchor in other.anchors}
        )
        html = {
            anchor: f"{_relative(path, piece.path).removesuffix('.md')}.html#{anchor}"
            for anchor, path in path_by_anchor.items()
        }
        return {anchor: path for anchor, path in html.items() if anchor not in first.anchors}

    def _linked(self, page: Path, text: str) -> list[Path]:
        """Return the pages outside docs/ that a page links to; note other files to be copied."""
        targets = {_target(page, link[2]) for link in _LINK.finditer(_CODE.sub("", text))}
        self.files |= {
            target: self._path(target) + _shown(target)
            for target in targets
            if not _is_page(target) and target.is_file()
        }
        return [target for target in targets if _is_page(target)]

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
        piece = next((piece for piece in (*others, first) if anchor in piece.anchors), first)
        is_first = bool(piece.anchors) and piece.anchors[0] == anchor and piece is not first
        return piece.path, "" if is_first else anchor


def _shown(file: Path) -> str:
    """Return the suffix of a copied file: browsers show text, and save what they do not know."""
    return "" if file.suffix in (".svg", ".png") else ".txt"


def _is_page(path: Path) -> bool:
    """Check that a path becomes a page; the list of all changes is too long for one."""
    return path.is_dir() or path.suffix == ".md" and path.name != "CHANGELOG.md"


def _target(page: Path, link: str) -> Path:
    """Return the file or folder of a link, or the page itself if the link names none."""
    return ((page if page.is_dir() else page.parent) / link).resolve() if link else page


def _relative(path: str, start: str) -> str:
    return posixpath.relpath(path, posixpath.dirname(start) or ".")


def _listing(folder: Path) -> str:
    rows = "".join(
        f"- [{file.name}]({file.name})\n" for file in sorted(folder.iterdir()) if file.is_file()
    )
    return f"# {folder.name}\n\n{rows}"
