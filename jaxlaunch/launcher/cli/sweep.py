"""`launcher sweep`: one job with several values of its keys, as runs here or as jobs on a cluster."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxlaunch import contract
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.sweep import grid, here
from jaxlaunch.launcher.sweep.table import LOCK, Member, Table
from jaxlaunch.launcher.wording import count

_FALLING = ("loss", "perplexity")  # metrics whose lower values are better, whoever does not say so
_RUNGS = "0.25,0.5"
_LABEL = "sweep"  # on the objects of its jobs on a cluster
_PRIVATE = ("name", "labels.sweep")


@click.command("sweep")
@options.job
@options.folders
@click.option("--name", help="The sweep's name: its folder below runs/. [default: the job's, with -sweep]")
@click.option(
    "--random", "draws", type=click.IntRange(1), metavar="N", help="Draw N combinations at random; allows ranges."
)
@click.option("--seed", default=0, show_default=True, help="Seed for --random.")
@click.option("--max", "most", type=click.IntRange(1), metavar="N", help="Run only the first N of the combinations.")
@click.option(
    "--parallel", type=click.IntRange(1), metavar="N", help="Runs at a time. [default: as many as the CPUs allow]"
)
@click.option("--metric", help="The metric of the best run. [default: checkpoint.best, else eval/loss, else loss]")
@click.option("--mode", type=click.Choice(["min", "max"]), help="Which values are better; not needed for a loss.")
@click.option("--halving", is_flag=True, help="At each rung, stop the half whose metric is worse.")
@click.option("--rungs", default=_RUNGS, show_default=True, help="Fractions of the steps, or numbers of steps.")
@click.option("--retry", is_flag=True, help="Also restart runs that have failed.")
@click.option("--dry-run", "is_rehearsal", is_flag=True, help="Print the runs, or the manifests, and create nothing.")
@click.option("--simulate", is_flag=True, help="Use virtual CPU devices instead of GPUs or TPUs.")
@click.option("--cluster", "is_on_cluster", is_flag=True, help="Submit the runs as jobs, into the job's queue.")
@options.place("Where they run on a cluster. [default: the job's, else the context's]")
def sweep_command(job_file: Path, overrides: tuple[str, ...], **given: Any) -> int:
    """Run JOB_FILE with several values of its keys.

    Separate the values of a key with commas (train.optimizer.lr=1e-3,3e-3), or give a range of whole numbers that
    includes both ends (train.seed=0..2); every combination is a run. --random N draws N combinations, and a key may
    then have a range such as 1e-4..1e-1. If you repeat the command, it skips runs that are done and resumes those that
    were stopped or killed.
    """
    axes = grid.axes(overrides)
    draws = given["draws"]
    points = (
        grid.grid(axes, given["most"]) if draws is None else grid.drawn(axes, draws, given["seed"])[: given["most"]]
    )
    base = jobs.load(job_file, points[0])
    name = given["name"] or f"{base.name}-sweep"
    folder = (given["run_dir"] or run_folders.HOME / name).absolute()
    where = ("is_on_cluster", "namespace", "context")
    cluster = {key: given[key] for key in where[1:]} if any(given[key] for key in where) else None
    members = dict(_members(job_file, points, name, folder))
    table = Table(folder)
    metric, is_higher = _best_by(base, given["metric"], given["mode"])
    of = {"sweep": name, "metric": metric, "mode": "max" if is_higher else "min", "cluster": cluster}
    if cluster is not None and given["halving"]:
        raise UserError("--halving stops runs of this machine: on a cluster, no process follows them.", "leave it out.")
    if cluster is not None:
        return _submit(table, of, members, given, job_file)
    if given["is_rehearsal"]:
        output.show(
            *output.columns([["RUN", "VALUES"], *([each.name, " ".join(each.changes)] for each in members.values())])
        )
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with run_folders.locked(folder, LOCK) as own:
        table.begin(of, members)
        known = [table.members[each] for each in members]
        for member in known:
            if given["retry"] and member.state == "failed":
                table.note(member, "waiting")
        leader = here.Leader(table, known, _plan(base, job_file, metric, is_higher, given), output.say)
        leader.run(own)
    output.show(*_shown(table, known))
    return contract.PREEMPTED if leader.is_stopped else int(any(member.state == "failed" for member in known))


def _members(job_file: Path, points: Sequence[grid.Point], name: str, folder: Path) -> Iterator[tuple[str, Member]]:
    """The runs by name. Raises JobFaults for a job that is none, before any is started."""
    for number, point in enumerate(points):
        own = f"{name}-{number:03}"
        if any(change.startswith(tuple(f"{key}=" for key in _PRIVATE)) for change in point):
            raise UserError("The sweep names its runs itself: leave name out.", "--name is the sweep's.")
        yield own, Member(own, folder / own, list(point), _digest(_job(job_file, point, own)))


def _job(job_file: Path, changes: Sequence[str], name: str) -> JobSpec:
    return jobs.load(job_file, [*changes, f"name={name}"])


def _digest(job: JobSpec) -> str:
    return hashlib.sha256(jobs.dump(job).encode()).hexdigest()


def _best_by(job: JobSpec, metric: str | None, mode: str | None) -> tuple[str, bool]:
    """The metric, and whether higher values are better. Raises UserError where nobody says that."""
    best = None if job.train is None else job.train.checkpoint.best
    if metric is None:
        is_evaluated = job.train is not None and job.train.eval.every is not None
        metric = best.metric if best is not None else "eval/loss" if is_evaluated else "loss"
    if mode is None and best is not None and best.metric == metric:
        mode = best.mode
    if mode is None and not metric.endswith(_FALLING):
        raise UserError(f"Which values of {metric} are better?", "add --mode min or --mode max.")
    return metric, mode == "max"


def _plan(job: JobSpec, job_file: Path, metric: str, is_higher_better: bool, given: Mapping[str, Any]) -> here.Plan:
    rungs = _rungs(given["rungs"]) if given["halving"] else []
    if job.train is None and any(rung < 1 for rung in rungs):
        raise UserError("How many steps this program makes is not known.", "give --rungs in steps, such as 100,200.")
    own = [f"--volume={volume}" for volume in given["volumes"]]
    own += ["--simulate"] if given["simulate"] else []

    def command(member: Member) -> list[str]:
        """Starts `launcher run` of it. Raises UserError where the file has changed since the sweep began."""
        if _digest(_job(job_file, member.changes, member.name)) != member.job:
            raise UserError(f"{job_file} has changed since the sweep began.", "restore it, or begin another sweep.")
        words = ["run", str(job_file), *member.changes, f"name={member.name}", "--run-dir", str(member.folder), *own]
        return [sys.executable, "-P", "-m", "jaxlaunch.launcher.cli.main", *words, "--rank", "all"]

    platform = "cpu" if given["simulate"] else job.accelerator.platform
    parallel = given["parallel"] or here.fitting(job.processes, platform)
    return here.Plan(parallel, metric, is_higher_better, rungs, job.train is not None, command)


def _rungs(text: str) -> list[float]:
    """The rungs, the lowest first. Raises UserError for what is no number above 0."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rung < 2**53 for rung in found) or sorted(set(found)) != found:
        raise UserError(f"--rungs {text} is not a list of rising numbers above 0.", f"such as {_RUNGS} or 100,200.")
    return found


def _shown(table: Table, members: Sequence[Member]) -> Iterator[str]:
    """The runs in a table, then the best of those that are done, and the command that shows its job."""
    metric = table.of["metric"]
    values = {member.name: here.newest(member, metric) for member in members if member.folder.is_dir()}
    rows = [["RUN", "STATE", metric.upper(), "VALUES"]]
    for member in members:
        value = values.get(member.name)
        shown = "-" if value is None else f"{value:.4g}"
        rows.append([member.name, member.state, shown, " ".join(member.changes)])
    yield from output.columns(rows)
    done = {
        member.name: value
        for member in members
        if member.state == "done" and (value := values[member.name]) is not None
    }
    if not done:
        yield f"no run that is done has {metric}"
        return
    best = max(done, key=lambda name: done[name] if table.of["mode"] == "max" else -done[name])
    yield f"best of {count(len(done), 'run')} that are done: {best}, {metric} {done[best]:.4g}"
    yield f"  cat {_relative(table.folder / best / 'job.yaml')}"


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _submit(
    table: Table, of: Mapping[str, Any], members: Mapping[str, Member], given: Mapping[str, Any], job_file: Path
) -> int:
    """Submits each as a job that bears the sweep's label; those that are there already are left alone."""
    from jaxlaunch.launcher.cli import submit  # with the clients of a cluster, which a sweep here needs not

    place = [] if given["namespace"] is None else [f"namespace={given['namespace']}"]
    changes = [f"labels.{_LABEL}={of['sweep']}", *place]
    files = [jobs.read(job_file, [*each.changes, f"name={each.name}", *changes]) for each in members.values()]
    if given["is_rehearsal"]:
        submit.many(files, given["context"], is_rehearsal=True)
        return 0
    table.folder.mkdir(parents=True, exist_ok=True)
    with run_folders.locked(table.folder, LOCK):
        table.begin(of, members)
        namespace = submit.many(files, given["context"], is_rehearsal=False)
        for name in members:
            table.note(table.members[name], "submitted")
    output.say(
        f"`launcher list {of['sweep']}` shows them, `launcher stop {of['sweep']}` stops them (namespace {namespace})"
    )
    return 0
