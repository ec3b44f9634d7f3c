"""`launcher run`: the only place where a run's lines become a terminal's."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click

from launcher import job as jobs
from launcher import runs
from launcher.cli import options
from launcher.errors import UserError
from launcher.logs import Line
from launcher.run import Here
from launcher.run import run as run_job


@click.command()
@options.job
@click.option("--run-dir", type=click.Path(path_type=Path), help="The run folder. [default: runs/<name>]")
@click.option("--volume", "volumes", multiple=True, metavar="NAME=DIR", help="The folder a volume of the job is here.")
@click.option("--rank", default=None, metavar="N|all", help="Whose output to show. [default: all; 0 on a terminal]")
@click.option("--simulate", is_flag=True, help="Stand in for GPUs or TPUs with as many virtual CPU devices.")
@click.option("--take-over", is_flag=True, help="Take the checkpoint folder from the run that holds it.")
def run(
    job_file: Path,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    volumes: tuple[str, ...],
    rank: str | None,
    simulate: bool,
    take_over: bool,
) -> int:
    """Train JOB on this machine.

    One agent per host of the job, each with its processes, under the contract that pods get on a cluster. Ctrl-C saves
    and stops; twice kills. The exit code is the verdict's.
    """
    job = jobs.load(job_file, overrides)
    folder = (run_dir or runs.HOME / job.name).absolute()
    here = Here(folder, job_file.absolute().parent, _folders(volumes), simulate, take_over)
    screen = Screen(rank or ("0" if sys.stdout.isatty() else "all"))
    with screen.bar(folder):
        code = run_job(job, here, screen.show, screen.say)
    screen.conclude(folder / "summary.json", code)
    return code


def _folders(volumes: tuple[str, ...]) -> dict[str, Path]:
    pairs = [volume.partition("=") for volume in volumes]
    for name, equals, folder in pairs:
        if not (name and equals and folder):
            raise UserError(f"--volume {name}{equals}{folder} is not NAME=DIR.")
    return {name: Path(folder).absolute() for name, _, folder in pairs}


class Screen:
    """Results on stdout, talk on stderr; on a terminal a bar follows the steps."""

    def __init__(self, rank: str) -> None:
        if rank != "all" and not rank.isdecimal():
            raise UserError(f"--rank {rank} is neither a rank nor `all`.")
        self._rank = None if rank == "all" else int(rank)

    def show(self, line: Line) -> None:
        """A line of the gang, if it was asked for; alone, a rank needs no prefix."""
        if line.rank is None:
            print(line.text, file=sys.stderr, flush=True)
        elif self._rank is None:
            print(line.prefixed(), flush=True)
        elif line.rank == self._rank:
            print(line.text, flush=True)

    def bar(self, folder: Path) -> AbstractContextManager[object]:
        """On a terminal, a bar that follows the run."""
        if not sys.stderr.isatty():
            return nullcontext()
        from launcher.cli.bar import Bar  # rich costs a tenth of a second that a script need not pay

        return Bar(folder)

    def say(self, text: str) -> None:
        print(f"launcher: {text}", file=sys.stderr, flush=True)

    def conclude(self, summary: Path, code: int) -> None:
        """Says how it ended: one line, and the traceback where the rank it is of was not shown."""
        if not summary.exists():
            return self.say(f"ended with exit code {code} and left no summary")
        found = json.loads(summary.read_text())
        verdict = found.get("verdict") or {}
        self.say(
            f"{found['status']} at step {found['step']}: {verdict.get('message', '')} (exit {code}); see {summary}"
        )
        if self._rank is not None and verdict.get("rank") not in (None, self._rank) and verdict.get("traceback"):
            print(verdict["traceback"], file=sys.stderr)
