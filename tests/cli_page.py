"""Write docs/cli.md from the commands themselves: `python -m tests.cli_page > docs/cli.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from jaxlaunch.launcher.cli import examples
from jaxlaunch.launcher.cli.main import GROUPS, cli

_INTRODUCTION = """\
# Command line

Every command, from the program itself: `launcher COMMAND --help` prints each part of this page.
`jaxlaunch` is the package, `launcher` the command. Results go to stdout (`-o json` for scripts),
progress and diagnostics to stderr. Any key of a job can be overridden after its file:
`launcher run job.yaml train.mesh.mp=2 train.steps=100`.

| exit code of the command | meaning |
|---|---|
| 0 | success |
| 2 | the command line, the job or something else that you can fix |
| 3 | an error of the cluster |
| 124 | `--timeout` passed |
| 130 | interrupted by Ctrl-C |
| others | of `run` and `submit --wait`: the exit code of the job's [result](exit-codes.md) |
"""


def make_page() -> str:
    """Return the page: a table of all commands, then each with its arguments and options."""
    context = click.Context(cli, info_name="launcher")
    parts = [_INTRODUCTION, "| | command | |\n|---|---|---|\n" + "".join(_make_rows())]
    parts += ["\n".join(_make_section(name, context)) for name in cli.list_commands(context)]
    return "\n".join(parts)


def _make_rows() -> Iterator[str]:
    """Yield a row for each command, its group before the first one."""
    for group, commands in GROUPS.items():
        for number, (name, line) in enumerate(commands.items()):
            yield f"| {group if number == 0 else ''} | [{name}](#launcher-{name}) | {line} |\n"


def _make_section(name: str, parent: click.Context) -> Iterator[str]:
    command = cli.get_command(parent, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## launcher {name}\n\n```\nlauncher {name} {usage}\n```\n"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "") + "\n"
    yield "```sh\n" + "\n".join(examples.format_lines(examples.EXAMPLES[name])) + "\n```\n"
    records = [
        option.get_help_record(context)
        for option in command.params
        if isinstance(option, click.Option)
    ]
    if rows := [
        f"| `{_format_cell(options)}` | {_format_cell(text)} |"
        for options, text in filter(None, records)
    ]:
        yield "| option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def _format_cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    print(make_page(), end="")
