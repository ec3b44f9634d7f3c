"""The `launcher` command: finds its subcommands without importing them, and turns errors into exit codes.

Exit codes: 0 success, 2 an error that the user can fix, 3 an error of the cluster, 124 timeout, 130 interrupted; `run`
and `submit --wait` exit with the code of the job's result.
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
from jaxlaunch.launcher.wording import visible

INTERRUPTED = 130
READ_MORE = "launcher COMMAND --help has more examples, launcher help lists the pages (docs/index.md)."

# Command -> where it is defined, and its line in --help. Importing them all would take --help half a second.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "compare": (
        "jaxlaunch.launcher.cli.compare:compare_command",
        "Compare RUNS: what differs in their jobs, and their curves.",
    ),
    "dashboard": (
        "jaxlaunch.launcher.cli.dashboard:dashboard_command",
        "Serve the pages of all runs of FOLDER while they train.",
    ),
    "data": ("jaxlaunch.launcher.cli.data:data_command", "Show what is in PATH, and the data block that reads it."),
    "delete": ("jaxlaunch.launcher.cli.delete:delete_command", "Delete job JOB_NAME."),
    "doctor": ("jaxlaunch.launcher.cli.doctor:doctor_command", "Check that the cluster can run JOB_FILE, or any job."),
    "eval": ("jaxlaunch.launcher.cli.evaluate:eval_command", "Evaluate a checkpoint of RUN on its held-out data."),
    "explain": (
        "jaxlaunch.launcher.cli.explain:explain_command",
        "Explain why job JOB_NAME waits, what it does, or how it ended.",
    ),
    "export": ("jaxlaunch.launcher.cli.export:export_command", "Export a checkpoint of RUN as a Hugging Face model."),
    "help": ("jaxlaunch.launcher.cli.help:help_command", "Show a page of the documentation, or list them."),
    "init": ("jaxlaunch.launcher.cli.init:init", "Write a starter job.yaml."),
    "list": (
        "jaxlaunch.launcher.cli.list:list_command",
        "List the runs here, and the jobs that launcher submitted.",
    ),
    "logs": (
        "jaxlaunch.launcher.cli.logs:logs_command",
        "Print the logs of job JOB_NAME, or of a run here.",
    ),
    "plan": (
        "jaxlaunch.launcher.cli.plan:plan_command",
        "Estimate the memory that JOB_FILE needs, and whether it fits.",
    ),
    "predict": (
        "jaxlaunch.launcher.cli.predict:predict_command",
        "Predict the labels of FILES with the model of RUN.",
    ),
    "prepare": (
        "jaxlaunch.launcher.cli.prepare:prepare_command",
        "Pack the data of JOB_FILE, once: text, images or a table.",
    ),
    "profile": ("jaxlaunch.launcher.cli.profile:profile_command", "Profile the next steps of RUN."),
    "render": ("jaxlaunch.launcher.cli.render:render", "Print JOB_FILE as Kubernetes manifests."),
    "report": (
        "jaxlaunch.launcher.cli.report:report_command",
        "Write the page of RUN: one HTML file.",
    ),
    "run": ("jaxlaunch.launcher.cli.run:run", "Train JOB_FILE on this machine."),
    "sample": ("jaxlaunch.launcher.cli.sample:sample_command", "Generate text with the model of RUN."),
    "schema": ("jaxlaunch.launcher.cli.schema:schema", "Print the JSON schema of job.yaml."),
    "status": (
        "jaxlaunch.launcher.cli.status:status_command",
        "Show the state of job JOB_NAME, or of a run here.",
    ),
    "stop": (
        "jaxlaunch.launcher.cli.stop:stop_command",
        "Stop job JOB_NAME, or a run here, after it has saved.",
    ),
    "submit": ("jaxlaunch.launcher.cli.submit:submit", "Submit JOB_FILE to a cluster."),
    "sweep": ("jaxlaunch.launcher.cli.sweep:sweep_command", "Run JOB_FILE with several values of its keys."),
    "tune": ("jaxlaunch.launcher.cli.tune:tune_command", "Find the fastest settings of JOB_FILE that fit its devices."),
    "validate": ("jaxlaunch.launcher.cli.validate:validate", "Check JOB_FILE, and show what it requests."),
}

# How --help groups them, in the order in which they are first needed.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Write a job": ("init", "data", "validate", "plan", "tune", "prepare"),
    "Run it on this machine": ("run", "sweep"),
    "Run it on a cluster": ("doctor", "render", "submit", "stop", "delete"),
    "See what it does": ("list", "status", "explain", "logs", "profile", "report", "compare", "dashboard"),
    "Use what it trained": ("eval", "predict", "sample", "export"),
    "Documentation": ("help", "schema"),
}


class Commands(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        command.epilog = examples.epilog(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but for a name that does not exist it suggests one that does."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            from jaxlaunch.spelling import in_full, nearest  # only here: --help need not wait for it

            near = nearest(args[0], COMMANDS) or in_full(args[0], COMMANDS)
            ctx.fail(f"No such command '{args[0]}'." + (f" Did you mean '{near[0]}'?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands for --help, in their groups, then examples."""
        width = max(map(len, COMMANDS))
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), COMMANDS[name][1]) for name in names])
        with formatter.section("Examples"):
            for line in examples.lines(examples.FIRST):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes where to read more."""
        formatter.write(f"\n{READ_MORE}\n")


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxlaunch", prog_name="launcher")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """One job.yaml, from a laptop to a pod slice: train with JAX on one host or many."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False


def main() -> NoReturn:
    """Runs the command line and exits. An unexpected error keeps its traceback: it is our bug."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(errors="replace")  # a terminal without × must not end a run
    try:
        code = cli.main(prog_name="launcher", standalone_mode=False)
    except UserError as error:
        click.echo(visible(str(error)), err=True)
        code = error.exit_code
    except click.ClickException as error:
        written = io.StringIO()
        _explained(error).show(written)
        click.echo(visible(written.getvalue()), err=True, nl=False)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    gc.freeze()  # the interpreter's last collections would take longer than all else after a run's summary
    sys.exit(code)


def _explained(error: click.ClickException) -> click.ClickException:
    """The error, with the nearest option in place of one that does not exist, or how a key of a job is written."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return error
    from jaxlaunch.spelling import nearest  # as above

    name, parameters = error.option_name, error.ctx.command.params
    options = [one for parameter in parameters if isinstance(parameter, click.Option) for one in parameter.opts]
    near, message = nearest(name, options), f"No such option '{name}'."
    if not near and any(one.name == "overrides" for one in parameters):
        message += " A key of the job has no dashes, as in hosts=2; arguments of your program belong in its command:."
    return click.NoSuchOption(name, message, near, error.ctx)


if __name__ == "__main__":
    main()
