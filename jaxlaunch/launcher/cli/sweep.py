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
from jaxlaunch.launcher.sweep import grid, leader
from jaxlaunch.launcher.sweep.table import LOCK, Member, RunState, Table
from jaxlaunch.launcher.wording import count

# Lower values of these metrics are better, unless --mode says otherwise.
_FALLING = ("loss", "perplexity")
_RUNGS = "0.25,0.5"
# The label on the objects of the sweep's jobs on a cluster.
_LABEL = "sweep"
# Overrides that the sweep itself adds.
_PRIVATE = ("name=", f"labels.{_LABEL}=")


@click.command("sweep")
@options.job_arguments
@options.folder_options
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
@options.cluster_options("Where they run on a cluster. [default: the job's, else the context's]")
def sweep_command(job_file: Path, overrides: tuple[str, ...], **given: Any) -> int:
    """Run JOB_FILE with several values of its keys.

    Separate the values of a key with commas (train.optimizer.lr=1e-3,3e-3), or give a range of whole numbers that
    includes both ends (train.seed=0..2); every combination is a run. --random N draws N combinations, and a key may
    then have a range such as 1e-4..1e-1. If you repeat the command, it skips runs that are done and resumes those that
    were stopped or killed.
    """
    axes, limit = grid.parse_axes(overrides), given["most"]
    if given["draws"] is None:
        points = grid.make_grid(axes, limit)
    else:
        points = grid.draw_points(axes, given["draws"], given["seed"])[:limit]
    base = jobs.load(job_file, points[0])
    name = given["name"] or f"{base.name}-sweep"
    folder = (given["run_dir"] or run_folders.HOME / name).absolute()
    is_on_cluster = any(given[key] for key in ("is_on_cluster", "namespace", "context"))
    cluster = {key: given[key] for key in ("namespace", "context")} if is_on_cluster else None
    members = {member.name: member for member in _make_members(job_file, points, name, folder)}
    table = Table(folder)
    metric, is_higher_better = _choose_metric(base, given["metric"], given["mode"])
    of = {"sweep": name, "metric": metric, "mode": "max" if is_higher_better else "min", "cluster": cluster}
    if cluster is not None and given["halving"]:
        raise UserError("--halving stops runs of this machine: on a cluster, no process follows them.", "leave it out.")
    if cluster is not None:
        return _submit(table, of, members, given, job_file)
    if given["is_rehearsal"]:
        rows = [["RUN", "VALUES"], *([member.name, " ".join(member.changes)] for member in members.values())]
        output.show(*output.format_columns(rows))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with run_folders.locked(folder, LOCK) as lock:
        table.begin(of, members)
        runs = [table.members[name] for name in members]
        for member in runs:
            if given["retry"] and member.state is RunState.FAILED:
                table.note(member, RunState.WAITING)
        plan = _make_plan(base, job_file, metric, is_higher_better, given)
        sweep_leader = leader.Leader(table, runs, plan, output.say)
        sweep_leader.run(lock)
    output.show(*_describe_runs(table, runs))
    if sweep_leader.is_stopped:
        return contract.PREEMPTED
    return int(any(member.state is RunState.FAILED for member in runs))


def _make_members(job_file: Path, points: Sequence[grid.Point], name: str, folder: Path) -> Iterator[Member]:
    """Yield the runs. Raises JobFaults for an invalid job, before any run is started."""
    for number, point in enumerate(points):
        run = f"{name}-{number:03}"
        if any(change.startswith(_PRIVATE) for change in point):
            raise UserError("The sweep names its runs itself: leave name out.", "--name is the sweep's.")
        yield Member(run, folder / run, list(point), _digest_job(job_file, point, run))


def _digest_job(job_file: Path, changes: Sequence[str], name: str) -> str:
    job = jobs.load(job_file, [*changes, f"name={name}"])
    return hashlib.sha256(jobs.dump(job).encode()).hexdigest()


def _choose_metric(job: JobSpec, metric: str | None, mode: str | None) -> tuple[str, bool]:
    """Return the metric, and whether higher values are better. Raises UserError if that is not known."""
    best = None if job.train is None else job.train.checkpoint.best
    if metric is None:
        is_evaluated = job.train is not None and job.train.eval.every is not None
        metric = best.metric if best is not None else "eval/loss" if is_evaluated else "loss"
    if mode is None and best is not None and best.metric == metric:
        mode = best.mode
    if mode is None and not metric.endswith(_FALLING):
        raise UserError(f"Which values of {metric} are better?", "add --mode min or --mode max.")
    return metric, mode == "max"


def _make_plan(
    job: JobSpec, job_file: Path, metric: str, is_higher_better: bool, given: Mapping[str, Any]
) -> leader.Plan:
    rungs = _parse_rungs(given["rungs"]) if given["halving"] else []
    if job.train is None and any(rung < 1 for rung in rungs):
        raise UserError("How many steps this program makes is not known.", "give --rungs in steps, such as 100,200.")
    common = [*(f"--volume={volume}" for volume in given["volumes"]), *["--simulate"] * given["simulate"]]

    def command(member: Member) -> list[str]:
        """Return the `launcher run` of a run. Raises UserError if the file has changed since the sweep began."""
        if _digest_job(job_file, member.changes, member.name) != member.job:
            raise UserError(f"{job_file} has changed since the sweep began.", "restore it, or begin another sweep.")
        words = ["run", str(job_file), *member.changes, f"name={member.name}", "--run-dir", str(member.folder), *common]
        return [sys.executable, "-P", "-m", "jaxlaunch.launcher.cli.main", *words, "--rank", "all"]

    platform = "cpu" if given["simulate"] else job.accelerator.platform
    parallel = given["parallel"] or leader.fitting_runs(job.processes, platform)
    return leader.Plan(parallel, metric, is_higher_better, rungs, job.train is not None, command)


def _parse_rungs(text: str) -> list[float]:
    """Return the rungs, the lowest first. Raises UserError for values that are not numbers above 0."""
    try:
        rungs = [float(part) for part in text.split(",")]
    except ValueError:
        rungs = []
    if not rungs or not all(0 < rung < 2**53 for rung in rungs) or sorted(set(rungs)) != rungs:
        raise UserError(f"--rungs {text} is not a list of rising numbers above 0.", f"such as {_RUNGS} or 100,200.")
    return rungs


def _describe_runs(table: Table, members: Sequence[Member]) -> Iterator[str]:
    """Yield the runs in a table, then the best of those that are done, and the command that shows its job."""
    metric = table.of["metric"]
    rows, done = [["RUN", "STATE", metric.upper(), "VALUES"]], dict[str, float]()
    for member in members:
        value = leader.newest_value(member, metric) if member.folder.is_dir() else None
        rows.append([member.name, member.state, "-" if value is None else f"{value:.4g}", " ".join(member.changes)])
        if value is not None and member.state is RunState.DONE:
            done[member.name] = value
    yield from output.format_columns(rows)
    if not done:
        yield f"no run that is done has {metric}"
        return
    best = max(done, key=lambda name: done[name] if table.of["mode"] == "max" else -done[name])
    yield f"best of {count(len(done), 'run')} that are done: {best}, {metric} {done[best]:.4g}"
    path = table.folder / best / "job.yaml"
    yield f"  cat {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"


def _submit(
    table: Table, of: Mapping[str, Any], members: Mapping[str, Member], given: Mapping[str, Any], job_file: Path
) -> int:
    """Submit each run as a job with the sweep's label. Existing jobs are not changed."""
    # Imported here with the clients of a cluster, which a sweep on this machine does not need.
    from jaxlaunch.launcher.cli import submit

    place = [] if given["namespace"] is None else [f"namespace={given['namespace']}"]
    changes = [f"labels.{_LABEL}={of['sweep']}", *place]
    files = [jobs.read(job_file, [*member.changes, f"name={member.name}", *changes]) for member in members.values()]
    if given["is_rehearsal"]:
        submit.submit_jobs(files, given["context"], is_rehearsal=True)
        return 0
    table.folder.mkdir(parents=True, exist_ok=True)
    with run_folders.locked(table.folder, LOCK):
        table.begin(of, members)
        namespace = submit.submit_jobs(files, given["context"], is_rehearsal=False)
        for name in members:
            table.note(table.members[name], RunState.SUBMITTED)
    sweep = of["sweep"]
    output.say(f"`launcher list {sweep}` shows them, `launcher stop {sweep}` stops them (namespace {namespace})")
    return 0
