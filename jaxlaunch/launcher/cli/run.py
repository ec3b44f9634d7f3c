"""`launcher run`: trains a job on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import click

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.jobs.logs import lines
from jaxlaunch.launcher.jobs.logs.lines import Line, Select
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run import Ended, LocalRun
from jaxlaunch.launcher.local.run import run as run_job
from jaxlaunch.runs import layout, starts
from jaxlaunch.runs.run_folder import RunFolder

RUN_DIR = "name another folder with --run-dir."


@click.command("run")
@options.job
@options.folders
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
    _keep(job_file, folder)
    _own(job, folder)
    local = LocalRun(folder, job_file.absolute().parent, options.volumes(volumes), simulate, take_over)
    shown = _shown(rank, job.processes)
    printer = output.Printer(shown)
    show = printer.show if job.train is None else partial(_show, printer)  # a program may print what it likes
    is_live = not plain and _is_terminal()
    ended = run_job(job, local, show, output.say, during=_block(folder) if is_live else None)
    _conclude(folder / layout.SUMMARY, ended, shown)
    if is_live:
        _lead_on(job, folder, ended)
    return ended.code


def _shown(rank: str | None, processes: int) -> Select:
    """The ranks to show. Raises UserError where the job lacks one of those that are asked for."""
    shown = lines.select(("0" if sys.stdout.isatty() else "all") if rank is None else rank, None)
    lines.exist(shown, processes)
    return shown


def _keep(job_file: Path, folder: Path) -> None:
    """Raises UserError where the run would write its job.yaml over the user's; a run's own may be started again."""
    if os.path.realpath(job_file) == os.path.realpath(folder / layout.JOB) and not (folder / layout.LOCK).exists():
        raise UserError(f"The run folder {folder} is the job file's own: the run would overwrite {job_file}.", RUN_DIR)


def _own(job: JobSpec, folder: Path) -> None:
    """Raises UserError where another job trained in the folder: this run would go on from its checkpoints."""
    if not any(start.has_trained for start in starts.rows(RunFolder(folder, output.say).summary())):
        return
    try:
        earlier = jobs.kept(folder)
    except UserError:  # of another version, or no job of ours
        return
    if earlier.name != job.name:
        raise UserError(f"The run folder {folder} is that of job {earlier.name}, this job is {job.name}.", RUN_DIR)
    if (earlier.train is None) != (job.train is None):
        had, has = ("train" if one.train is not None else "command" for one in (earlier, job))
        raise UserError(f"The run folder {folder} is that of a job with {had}:, this job has {has}:.", RUN_DIR)


def _show(printer: output.Printer, line: Line) -> None:
    """Shows a line of the trainer's unless the verdict, which is said at the end, repeats it."""
    if line.rank is None or contract.refusal_message(line.text) is None:
        printer.show(line)


def _is_terminal() -> bool:
    """Whether who runs this looks at a terminal that can erase what it shows, and did not ask for plain text."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return sys.stderr.isatty() and not is_plain


def _block(folder: Path) -> AbstractContextManager[object]:
    """What follows the run below its lines."""
    from jaxlaunch.launcher.cli.live_block import Block

    return Block(folder)


def _lead_on(job: JobSpec, folder: Path, ended: Ended) -> None:
    """Says where the page of the run is, and what to do next."""
    is_by_name = folder == (run_folders.HOME / folder.name).absolute()
    name = shlex.quote(folder.name if is_by_name else str(folder))
    output.say(f"its page: launcher report {name}")
    if ended.code != contract.DONE:
        also = "; the same command continues it" if ended.code == contract.PREEMPTED else ""
        output.say(f"why: launcher explain {name}{also}")
    elif job.train is not None:
        output.say(f"next: launcher {'sample' if job.train.task == 'lm' else 'eval'} {name}")


def _conclude(path: Path, ended: Ended, shown: Select) -> None:
    """Says how the run ended, in one line; the traceback too if the lines of its rank were not shown."""
    found, verdict = ended.summary, ended.summary["verdict"]
    step = found["step"] if verdict["step"] is None or ended.code == contract.DONE else verdict["step"]
    how = found["status"] if step is None else f"{found['status']} at step {step}"
    if ended.stands_at is not None:
        is_done = ended.code == contract.DONE
        how = f"{'nothing to do' if is_done else found['status']}; the run is at step {ended.stands_at}"
    where = f"see {path}" if path.exists() else f"{path} could not be written"
    output.say(f"{how}: {verdict['message']} (exit {ended.code}); {where}")
    if (page := troubleshooting.of_code(ended.code)) is not None:
        output.say(f"see: {page}")
    is_sentence = ended.code in contract.SENTENCES  # what a person can fix has no traceback
    rank = verdict["rank"]
    if verdict["traceback"] and rank is not None and not is_sentence and not shown.wants_any((rank,)):
        output.show(verdict["traceback"], is_result=False)
