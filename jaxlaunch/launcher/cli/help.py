"""`launcher help`: the pages of the documentation in the terminal."""

from __future__ import annotations

from pathlib import Path

import click

from jaxlaunch.launcher.cli import completions, output, pages
from jaxlaunch.launcher.cli.main import COMMANDS
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.spelling import in_full, nearest


@click.command("help")
@click.argument("topic", required=False, shell_complete=completions.topics)
@click.pass_context
def help_command(context: click.Context, topic: str | None) -> None:
    """Show a page of the documentation, or list them.

    TOPIC is a page, a page with one of its sections (PAGE#SECTION), or a command.
    """
    docs = pages.folder()
    known = {} if docs is None else pages.names(docs)
    if topic is None:
        output.show(*_listed(known))
        return
    name, _, wanted = topic.removeprefix("docs/").partition("#")
    name = name.removesuffix(".md")
    if name in known:
        output.show(_part(known[name], name, wanted).rstrip())
    elif name in COMMANDS:
        _show_command(context, name)
    else:
        choices = {*known, *COMMANDS}
        near = nearest(name, choices) or in_full(name, sorted(choices))
        hint = f"did you mean {near[0]}?" if near else "`launcher help` lists the pages."
        raise UserError(f"No page or command is called {name}.", hint)


def _listed(known: dict[str, Path]) -> list[str]:
    if not known:
        raise UserError("The pages are not part of this installation.", "read docs/ of the repository.")
    rows = [(name, pages.title(path)) for name, path in known.items()]
    return ["launcher help TOPIC shows one of these pages, or a command:", "", *output.columns(rows, indent="  ")]


def _part(path: Path, name: str, wanted: str) -> str:
    """The page, or the section of it. Raises UserError for a section that it does not have."""
    page = path.read_text(encoding="utf-8")
    if not wanted:
        return page
    found = pages.section(page, pages.anchor(wanted))
    if found is None:
        near = nearest(wanted, pages.anchors(page))
        hint = f"did you mean {name}#{near[0]}?" if near else f"`launcher help {name}` shows the whole page."
        raise UserError(f"The page {name} has no section {wanted}.", hint)
    return found


def _show_command(context: click.Context, name: str) -> None:
    group = context.parent
    assert group is not None and isinstance(group.command, click.Group), "this command is one of a group"
    command = group.command.get_command(group, name)
    assert command is not None
    output.show(command.get_help(click.Context(command, info_name=name, parent=group)))
