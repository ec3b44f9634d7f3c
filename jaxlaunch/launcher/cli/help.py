"""`launcher help`: show the pages of docs/ or one of their sections, or search them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cli.doc_search import Index, Section
from jaxlaunch.launcher.cli.main import COMMANDS
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.spelling import find_completions, find_nearest

_LINK = re.compile(r"!?\[([^\[\]]+)\]\([^()\s]*\)")
_HEADING = re.compile(r"(#+) (.+)")


@click.command("help")
@click.argument("words", metavar="[TOPIC]", nargs=-1, shell_complete=options.complete_topics)
@click.pass_context
def help_command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show a page of the documentation, list the pages, or search them.

    TOPIC is a page, a page with one of its sections (PAGE#SECTION), or a command. Any other words
    are searched for, and the sections that match best are listed.
    """
    docs = docs_folder()
    pages = {} if docs is None else list_pages(docs)
    topic = " ".join(words)
    if not topic and not pages:
        message = "The pages are not part of this installation."
        raise UserError(message, "read docs/ of the repository.")
    name, _, section = topic.removeprefix("docs/").partition("#")
    name = name.removesuffix(".md")
    if not topic:
        rows = [(name, page_title(path)) for name, path in pages.items()]
        output.show_lines(
            "launcher help TOPIC shows one of these pages, or a command; launcher help WORDS "
            "searches them:",
            "",
        )
        output.show_lines(*output.format_columns(rows, indent="  "))
    elif name in pages:
        output.show_lines(_read_page(pages[name], name, section).rstrip())
    elif name in COMMANDS:
        group = context.parent
        assert group is not None and isinstance(group.command, click.Group), (
            "help is a command of a group"
        )
        command = group.command.get_command(group, name)
        assert command is not None
        output.show_lines(command.get_help(click.Context(command, info_name=name, parent=group)))
    elif matches := [] if section else index_pages(pages).search(topic):
        rows = [
            (f"{best.name}#{best.anchor}" if best.anchor else best.name, _describe_section(best))
            for sections in matches
            for best in sections[:2]
        ]
        output.show_lines("launcher help TOPIC shows one of these sections, the best first:", "")
        output.show_lines(*output.format_columns(rows, indent="  "))
    else:
        topics = {*pages, *COMMANDS}
        suggestions = find_nearest(name, topics) or find_completions(name, sorted(topics))
        hint = "`launcher help` lists the pages."
        if suggestions:
            hint = f"did you mean {suggestions[0]}?"
        raise UserError(f"No page or command is called {name}.", hint)


def index_pages(pages: Mapping[str, Path]) -> Index:
    """Return the index of the sections of all pages."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in pages.items()}
    return Index([row for name, text in texts.items() for row in split_sections(name, text)])


def split_sections(name: str, page: str) -> Iterator[Section]:
    """Yield the text below each heading of a page, as the site's search has it."""
    lines, headings = page.splitlines(), list(list_headings(page))
    page_title = _plain(headings[0][2]) if headings else name
    starts = [start for start, _, _ in headings]
    for (start, level, heading), end in zip(headings, [*starts[1:], len(lines)], strict=True):
        anchor = make_anchor(heading) if level > 1 else ""
        text = _plain(" ".join(lines[start + 1 : end]))
        yield Section(name, page_title, _plain(heading), anchor, text)


def _plain(text: str) -> str:
    """Return a text of Markdown without the targets of its links."""
    return _LINK.sub(r"\1", text).replace("`", "")


def _describe_section(section: Section) -> str:
    return section.page if not section.anchor else f"{section.page}: {section.title}"


def _read_page(path: Path, name: str, section: str) -> str:
    page = path.read_text(encoding="utf-8")
    if not section:
        return page
    text = find_section(page, make_anchor(section))
    if text is None:
        suggestions = find_nearest(section, list_anchors(page))
        if suggestions:
            hint = f"did you mean {name}#{suggestions[0]}?"
        else:
            hint = f"`launcher help {name}` shows the whole page."
        raise UserError(f"The page {name} has no section {section}.", hint)
    return text


def docs_folder() -> Path | None:
    """Return the folder of the pages in the clone or the installation, or None."""
    clone_docs = Path(__file__).resolve().parents[3] / "docs"
    if (clone_docs / "index.md").is_file():
        return clone_docs
    for file in metadata.files("jaxlaunch") or ():
        if file.parts[-3:] == ("jaxlaunch", "docs", "index.md"):
            return Path(str(file.locate())).resolve().parent
    return None


def list_pages(docs: Path) -> dict[str, Path]:
    """Return the pages by name, such as `quickstart`."""
    paths = sorted(docs.rglob("*.md"))
    return {path.relative_to(docs).with_suffix("").as_posix(): path for path in paths}


def page_title(path: Path) -> str:
    """Return a page's first heading."""
    with path.open(encoding="utf-8") as page:
        return page.readline().lstrip("# ").strip()


def make_anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", _LINK.sub(r"\1", heading).lower()).replace(" ", "-")


def list_anchors(page: str) -> list[str]:
    """Return the anchors of a page's headings, in order."""
    return [make_anchor(heading) for _, _, heading in list_headings(page)]


def find_section(page: str, anchor: str) -> str | None:
    """Return the section of a page whose heading has an anchor, or None."""
    lines, headings = page.splitlines(), list(list_headings(page))
    for index, (start, level, heading) in enumerate(headings):
        if make_anchor(heading) == anchor:
            ends = (end for end, next_level, _ in headings[index + 1 :] if next_level <= level)
            return "\n".join(lines[start : next(ends, len(lines))])
    return None


def list_headings(page: str) -> Iterator[tuple[int, int, str]]:
    """Yield the line number, the level and the text of each heading outside of code blocks."""
    in_code_block = False
    for number, line in enumerate(page.splitlines()):
        in_code_block ^= line.lstrip().startswith("```")
        if not in_code_block and (match := _HEADING.fullmatch(line)) is not None:
            yield number, len(match[1]), match[2]
