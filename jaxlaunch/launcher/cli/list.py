"""`launcher list`: a table of the runs on this machine and the jobs on a cluster."""

from __future__ import annotations

import collections
import dataclasses
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from jaxlaunch.contract import Key
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.client.job_view import ClusterView, RunView
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.job_status import FINAL_STATES, JobStatus, State
from jaxlaunch.launcher.kubernetes import kubeconfig
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.objects import format_age
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.sweep.table import SweepTable
from jaxlaunch.records.run_numbers import select_metrics

# The namespace of runs on this machine. No namespace of a cluster has parentheses.
LOCAL_NAMESPACE = "(here)"
# The number of nodes shown in a wide row.
_MAX_NODES = 3

# The name of each row, and its jobs or runs. A sweep has several in one row.
Rows = Sequence[tuple[str, Sequence[JobStatus]]]


# --- the table ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The metric of a sweep, by which its runs are sorted."""

    metric: str
    is_higher_better: bool

    def find_value(self, job: JobStatus) -> float | None:
        """Return the newest value of the metric, or None if it is not known."""
        # Rank 0 reports the metrics of evaluations with this prefix.
        return select_metrics(job.metrics).get(self.metric.replace("eval/", "eval_", 1))

    def sort_key(self, jobs: Sequence[JobStatus]) -> tuple[bool, bool, float]:
        """Return the key of a row: runs that are done come first, and of them the best."""
        value = self.find_value(jobs[0])
        order = 0.0 if value is None else -value if self.is_higher_better else value
        return jobs[0].state is not State.DONE, value is None, order

    def make_column(self) -> Column:
        """Return the column with the metric."""

        def render(jobs: Sequence[JobStatus]) -> str:
            value = self.find_value(jobs[0])
            return "-" if value is None else f"{value:.4g}"

        return Column(self.metric.upper(), render)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table: its heading, and the text of a cell for the jobs of a row."""

    heading: str
    render: Callable[[Sequence[JobStatus]], str]
    is_wide: bool = False


def _single_job_column(heading: str, render: Callable[[JobStatus], str | None]) -> Column:
    """Return a column of -o wide, which has no value for several jobs together."""

    def render_jobs(jobs: Sequence[JobStatus]) -> str:
        return (render(jobs[0]) if len(jobs) == 1 else None) or "-"

    return Column(heading, render_jobs, is_wide=True)


def _render_state(jobs: Sequence[JobStatus]) -> str:
    if len(jobs) == 1:
        return jobs[0].state.value
    counts = collections.Counter(job.state for job in jobs)
    return ",".join(f"{state.value}:{number}" for state, number in counts.items())


def _render_hosts(jobs: Sequence[JobStatus]) -> str:
    # Jobs that have ended need no hosts.
    live = [job for job in jobs if job.state not in FINAL_STATES]
    if not live:
        return str(max(job.hosts for job in jobs))
    is_known = all(job.ready is not None for job in live)
    ready = str(sum(job.ready or 0 for job in live)) if is_known else "?"
    return f"{ready}/{sum(job.hosts for job in live)}"


def _render_step(jobs: Sequence[JobStatus]) -> str:
    if all(job.step is None for job in jobs):
        return "-"
    step = str(sum(job.step or 0 for job in jobs))
    if any(job.steps is None for job in jobs):
        return step
    return f"{step}/{sum(job.steps or 0 for job in jobs)}"


def _render_nodes(job: JobStatus) -> str:
    hidden = len(job.nodes) - _MAX_NODES
    return ",".join(job.nodes[:_MAX_NODES]) + (f" +{hidden}" if hidden > 0 else "")


def _render_loss(job: JobStatus) -> str | None:
    loss = select_metrics(job.metrics).get(Key.LOSS)
    return None if loss is None else f"{loss:.4g}"


# The help of -o lists the wide columns.
COLUMNS = (
    Column("STATE", _render_state),
    Column("HOSTS", _render_hosts),
    Column("STEP", _render_step),
    Column("RESTARTS", lambda jobs: str(sum(job.restart_counts.total for job in jobs))),
    Column("AGE", lambda jobs: format_age(max(job.age_s for job in jobs))),
    _single_job_column("PHASE", lambda job: job.phase),
    _single_job_column(
        "CHECKPOINT", lambda job: None if job.committed is None else str(job.committed)
    ),
    _single_job_column(
        "GOODPUT", lambda job: None if job.goodput is None else f"{job.goodput:.1%}"
    ),
    _single_job_column("LOSS", _render_loss),
    _single_job_column("QUEUE", lambda job: job.queue),
    _single_job_column("NODES", _render_nodes),
)


def format_table(rows: Rows, with_namespace: bool, is_wide: bool) -> list[str]:
    """Return the table as lines."""
    return output.format_columns(_make_table(rows, with_namespace, is_wide))


def _make_table(
    rows: Rows, with_namespace: bool, is_wide: bool, ranking: Ranking | None = None
) -> list[list[str]]:
    """Return the cells of the table, with a row of headings."""
    columns = [column for column in COLUMNS if is_wide or not column.is_wide]
    if ranking is not None:
        columns.append(ranking.make_column())
        rows = sorted(rows, key=lambda row: ranking.sort_key(row[1]))
    table = [["NAME", *(column.heading for column in columns)]]
    table += [[name, *(column.render(jobs) for column in columns)] for name, jobs in rows]
    if with_namespace:
        places = ["NAMESPACE", *(jobs[0].namespace or LOCAL_NAMESPACE for _, jobs in rows)]
        table = [[place, *row] for place, row in zip(places, table, strict=True)]
    return table


# --- the command ----------------------------------------------------------------------------------

_WIDE_HEADINGS = ", ".join(column.heading for column in COLUMNS if column.is_wide)


@click.command("list")
@click.argument(
    "folder", metavar="[FOLDER]", default=run_folders.RUNS_FOLDER, type=click.Path(path_type=Path)
)
@options.cluster_options("The namespace to list. [default: the context's]")
@click.option("-A", "--all-namespaces", is_flag=True, help="List all namespaces.")
@options.location_options
@options.screen_output_option(
    f"The form of the output; wide adds {_WIDE_HEADINGS}; name is what other commands take.", "name"
)
@options.watch_option
def list_command(
    folder: Path,
    namespace: str | None,
    all_namespaces: bool,
    context: str | None,
    location: str | None,
    output_format: str | None,
) -> None:
    """List the runs here, and the jobs that launcher submitted.

    The runs are those below FOLDER, by default runs/, or those of the sweep with that name, which
    begin with the best by the sweep's metric. A sweep below FOLDER has one row, with the number of
    its runs in each state; -o json and -o yaml have its runs one by one. With -n, -A, --context or
    --cluster, only the cluster's jobs are listed; with FOLDER or --local, only the runs.
    """
    sweep_folder = run_folders.find_sweep(str(folder))
    sweep = None if sweep_folder is None else SweepTable(sweep_folder)
    ranking = None if sweep is None else _find_ranking(sweep)
    if sweep is not None and (target := sweep.settings.get("cluster")) is not None:
        namespace, context = target["namespace"], target["context"]
        jobs, _, _ = _read_cluster_jobs(namespace, False, context, is_required=True)
        members = [job for job in jobs if job.name in sweep.members]
        _show_jobs(members, output_format, ranking=ranking)
        return
    folder, has_folder = sweep_folder or folder, folder != run_folders.RUNS_FOLDER
    asks_cluster = (
        location == "cluster" or all_namespaces or namespace is not None or context is not None
    )
    if asks_cluster and (location == "local" or has_folder):
        raise UserError(
            "A folder and --local select this machine; -n, -A, --context and --cluster select a "
            "cluster."
        )
    if has_folder and not folder.is_dir():
        message = f"{folder} is neither a folder with runs nor a sweep."
        name = shlex.quote(folder.name)
        raise UserError(message, f"`launcher list` lists all; `launcher status {name}` shows one.")
    runs = [] if asks_cluster else [RunView(run).status for run in run_folders.list_runs(folder)]
    jobs, empty_message, error = list[JobStatus](), "", None
    if location != "local" and not has_folder:
        jobs, empty_message, error = _read_cluster_jobs(
            namespace, all_namespaces, context, is_required=asks_cluster
        )
    if error is not None and not runs and not jobs:
        raise error
    if runs or jobs or output_format in ("json", "yaml", "name"):
        with_namespace = all_namespaces or bool(runs and jobs)
        _show_jobs(
            [*runs, *jobs],
            output_format,
            with_namespace=with_namespace,
            home=folder,
            ranking=ranking,
        )
    else:
        no_runs = "" if asks_cluster else f"There are no runs in the folder {folder}. "
        output.show_messages(f"{no_runs}{empty_message}".rstrip())
    if error is not None:
        raise error


def _show_jobs(
    jobs: Sequence[JobStatus],
    output_format: str | None,
    *,
    with_namespace: bool = False,
    home: Path | None = None,
    ranking: Ranking | None = None,
) -> None:
    if output_format == "name":
        output.show_lines(*map(_qualify_name, jobs))
    elif output_format in ("json", "yaml"):
        output.show_data([job.to_json() for job in jobs], output_format)
    else:
        rows, is_wide = _group_rows(jobs, home), output_format == "wide"
        table = _make_table(rows, with_namespace, is_wide, ranking)
        output.show_table(table, table[0].index("STATE"))


def _find_ranking(sweep: SweepTable) -> Ranking | None:
    """Return the metric of a sweep, or None if its file does not have it."""
    metric, mode = (sweep.settings.get(key) for key in ("metric", "mode"))
    return Ranking(metric, mode == "max") if isinstance(metric, str) else None


def _qualify_name(job: JobStatus) -> str:
    """Return the name of a job, or the path of a run, which no job can have as its name."""
    return job.name if job.folder is None else os.path.relpath(job.folder)


def _read_cluster_jobs(
    namespace: str | None, all_namespaces: bool, context: str | None, *, is_required: bool
) -> tuple[list[JobStatus], str, ClusterError | None]:
    """Return the cluster's jobs, a message for the case of no jobs, and the error of the cluster.

    With `is_required` the error is raised.
    """
    try:
        cluster = Cluster.connect(context, output.show_messages)
    except ClusterError as error:
        if is_required:
            raise
        return ([], "", error) if kubeconfig.has_kubeconfig() else ([], str(error), None)
    place = None if all_namespaces else namespace or cluster.namespace
    try:
        snapshots = collect.read_snapshots(cluster, place)
    except ClusterError as error:
        if is_required:
            raise
        return [], "", error
    unread = dict.fromkeys(reason for snapshot in snapshots for reason in snapshot.unread)
    output.show_messages(*unread)
    empty_message = f"There are no jobs in {f'namespace {place}' if place else 'any namespace'}."
    return [ClusterView(snapshot).status for snapshot in snapshots], empty_message, None


def _group_rows(jobs: Sequence[JobStatus], home: Path | None) -> Rows:
    """Return a row for each job and run, and one for all runs of a sweep in the folder `home`."""
    groups = dict[tuple[str, str, str | None], list[JobStatus]]()
    home_path = None if home is None else os.path.abspath(home)
    for job in jobs:
        key: tuple[str, str, str | None] = (job.namespace, job.name, None)
        if home_path is not None and job.folder is not None:
            parent = os.path.dirname(os.path.abspath(job.folder))
            if parent != home_path:
                key = ("", os.path.basename(parent), parent)
        groups.setdefault(key, []).append(job)
    return [(name, group) for (_, name, _), group in groups.items()]
