"""`launcher run`: trains a job on this machine."""

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
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.jobs.logs import lines
from jaxlaunch.launcher.jobs.logs.lines import Select
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run import LocalRun, RunEnd
from jaxlaunch.launcher.local.run import run as run_job
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import RunFolder, rows

_HINT = "name another folder with --run-dir."


@click.command("run")
@options.job_arguments
@options.folder_options
@click.option("--rank", default=None, metavar="N,N-M|all", help="Ranks to show. [default: all; 0 on a terminal]")
@click.option("--simulate", is_flag=True, help="Use the same number of virtual CPU devices instead of GPUs or TPUs.")
@click.option(
    "--plain", is_flag=True, help="Print only lines on a terminal, too, without the block that follows the run."
)
@click.option("--take-over", is_flag=True, help="Take the checkpoint folder over from the run that owns it.")
def run_command(
    job_file: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    volumes: tuple[str, ...],
    rank: str | None,
    simulate: bool,
    plain: bool,
    take_over: bool,
) -> int:
    """Train JOB_FILE on this machine.

    The command starts one agent per host of the job, each with its processes, as in the pods on a cluster. Ctrl-C saves
    and stops; a second Ctrl-C kills. The exit code is that of the job's result.
    """
    job = jobs.load(job_file, overrides)
    folder = (run_dir or run_folders.HOME / job.name).absolute()
    _check_folder(job, job_file, folder)
    local = LocalRun(folder, job_file.absolute().parent, options.parse_volumes(volumes), simulate, take_over)
    chosen = lines.parse_selection(("0" if sys.stdout.isatty() else "all") if rank is None else rank, None)
    lines.require_ranks(chosen, job.processes)
    # The block needs a terminal that can erase lines, and a user who did not ask for plain text.
    is_dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    is_live = not plain and sys.stderr.isatty() and not is_dumb
    end = run_job(job, local, output.Printer(chosen).show, output.say, during=_live_block(folder) if is_live else None)
    _say_end(folder / layout.SUMMARY, end, chosen)
    if is_live:
        is_by_name = folder == (run_folders.HOME / folder.name).absolute()
        name = shlex.quote(folder.name if is_by_name else str(folder))
        output.say(f"its page: launcher report {name}")
        if end.code != contract.DONE:
            also = "; the same command continues it" if end.code == contract.PREEMPTED else ""
            output.say(f"why: launcher explain {name}{also}")
        elif job.train is not None:
            output.say(f"next: launcher {'sample' if job.train.task == 'lm' else 'eval'} {name}")
    return end.code


def _check_folder(job: JobSpec, job_file: Path, folder: Path) -> None:
    """Raise UserError for a run folder that contains the user's job file, or checkpoints of another job."""
    is_own = os.path.realpath(job_file) == os.path.realpath(folder / layout.JOB)
    # The job file of a run may be used to start the run again.
    if is_own and not (folder / layout.LOCK).exists():
        raise UserError(f"The run folder {folder} is the job file's own: the run would overwrite {job_file}.", _HINT)
    if not any(start.has_trained for start in rows(RunFolder(folder, output.say).summary())):
        return
    try:
        earlier = jobs.kept(folder)
    except UserError:
        # The file is of another version, or no job.
        return
    if earlier.name != job.name:
        raise UserError(f"The run folder {folder} is that of job {earlier.name}, this job is {job.name}.", _HINT)
    if (earlier.train is None) != (job.train is None):
        had, has = ("train" if spec.train is not None else "command" for spec in (earlier, job))
        raise UserError(f"The run folder {folder} is that of a job with {had}:, this job has {has}:.", _HINT)


def _live_block(folder: Path) -> AbstractContextManager[object]:
    from jaxlaunch.launcher.cli.live_block import LiveBlock

    return LiveBlock(folder)


def _say_end(path: Path, end: RunEnd, chosen: Select) -> None:
    """Say how the run ended, in one line; show the traceback too if the lines of its rank were not shown."""
    summary, verdict = end.summary, end.summary["verdict"]
    step = summary["step"] if verdict["step"] is None or end.code == contract.DONE else verdict["step"]
    how = summary["status"] if step is None else f"{summary['status']} at step {step}"
    if end.stands_at is not None:
        is_done = end.code == contract.DONE
        how = f"{'nothing to do' if is_done else summary['status']}; the run is at step {end.stands_at}"
    where = f"see {path}" if path.exists() else f"{path} could not be written"
    output.say(f"{how}: {verdict['message']} (exit {end.code}); {where}")
    if (page := troubleshooting.of_code(end.code)) is not None:
        output.say(f"see: {page}")
    # An error that a person can fix has no traceback.
    is_sentence = end.code in contract.SENTENCES
    rank = verdict["rank"]
    if verdict["traceback"] and rank is not None and not is_sentence and not chosen.wants_any((rank,)):
        output.show(verdict["traceback"], is_result=False)
