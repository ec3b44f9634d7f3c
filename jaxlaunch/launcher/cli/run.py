"""`launcher run`: train a job on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import click

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cli.screen_lines import Colour
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.jobs.logs import lines
from jaxlaunch.launcher.jobs.logs.lines import Selection
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.held_output import adds_to_message, root_exception
from jaxlaunch.launcher.local.roles import run_roles
from jaxlaunch.launcher.local.run import LocalRun, RunEnd, check_run_folder, refuse_own_folder
from jaxlaunch.launcher.local.run import run_job as run_job
from jaxlaunch.launcher.local.ssh import SshHosts
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.records import codec
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import layout

# The lines that are shown at the end of the output of a failed rank that was hidden.
_MAX_OUTPUT_LINES = 10


@click.command("run")
@options.job_arguments
@options.folder_options
@click.option(
    "--rank",
    default=None,
    metavar="N,N-M|all",
    help="Ranks to show. [default: all; 0 on a terminal]",
)
@click.option(
    "--simulate",
    is_flag=True,
    help="Use the same number of virtual CPU devices instead of GPUs or TPUs.",
)
@click.option(
    "--plain",
    is_flag=True,
    help="Print only lines on a terminal, too, without the block that follows the run.",
)
@click.option(
    "--hosts",
    "host_names",
    default=None,
    metavar="HOST,HOST",
    help="Run each host's agent on another machine, through ssh. All share the job's folder.",
)
@click.option(
    "--take-over", is_flag=True, help="Take the checkpoint folder over from the run that owns it."
)
def run_command(
    job_file: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    volumes: tuple[str, ...],
    rank: str | None,
    simulate: bool,
    plain: bool,
    host_names: str | None,
    take_over: bool,
) -> int:
    """Train JOB_FILE on this machine.

    The command starts one agent per host of the job, each with its processes, as in the pods on a
    cluster. Ctrl-C saves and stops; a second Ctrl-C kills. The exit code is that of the job's
    result. The roles of a job (jobs:) are runs in its run folder, such as runs/NAME/ROLE.

    On a terminal, lines in which ranks only report the failure of another rank are hidden, and a
    traceback ends with the job's result. `launcher logs RUN --rank N` has every line.
    """
    file = jobs.read_job(job_file, overrides, may_have_roles=True)
    job, folder = file.spec, (run_dir or run_folders.RUNS_FOLDER / file.name).absolute()
    refuse_own_folder(job_file, folder)
    if not file.roles:
        check_run_folder(job, folder, output.show_messages)
    job_folder, mounts = job_file.absolute().parent, options.parse_volumes(volumes)
    words = options.folder_words(job_file, overrides, run_dir, volumes)
    words += ["--simulate"] if simulate else []
    words += ["--hosts", host_names] if host_names else []
    hides_echoes = sys.stdout.isatty()
    local = LocalRun(
        folder,
        job_folder,
        mounts,
        simulate,
        take_over,
        words,
        hides_echoes,
        remote=None if not host_names else SshHosts(host_names.split(",")),
    )
    selection = lines.parse_selection(rank or ("0" if sys.stdout.isatty() else "all"), None)
    specs = [role.file.spec for role in file.roles] or [job]
    lines.check_ranks_exist(selection, max(spec.processes for spec in specs))
    # The live block needs a terminal that can erase lines.
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    is_live = not plain and sys.stderr.isatty() and not is_dumb and not file.roles
    context, printer = _make_live_block(folder) if is_live else None, output.Printer(selection)
    show, say = printer.show_line, output.show_messages
    if file.roles:
        end = run_roles(file, local, show, say)
    else:
        end = run_job(job, local, show, say, run_context=context)
    _show_end(folder / layout.SUMMARY, end, selection, is_plain=plain)
    place = layout.read_tracker_place(folder) if job.tracker is not None else None
    if place is not None:
        output.show_messages(f"tracker: {escape_controls(place[1])}")
    if is_live:
        is_by_name = folder == (run_folders.RUNS_FOLDER / folder.name).absolute()
        name = shlex.quote(folder.name if is_by_name else str(folder))
        output.show_messages(f"its page: launcher report {name}")
        if end.code != contract.DONE:
            is_stop = contract.outcome_for_code(end.code).is_stop
            verb = "starts it again" if end.summary["saved"] is None else "continues it"
            resume = f"; the same command {verb}" if is_stop else ""
            output.show_messages(f"why: launcher explain {name}{resume}")
        elif job.train is not None:
            command = "sample" if job.train.task == "lm" else "eval"
            output.show_messages(f"next: launcher {command} {name}")
    return end.code


def _make_live_block(folder: Path) -> AbstractContextManager[object]:
    from jaxlaunch.launcher.cli.live_block import LiveBlock

    return LiveBlock(folder)


def _show_end(path: Path, end: RunEnd, selection: Selection, *, is_plain: bool) -> None:
    """Show the result of the run, after the traceback of a rank whose lines were not shown."""
    summary, verdict, is_done = end.summary, end.summary["verdict"], end.code == contract.DONE
    step = summary["step"] if verdict["step"] is None or is_done else verdict["step"]
    is_interrupt = verdict["cause"] == contract.INTERRUPTED
    status = contract.INTERRUPTED if is_interrupt else summary["status"]
    outcome = status if step is None else f"{status} at step {step}"
    if end.reached_step is not None:
        outcome = "nothing to do" if is_done else status
        outcome += f"; the run is at step {end.reached_step}"
    if end.kept_status is not None:
        outcome = f"start {end.start} was refused, and the run stays {end.kept_status}"
        if end.reached_step is not None:
            outcome += f" at step {end.reached_step}"
        path = path.parent / layout.start_file(end.start, layout.SUMMARY)
    if end.role is not None:
        outcome += f", by role {end.role}"
    pointer = f"see {path}" if path.exists() else f"{path} could not be written"
    # The result comes last, because a terminal shows the end.
    _show_traceback(codec.read_record(Verdict, verdict), selection)
    is_stop = is_interrupt or contract.outcome_for_code(end.code).is_stop
    colour = Colour.GREEN if is_done else None if is_stop else Colour.RED
    details = f": {verdict['message']} (exit {end.code}); {pointer}"
    output.show_outcome(outcome, details, colour, is_plain=is_plain)
    if (page := troubleshooting.command_for_code(end.code)) is not None:
        output.show_messages(f"see: {page}")


def _show_traceback(verdict: Verdict, selection: Selection) -> None:
    """Show the traceback, or the last output, of a rank whose lines were not shown."""
    # The message says everything about an error that the user can fix.
    is_fixable = contract.outcome_for_code(verdict.code).is_user_fixable
    if not verdict.traceback or verdict.rank is None or is_fixable:
        return
    if selection.matches_any_rank((verdict.rank,)):
        return
    lines = verdict.traceback.splitlines()
    # The message of the verdict follows.
    lines = [line for line in lines if adds_to_message(line, verdict.failure)]
    if root_exception(verdict.failure) is None:
        lines = [f"[{verdict.rank}] {line}" for line in lines[-_MAX_OUTPUT_LINES:]]
    output.show_lines(*lines, is_result=False)
