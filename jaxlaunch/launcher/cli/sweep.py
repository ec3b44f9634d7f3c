"""`launcher sweep`: one job with several values of its keys, here or on a cluster."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxlaunch import contract
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cli.screen_lines import Paragraph, make_paragraph, render_line
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.kubernetes.labels import SWEEP_LABEL
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.report.headline import LOWER_IS_BETTER
from jaxlaunch.launcher.sweep import grid, runner
from jaxlaunch.launcher.sweep.table import LOCK, Member, RunState, SweepTable
from jaxlaunch.launcher.wording import format_count
from jaxlaunch.runs import layout

_RUNGS = "0.25,0.5"
# Keys that the sweep itself sets.
_SWEEP_KEYS = ("name", f"labels.{SWEEP_LABEL}")


@click.command("sweep")
@options.job_arguments
@options.folder_options
@click.option(
    "--name", help="The sweep's name: its folder below runs/. [default: the job's, with -sweep]"
)
@click.option(
    "--random",
    "draw_count",
    type=click.IntRange(1),
    metavar="N",
    help="Draw N combinations at random; allows ranges.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for --random.")
@click.option(
    "--max",
    "limit",
    type=click.IntRange(1),
    metavar="N",
    help="Run only the first N of the combinations.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1),
    metavar="N",
    help="Runs at a time. [default: as many as the CPUs allow]",
)
@click.option(
    "--metric",
    help="The metric of the best run. [default: checkpoint.best, else eval/loss, else loss]",
)
@click.option(
    "--mode",
    type=click.Choice(["min", "max"]),
    help="Which values are better; not needed for a loss.",
)
@click.option("--halving", is_flag=True, help="At each rung, stop the half whose metric is worse.")
@click.option(
    "--rungs",
    default=_RUNGS,
    show_default=True,
    help="Fractions of the steps, or numbers of steps.",
)
@click.option("--retry", is_flag=True, help="Also restart runs that have failed.")
@click.option(
    "--dry-run",
    "is_rehearsal",
    is_flag=True,
    help="Print the runs, or the manifests, and create nothing.",
)
@click.option("--simulate", is_flag=True, help="Use virtual CPU devices instead of GPUs or TPUs.")
@click.option(
    "--cluster",
    "is_on_cluster",
    is_flag=True,
    help="Submit the runs as jobs, into the job's queue.",
)
@options.cluster_options("Where they run on a cluster. [default: the job's, else the context's]")
def sweep_command(job_file: Path, overrides: tuple[str, ...], **settings: Any) -> int:
    """Run JOB_FILE with several values of its keys.

    Separate the values of a key with commas (train.optimizer.lr=1e-3,3e-3), or give a range of
    whole numbers that includes both ends (train.seed=0..2); every combination is a run. --random N
    draws N combinations, and a key may then have a range such as 1e-4..1e-1. If you repeat the
    command, it skips runs that are done and resumes those that were stopped or killed.
    """
    axes, limit = grid.parse_axes(overrides), settings["limit"]
    if settings["draw_count"] is None:
        points = grid.make_grid(axes, limit)
    else:
        points = grid.draw_points(axes, settings["draw_count"], settings["seed"])[:limit]
    base = jobs.load_job(job_file, points[0])
    name = settings["name"] or f"{base.name}-sweep"
    folder = (settings["run_dir"] or run_folders.RUNS_FOLDER / name).absolute()
    is_on_cluster = any(settings[key] for key in ("is_on_cluster", "namespace", "context"))
    cluster = {key: settings[key] for key in ("namespace", "context")} if is_on_cluster else None
    members = {member.name: member for member in _make_members(job_file, points, name, folder)}
    table = SweepTable(folder)
    metric, is_higher_better = _choose_metric(base, settings["metric"], settings["mode"])
    sweep_settings = {
        "sweep": name,
        "metric": metric,
        "mode": "max" if is_higher_better else "min",
        "cluster": cluster,
    }
    if cluster is not None and settings["halving"]:
        message = "--halving stops runs of this machine: on a cluster, no process watches them."
        raise UserError(message, "leave it out.")
    if cluster is not None:
        return _submit_members(table, sweep_settings, members, settings, job_file)
    if settings["is_rehearsal"]:
        rows = [
            ["RUN", "VALUES"],
            *([member.name, " ".join(member.changes)] for member in members.values()),
        ]
        output.show_lines(*output.format_columns(rows))
        return 0
    plan = _make_plan(base, job_file, metric, is_higher_better, settings)
    folder.mkdir(parents=True, exist_ok=True)
    with run_folders.hold_lock(folder, LOCK) as lock:
        table.record_sweep(sweep_settings, members)
        runs = [table.members[name] for name in members]
        for member in runs:
            if settings["retry"] and member.state is RunState.FAILED:
                table.record_state(member, RunState.WAITING)
        show = None
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            show = _show_progress
        sweep_runner = runner.SweepRunner(table, runs, plan, output.show_messages, show)
        sweep_runner.run_members(lock)
    _show_runs(table, runs)
    if sweep_runner.is_stopped:
        return contract.PREEMPTED
    return int(any(member.state is RunState.FAILED for member in runs))


def _make_members(
    job_file: Path, points: Sequence[grid.Point], name: str, folder: Path
) -> Iterator[Member]:
    """Yield the runs. Raises JobFaultsError for an invalid job, before any run is started."""
    for number, point in enumerate(points):
        run = f"{name}-{number:03}"
        for key in _SWEEP_KEYS:
            if any(change.startswith(f"{key}=") for change in point):
                message = f"{key} cannot be swept, because the sweep sets it for each run."
                raise UserError(message, f"leave out {key}; --name names the sweep.")
        yield Member(run, folder / run, list(point), _digest_job(job_file, point, run))


def _digest_job(job_file: Path, changes: Sequence[str], name: str) -> str:
    job = jobs.load_job(job_file, [*changes, f"name={name}"])
    return hashlib.sha256(jobs.dump_job(job).encode()).hexdigest()


def _choose_metric(job: JobSpec, metric: str | None, mode: str | None) -> tuple[str, bool]:
    """Return the metric, and whether higher values are better. Raises UserError if unknown."""
    best = None if job.train is None else job.train.checkpoint.best
    if metric is None:
        is_evaluated = job.train is not None and job.train.eval.every is not None
        metric = best.metric if best is not None else "eval/loss" if is_evaluated else "loss"
    if mode is None and best is not None and best.metric == metric:
        mode = best.mode
    if mode is None and not metric.endswith(LOWER_IS_BETTER):
        raise UserError(f"Which values of {metric} are better?", "add --mode min or --mode max.")
    return metric, mode == "max"


def _make_plan(
    job: JobSpec, job_file: Path, metric: str, is_higher_better: bool, settings: Mapping[str, Any]
) -> runner.SweepPlan:
    rungs = _parse_rungs(settings["rungs"]) if settings["halving"] else []
    if job.train is None and any(rung < 1 for rung in rungs):
        message = "How many steps this program makes is not known."
        raise UserError(message, "give --rungs in steps, such as 100,200.")

    def make_command(member: Member) -> list[str]:
        """Return the command of a run. Raises UserError if its job has changed."""
        if _digest_job(job_file, member.changes, member.name) != member.job_digest:
            message = f"{job_file} has changed since the sweep began."
            raise UserError(message, "restore it, or begin another sweep.")
        program = [sys.executable, "-P", "-m", "jaxlaunch.launcher.cli.main"]
        run = ["run", str(job_file), *member.changes, f"name={member.name}"]
        run += ["--run-dir", str(member.folder), "--rank", "all"]
        run += [f"--volume={volume}" for volume in settings["volumes"]]
        return program + run + ["--simulate"] * settings["simulate"]

    platform = "cpu" if settings["simulate"] else job.accelerator.platform
    return runner.SweepPlan(
        parallel=settings["parallel"] or runner.count_fitting_runs(job.processes, platform),
        metric=metric,
        is_higher_better=is_higher_better,
        rungs=rungs,
        may_pause=job.train is not None,
        make_command=make_command,
    )


def _parse_rungs(text: str) -> list[float]:
    try:
        rungs = [float(part) for part in text.split(",")]
    except ValueError:
        rungs = []
    if not rungs or not all(0 < rung < 2**53 for rung in rungs) or sorted(set(rungs)) != rungs:
        message = f"--rungs {text} is not a list of rising numbers above 0."
        raise UserError(message, f"such as {_RUNGS} or 100,200.")
    return rungs


def _show_progress(lines: Sequence[str]) -> None:
    """Show the runs that train as paragraphs, in at most half of the rows of the terminal."""
    max_rows, width = max(1, shutil.get_terminal_size().lines // 2), output.status_width()
    paragraphs, row_count = list[Paragraph](), 0
    for paragraph in map(make_paragraph, lines):
        row_count += len(render_line(paragraph, width, has_colours=False))
        if row_count > max_rows and paragraphs:
            break
        paragraphs.append(paragraph)
    hidden = len(lines) - len(paragraphs)
    output.show_status(*paragraphs, *([f"and {hidden} more"] if hidden > 0 else ()))


def _show_runs(table: SweepTable, members: Sequence[Member]) -> None:
    """Show the table of the runs, the best of the finished ones first, and name the best."""
    metric = table.settings["metric"]
    sign = 1 if table.settings["mode"] == "max" else -1
    rows_by_key = list[tuple[tuple[bool, bool, float], list[str]]]()
    done = dict[str, float]()
    for member in members:
        has_folder = member.folder.is_dir()
        step, value = runner.newest_values(member, metric) if has_folder else ("-", None)
        text = "-" if value is None else f"{value:.4g}"
        is_done = member.state is RunState.DONE
        if value is not None and is_done:
            done[member.name] = value
        sort_key = not is_done, value is None, -sign * (value or 0.0)
        row = [member.name, member.state.value, step, text, " ".join(member.changes)]
        rows_by_key.append((sort_key, row))
    rows = [row for _, row in sorted(rows_by_key, key=lambda item: item[0])]
    output.show_table([["RUN", "STATE", "STEP", metric.upper(), "VALUES"], *rows], 1)
    if not done:
        output.show_lines(f"no run that is done has {metric}")
        return
    best = max(done, key=lambda name: sign * done[name])
    runs = f"{format_count(len(done), 'run')} that are done"
    path, cwd = table.folder / best / layout.JOB, Path.cwd()
    output.show_lines(
        f"best of {runs}: {best}, {metric} {done[best]:.4g}",
        f"  cat {path.relative_to(cwd) if path.is_relative_to(cwd) else path}",
    )


def _submit_members(
    table: SweepTable,
    sweep_settings: Mapping[str, Any],
    members: Mapping[str, Member],
    settings: Mapping[str, Any],
    job_file: Path,
) -> int:
    """Submit each run as a job with the sweep's label. Existing jobs are not changed."""
    # Imported here, because a sweep on this machine does not need the client of a cluster.
    from jaxlaunch.launcher.cli import submit

    sweep, context = sweep_settings["sweep"], settings["context"]
    changes = [f"labels.{SWEEP_LABEL}={sweep}"]
    if settings["namespace"] is not None:
        changes.append(f"namespace={settings['namespace']}")
    overrides = [[*member.changes, f"name={member.name}", *changes] for member in members.values()]
    if settings["is_rehearsal"]:
        files = [jobs.read_job(job_file, changes) for changes in overrides]
        submit.print_manifests(files, context)
        return 0
    # A job that cannot be submitted must not leave a recorded sweep behind.
    submissions, namespace = submit.prepare_submissions(job_file, overrides, context)
    table.folder.mkdir(parents=True, exist_ok=True)
    with run_folders.hold_lock(table.folder, LOCK):
        table.record_sweep(sweep_settings, members)
        submit.submit_all(submissions)
        for name in members:
            table.record_state(table.members[name], RunState.SUBMITTED)
    commands = f"`launcher list {sweep}` shows them, `launcher stop {sweep}` stops them"
    output.show_messages(f"{commands} (namespace {namespace})")
    return 0
