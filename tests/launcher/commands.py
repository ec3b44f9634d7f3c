"""Commands that the product proposes: whether the command line accepts them as printed."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlaunch.launcher.cli.main import cli


def parse_command(words: Sequence[str]) -> None:
    """Parse a command without running it. Raises click.UsageError for a wrong one."""
    program, *arguments = words
    assert program in ("launcher", "kubectl"), words
    assert not {"NAME", "JOB_FILE", "NAMESPACE", "POD", "NODE"} & set(arguments), words
    assert "" not in arguments, words
    if program == "launcher":
        context = cli.make_context("launcher", list(arguments))
        name, command, rest = cli.resolve_command(context, list(arguments))
        assert command is not None
        command.make_context(name, rest, parent=context)
