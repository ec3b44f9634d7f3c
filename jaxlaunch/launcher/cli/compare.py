"""`launcher compare`: runs next to each other."""

from __future__ import annotations

from pathlib import Path

import click

from jaxlaunch.launcher.cli import completions, output
from jaxlaunch.launcher.cli.report import write
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import run_folders

_LOSSES = ("eval/loss", "loss")


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, shell_complete=completions.runs)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="A metric to compare. [default: the loss]")
@click.option(
    "--at",
    type=click.Choice(["step", "hour", "examples"]),
    default="step",
    help="The axis of the curves. [default: step]",
)
@click.option("-o", "--output", "to", type=click.Path(path_type=Path), help="Also write a page, one HTML file.")
def compare_command(runs: tuple[str, ...], metrics: tuple[str, ...], at: str, to: Path | None) -> None:
    """Compare RUNS: what differs in their jobs, and their curves.

    Each of RUNS is the name of a run on this machine, or its folder; the name of a sweep stands for all of its runs.
    Hours are the time in which a run had processes or waited for them, without the time between two starts.
    """
    from jaxlaunch.launcher.report import compare, page, plot
    from jaxlaunch.launcher.report.run import Followed

    folders = [folder for run in runs for folder in _folders(run)]
    if len(folders) < 2:
        raise UserError("compare needs two runs or more.", "name another run behind the first.")
    seen = [Followed(folder).read() for folder in folders]
    data = compare.data(seen, metrics, at)
    output.show(*output.columns(compare.summary(data)))
    if data["differs"]:
        heads = ["KEY", *(run["name"] for run in data["runs"])]
        output.show("", *output.columns([heads, *([key, *values] for key, values in data["differs"])]))
    for metric in metrics or _first(set(data["columns"])):
        output.show("", metric, *plot.drawn(compare.lines(seen, metric, at), at))
    if to is not None:
        write(to, page.of("compare", "Compare", data))


def _folders(name: str) -> list[Path]:
    """The folder of a run, or of each run of a sweep that has begun."""
    sweep = run_folders.find_sweep(name)
    return [run_folders.folder(name)] if sweep is None else [run.folder for run in run_folders.runs_in(sweep)]


def _first(known: set[str]) -> tuple[str, ...]:
    return tuple(name for name in _LOSSES if name in known)[:1]
