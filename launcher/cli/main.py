"""The `launcher` command: finds its subcommands without importing them, and turns errors into exit codes.

Exit codes: 0 ok, 2 the user's to mend, 3 the cluster's, 124 waited too long, 130 interrupted; `run` and `submit --wait`
leave with the verdict's own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import click

from launcher.errors import UserError

INTERRUPTED = 130

# Command -> where it lies, and what --help says of it. Importing them all would take --help half a second.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "delete": ("launcher.cli.delete:delete_command", "Delete job NAME."),
    "doctor": ("launcher.cli.doctor:doctor_command", "Check that the cluster can run JOB, or any job."),
    "explain": ("launcher.cli.explain:explain_command", "Say why job NAME waits, what it does, or how it ended."),
    "export": ("launcher.cli.export:export_command", "Write a checkpoint of RUN as a Hugging Face folder."),
    "init": ("launcher.cli.init:init", "Write a starter job.yaml."),
    "list": ("launcher.cli.list:list_command", "List the jobs that launcher submitted."),
    "logs": ("launcher.cli.logs:logs_command", "Print what job NAME writes."),
    "plan": ("launcher.cli.plan:plan_command", "Say what JOB will hold, and whether it fits."),
    "profile": ("launcher.cli.profile:profile_command", "Say what the steps of RUN spend their time on."),
    "render": ("launcher.cli.render:render", "Print JOB as Kubernetes manifests."),
    "run": ("launcher.cli.run:run", "Train JOB on this machine."),
    "schema": ("launcher.cli.schema:schema", "Print the JSON schema of job.yaml."),
    "status": ("launcher.cli.status:status_command", "Show how job NAME stands."),
    "stop": ("launcher.cli.stop:stop_command", "Save and end job NAME."),
    "submit": ("launcher.cli.submit:submit", "Run JOB on a cluster."),
    "validate": ("launcher.cli.validate:validate", "Check JOB, and say what it asks for."),
}


class Commands(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            import difflib  # only here: --help need not wait for it

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxlaunch", prog_name="launcher")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """One job.yaml, from a laptop to a pod slice: train with JAX on one host or many."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def main() -> NoReturn:
    """Runs the command line and exits. An error that nobody can mend keeps its traceback: it is our bug."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without × must not end a run
    try:
        code = cli.main(prog_name="launcher", standalone_mode=False)
    except UserError as error:
        click.echo(str(error), err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
