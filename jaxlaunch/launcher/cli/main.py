"""The `launcher` command: imports a subcommand when it is called, and maps errors to exit codes.

Exit codes: 0 success, 2 an error that the user can fix, 3 an error of the cluster, 124 timeout, 130
interrupted; `run` and `submit --wait` exit with the code of the job's result.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

import click

from jaxlaunch.launcher.cli import examples
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.wording import escape_controls

INTERRUPTED = 130
READ_MORE = (
    "launcher COMMAND --help has more examples, launcher help lists the pages (docs/index.md)."
)

# The groups of --help, with the commands and their lines, in the order in which a user needs them.
# Command NAME is the function NAME_command of the module with its name, or of that in MODULES. The
# function has _ for -.
# Importing all modules would delay --help by half a second.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "Write a job": {
        "init": "Write a starter job.yaml.",
        "data": "Show the contents of PATH, and the data block that reads it.",
        "validate": "Check JOB_FILE, and show what it requests.",
        "model": "Compare the architecture of FOLDER with PyTorch.",
        "plan": "Estimate the memory that JOB_FILE needs, and whether it fits.",
        "tune": "Find the fastest settings of JOB_FILE that fit its devices.",
        "prepare": "Pack the data of JOB_FILE, once: text, images or a table.",
    },
    "Run it on this machine": {
        "run": "Train JOB_FILE on this machine.",
        "sweep": "Run JOB_FILE with several values of its keys.",
    },
    "Run it on a cluster": {
        "doctor": "Check that the cluster can run JOB_FILE, or any job.",
        "render": "Print JOB_FILE as Kubernetes manifests, or as a batch script for Slurm.",
        "submit": "Submit JOB_FILE to a cluster.",
        "stop": "Stop job JOB_NAME, or a run here, after it has saved.",
        "delete": "Delete job JOB_NAME, or a run here with its folder.",
    },
    "See what it does": {
        "list": "List the runs here, and the jobs that launcher submitted.",
        "status": "Show the state of job JOB_NAME, or of a run here.",
        "explain": "Explain why job JOB_NAME waits, what it does, or how it ended.",
        "bundle": "Write all information about job JOB_NAME, or a run here, to an archive.",
        "logs": "Print the logs of job JOB_NAME, or of a run here.",
        "profile": "Profile the next steps of RUN.",
        "report": "Write the page of RUN: one HTML file.",
        "compare": "Compare RUNS: the differences between their jobs, and their curves.",
        "dashboard": "Serve the pages of all runs of FOLDER while they train.",
    },
    "Look inside": {
        "exec": "Run COMMAND next to a rank of job JOB_NAME, or of a run here.",
        "shell": "Open a shell next to a rank of job JOB_NAME, or of a run here.",
        "copy": "Copy a file or a folder from a rank's pod, or into it.",
        "port-forward": "Forward PORT of this machine to a rank of job JOB_NAME.",
    },
    "Use what it trained": {
        "eval": "Evaluate a checkpoint of RUN on its held-out data.",
        "predict": "Predict the labels of FILES with the model of RUN.",
        "sample": "Generate text with the model of RUN.",
        "export": "Export a checkpoint of RUN as a Hugging Face model.",
    },
    "Documentation": {
        "help": "Show a page of the documentation, list the pages, or search them.",
        "schema": "Print the JSON schema of job.yaml, or of an output.",
    },
}
COMMANDS = {name: line for commands in GROUPS.values() for name, line in commands.items()}
MODULES: Mapping[str, str] = {
    "bundle": "status",
    "compare": "report",
    "copy": "exec",
    "dashboard": "report",
    "delete": "stop",
    "eval": "models",
    "explain": "status",
    "export": "models",
    "init": "validate",
    "port-forward": "exec",
    "predict": "models",
    "prepare": "data",
    "sample": "models",
    "shell": "exec",
    "tune": "plan",
}


class Commands(click.Group):
    """A group whose commands are imported when they are called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, after a word of another tool is replaced or answered."""
        if args and not ctx.resilient_parsing and args[0] not in COMMANDS and args[0][:1] != "-":
            # Imported here, because --help must not wait for it.
            from jaxlaunch.launcher.cli import habits

            args = habits.translate_words(args, COMMANDS)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the sorted names of all commands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            return None
        module_name = MODULES.get(cmd_name, cmd_name)
        # Imported objects stay alive, and looking for garbage among them takes 6 % of the startup.
        gc.disable()
        try:
            module = importlib.import_module(f"jaxlaunch.launcher.cli.{module_name}")
        finally:
            gc.enable()
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        command.epilog = examples.make_epilog(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, and suggest one for an unknown name."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            # Imported here, because --help must not wait for it.
            from jaxlaunch.spelling import find_completions, find_nearest

            suggestions = find_nearest(args[0], COMMANDS) or find_completions(args[0], COMMANDS)
            suggestion = f" Did you mean '{suggestions[0]}'?" if suggestions else ""
            ctx.fail(f"No such command '{args[0]}'.{suggestion}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, rest if command is None else _split_values(command, rest)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by group, and examples, for --help."""
        width = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])
        with formatter.section("Examples"):
            for line in examples.format_lines(examples.FIRST_EXAMPLES):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the pointer to further documentation."""
        formatter.write(f"\n{READ_MORE}\n")


def _split_values(command: click.Command, args: list[str]) -> list[str]:
    """Return the arguments with `-o=json` split into `-o json`, which kubectl accepts, too."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    flags = {flag for option in options if not option.is_flag for flag in option.opts}
    words, previous = list[str](), ""
    for index, word in enumerate(args):
        if word == "--":
            return words + args[index:]
        # The value of an option may look like one.
        is_value = previous in flags
        is_joined = word[:2] in flags and word[2:3] == "=" and not is_value
        words += [word[:2], word[3:]] if is_joined else [word]
        previous = "" if is_value or is_joined else word
    return words


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="jaxlaunch", prog_name="launcher")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """One job.yaml, from a laptop to a pod slice: train with JAX on one host or many."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def main() -> NoReturn:
    """Run the command line and exit. An unexpected error is our bug and keeps its traceback."""
    for name in ("stdout", "stderr"):
        # The stream is None if the parent process has closed it.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        # A character that the terminal does not have, such as ×, must not end a run.
        getattr(sys, name).reconfigure(errors="replace")
    try:
        code = cli.main(prog_name="launcher", standalone_mode=False)
    except UserError as error:
        click.echo(escape_controls(str(error)), err=True)
        code = error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.UsageError):
            # Imported here, because --help must not wait for it.
            from jaxlaunch.launcher.cli import habits

            error = habits.explain_error(error, COMMANDS)
        text = io.StringIO()
        error.show(text)
        click.echo(escape_controls(text.getvalue()), err=True, nl=False)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    # Without this, the garbage collection at exit would take longer than all else after the result.
    gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    main()
