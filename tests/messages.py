"""Every text of the product that a user meets: `python -m tests.messages` prints all but the pages.

These are pages, comments of examples and of the chart's values, the help of each command, the
schema, and all strings of the sources that read as text: errors, log lines, tables.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from jaxlaunch.launcher.cli import main, schema

ROOT = Path(__file__).parents[1]
OF_CONTRIBUTORS = {"docs/architecture.md"}  # the code's own words, explained there


def prose(page: str) -> str:
    """Return the text of a page without code, sources of pictures and targets of links."""
    page = re.sub(
        r"^```.*?^```",
        lambda block: "\n" * block[0].count("\n"),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|<source [^>\n]*>", "·", page)


def texts() -> Iterator[tuple[str, str]]:
    """Yield every text without its code, by where it is written.

    `generation` and `verdict` in the sources are left out: they are words of the code too.
    """
    yield from _pages()
    yield from _comments()
    yield from (
        (name, prose(text)) for name, text in helps(main.cli, "launcher", click.Context(main.cli))
    )
    yield "launcher schema", prose(schema.job_page())
    for name, text in messages():
        yield (
            name,
            re.sub(r"\b(generation|verdict)\b|\{[^{}]*\}", "·", " ".join(prose(text).split())),
        )


def _pages() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))):
        name = path.relative_to(ROOT).as_posix()
        if name not in OF_CONTRIBUTORS:
            yield name, prose(path.read_text())


def _comments() -> Iterator[tuple[str, str]]:
    """Of the files that users copy or configure."""
    others = (ROOT / "helm/launcher/values.yaml", ROOT / "k8s/defaults.yaml")
    for path in (*sorted((ROOT / "examples").rglob("*.yaml")), *others):
        lines = (line.partition("#")[2] for line in path.read_text().splitlines())
        yield path.relative_to(ROOT).as_posix(), prose("\n".join(lines))


def helps(command: click.Command, name: str, context: click.Context) -> Iterator[tuple[str, str]]:
    """Yield the help of a command, of its options, and of its subcommands."""
    yield (
        f"{name} --help",
        "\n".join(
            [
                command.help or "",
                *(getattr(parameter, "help", "") or "" for parameter in command.params),
            ]
        ),
    )
    if isinstance(command, click.Group):
        for subcommand_name in command.list_commands(context):
            subcommand = command.get_command(context, subcommand_name)
            assert subcommand is not None
            yield from helps(subcommand, f"{name} {subcommand_name}", context)


def messages() -> Iterator[tuple[str, str]]:
    """Yield the strings of the sources that read as text, except docstrings, by file and line."""
    for file in sorted((ROOT / "jaxlaunch").rglob("*.py")):
        path, tree = file.relative_to(ROOT).as_posix(), ast.parse(file.read_text())
        blocks = [
            node.body
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        skipped = {id(body[0].value) for body in blocks if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):  # an f-string comes before its parts
            if id(node) in skipped or not isinstance(node, ast.JoinedStr | ast.Constant):
                continue
            if isinstance(node, ast.JoinedStr):
                skipped.update(map(id, node.values))
                text = "".join(map(_part, node.values))
            elif isinstance(node.value, str):
                text = node.value
            else:
                continue
            if " " in text.strip():
                yield f"{path}:{node.lineno}", text


def _part(value: ast.expr) -> str:
    """Return a part of an f-string: its text, or its expression in braces."""
    if isinstance(value, ast.FormattedValue):
        return f"{{{ast.unparse(value.value)}}}"
    return str(value.value) if isinstance(value, ast.Constant) else ""


if __name__ == "__main__":
    for place, text in (
        *helps(main.cli, "launcher", click.Context(main.cli)),
        *_comments(),
        *messages(),
    ):
        print(f"{place}: {' '.join(text.split())}")
