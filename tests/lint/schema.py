"""The schema of job.yaml and the command line: keys and commands are explained, examples valid."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import click
import yaml

from jaxlaunch.launcher.cli import examples, schema
from jaxlaunch.launcher.cli.main import COMMANDS, GROUPS, cli
from jaxlaunch.launcher.job import introspection, load
from jaxlaunch.launcher.job.schema import JobSpec
from tests.lint.documents import PAGES, ROOT

# What an example of a block leaves out of a job.
REST = {
    "name": "x",
    "image": "registry.example/train:1.4",
    "accelerator": {"type": "cpu", "per_host": 8},
}


def sections() -> dict[str, str]:
    """Return the sections of the schema's page by their titles."""
    return {part.partition("\n")[0]: part for part in schema.job_page().split("\n## ")[1:]}


def find_unexplained_keys() -> Iterator[str]:
    page = schema.job_page()
    for path, field in introspection.walk_fields(JobSpec):
        if not field.description or field.description.endswith(".") or f"`{path[-1]}`" not in page:
            yield f"{path}: {field.description}"
    for title, section in sections().items():
        if not section.split("\n")[2].endswith("."):
            yield f"section {title} does not begin with a sentence"
    rows = [re.split(r"(?<!\\)\|", line) for line in page.splitlines() if line.startswith("| `")]
    yield from (
        f"a row without a default or a meaning: {row}"
        for row in rows
        if not (row[3].strip() and row[4].strip())
    )
    if "train.model.rope_scaling" not in sections():
        yield "a block of several kinds is called by one of them"


def find_wrong_examples_of_blocks() -> Iterator[str]:
    for title, section in sections().items():
        texts = re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if len(texts) != 1 or "# " not in texts[0] or len(texts[0].splitlines()) > 14:
            yield (
                f"{title}: give its docstring one annotated example of at most 14 lines, in a "
                "fence of yaml"
            )
            continue
        part = yaml.safe_load(texts[0])
        rest: dict[str, Any] = (
            {}
            if {"train", "command", "jobs"} & part.keys()
            else {"command": ["python", "train.py"]}
        )
        try:
            load.read_job_text(yaml.safe_dump({**REST, **rest, **part}), may_have_roles=True)
        except Exception as error:
            yield f"{title}: {error}"
        if title != "job" and not _is_of_section(part, title):
            yield f"{title}: its example is not of this section"


def _is_of_section(part: Any, title: str) -> bool:
    path, _, kind = title.partition(", ")
    for key in path.split("."):
        part = part[key]
    if isinstance(part, list):
        part = part[0]
    elif path in ("secrets", "train.data.parts", "jobs"):
        part = next(iter(part.values()))
    key, _, value = kind.partition(": ")
    is_named = value and value != "module:Name" and "preset" not in part
    return bool(part[key] == value if is_named else not key or value or key in part)


def find_commands_without_examples() -> Iterator[str]:
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(COMMANDS):
        yield "not every command is in one group"
    yield from set(examples.EXAMPLES) ^ set(COMMANDS)


def command_lines() -> Iterator[str]:
    """Yield the lines of examples and pages that begin with `launcher`, except usage lines."""
    for lines in (examples.FIRST_EXAMPLES, *examples.EXAMPLES.values()):
        yield from lines
    for page in (ROOT / "README.md", *PAGES):
        for language, block in re.findall(
            r"^ *```(.*)\n([^`]*)^ *```", page.read_text(), re.MULTILINE
        ):
            if language in ("", "sh", "sh cluster", "bash"):
                commands = re.findall(
                    r"^ *(launcher [a-z].*)", block.replace("\\\n", ""), re.MULTILINE
                )
                yield from (line for line in commands if " [" not in line.partition("#")[0])


def find_command_lines_that_are_not_accepted() -> Iterator[str]:
    for line in dict.fromkeys(command_lines()):
        for text in line.partition(" | ")[0].partition(" > ")[0].split(" && "):
            program, name, *arguments = shlex.split(text, comments=True)
            command = cli.get_command(click.Context(cli), name)
            if program != "launcher" or command is None:
                yield f"{line}: there is no such command"
                continue
            try:
                command.make_context(name, arguments)
            except click.ClickException as error:
                yield f"{line}: {error.format_message()}"


def find_help_that_is_too_wide() -> Iterator[str]:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        text = command.get_help(
            click.Context(command, info_name=name, parent=click.Context(cli, info_name="launcher"))
        )
        lines = text[text.find("Examples:") :].splitlines()
        if "Examples:" not in text or len(lines) < 2 or max(map(len, lines)) > 96:
            yield f"launcher {name} --help: its examples are missing, or wider than 96 columns"


def find_pages_that_are_not_installed() -> Iterator[str]:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "data-files"
    ]
    shipped = {
        path for patterns in listed.values() for pattern in patterns for path in ROOT.glob(pattern)
    }
    yield from (f"{path.relative_to(ROOT)}" for path in shipped ^ set(PAGES))
