"""`launcher report`, `compare` and `dashboard`: pages of one run, of several, or of all."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.cli.screen_lines import Paragraph
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run_folders import RoleTable
from jaxlaunch.launcher.wording import escape_controls
from jaxlaunch.runs import layout

if TYPE_CHECKING:
    from jaxlaunch.launcher.report.server import PageServer

# Timeout of one call for a viewer, who waits for the page.
VIEWER_TIMEOUT_S = 10.0


@click.command("report")
@options.run_argument
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    help="The file to write. [default: RUN.html]",
)
@click.option(
    "--pictures",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write each picture as SVG and PNG.",
)
def report_command(run: str, path: Path | None, pictures: Path | None) -> None:
    """Write the page of RUN: one HTML file.

    RUN is the name of a run or a sweep on this machine, or its folder. The page shows the state of
    the run and where every second went, above the loss on the same axis, and curves, attempts,
    checkpoints and logs. That of a sweep shows its runs by their metric, their curves, and the
    metric by swept key. It needs no network.
    """
    from jaxlaunch.launcher.report import page
    from jaxlaunch.launcher.report.run import RunReader

    if run_folders.find_run(run) is None and (sweep := run_folders.find_sweep(run)) is not None:
        from jaxlaunch.launcher.report import sweep_page

        if pictures is not None:
            raise UserError("--pictures is for one run.", "name a run of the sweep.")
        data = sweep_page.read_page(sweep)
        file = path or Path(f"{sweep.name}.html")
        output.write_page(file, page.render_page("sweep", data["name"], data))
        return
    folder = run_folders.resolve_folder(run)
    file = path or Path(f"{folder.name}.html")
    if (table := run_folders.read_role_table(folder)) is None:
        data = RunReader(folder).read_report().to_json()
    else:
        data = _read_job_with_roles(folder, table)
    output.write_page(file, page.render_page("run", data["name"], data))
    if pictures is not None:
        from jaxlaunch.launcher.report.plots import write_pictures

        output.show_lines(*map(str, write_pictures(data, pictures)))


def _read_job_with_roles(folder: Path, table: RoleTable) -> dict[str, Any]:
    """Return the data of the page of a job: that of its lead, with the states of all roles."""
    from jaxlaunch.launcher.report.run import RunReader

    data = RunReader(folder / table.lead).read_report().to_json()
    states = []
    for name in table.names:
        text = "has not started"
        if layout.is_run(folder / name):
            text = RunReader(folder / name).read_report().describe_state()["text"]
        states.append((f"role {name}", text))
    name = escape_controls(f"{folder.name}, role {table.lead}")
    return data | {"name": name, "facts": [*states, *data["facts"]]}


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, shell_complete=options.complete_runs)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="A metric to compare. [default: the loss]",
)
@click.option(
    "--at",
    "axis",
    type=click.Choice(["step", "hour", "examples"]),
    default="step",
    help="The axis of the curves. [default: step]",
)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    help="Also write a page, one HTML file.",
)
def compare_command(
    runs: tuple[str, ...], metrics: tuple[str, ...], axis: str, path: Path | None
) -> None:
    """Compare RUNS: the differences between their jobs, and their curves.

    Each of RUNS is the name of a run on this machine, or its folder; the name of a sweep stands for
    all of its runs. The table begins with the run that has the best value of the first metric.
    Hours count the time in which a run had processes or waited for them, but not the time between
    two starts.
    """
    from jaxlaunch.launcher.report import compare, page, plots
    from jaxlaunch.launcher.report.run import RunReader

    folders = list[Path]()
    for run in runs:
        if (sweep := run_folders.find_sweep(run)) is not None:
            folders += [member.folder for member in run_folders.list_runs(sweep)]
        else:
            folders.append(run_folders.resolve_folder(run))
    if len(folders) < 2:
        raise UserError("compare needs two runs or more.", "name another run after the first.")
    reports = [RunReader(folder).read_report() for folder in folders]
    data = compare.compare_runs(reports, metrics, axis)
    ranking = compare.find_ranking(reports, metrics)
    output.show_table(compare.summary_table(data, ranking), 1)
    if data["differs"]:
        rows = [["KEY", *(run["name"] for run in data["runs"])]]
        rows += [[key, *values] for key, values in data["differs"]]
        output.show_lines("", *output.format_columns(rows))
    losses = [name for name in ("eval/loss", "loss") if name in data["columns"]]
    for metric in metrics or losses[:1]:
        lines = compare.curve_lines(reports, metric, axis)
        *plot, legend = plots.draw_plot(lines, axis, output.result_width()) or [""]
        output.show_lines("", metric, *plot, Paragraph(legend))
    if path is not None:
        output.write_page(path, page.render_page("compare", "Compare", data))


@click.command("dashboard")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option(
    "-n",
    "--namespace",
    "namespaces",
    multiple=True,
    help="Also show the jobs of this namespace. Repeatable.",
)
@click.option("--context", help="The kubeconfig context to use. [default: the current one]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The port to listen on. [default: any free one]",
)
@click.option(
    "--in-cluster", "is_in_cluster", is_flag=True, help="Serve from a pod to viewers who sign in."
)
@click.option(
    "--accept-host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="With --in-cluster: a host name by which browsers reach the server, without port. "
    "Repeatable.",
)
def dashboard_command(
    folder: Path | None,
    namespaces: tuple[str, ...],
    context: str | None,
    port: int,
    is_in_cluster: bool,
    hosts: tuple[str, ...],
) -> None:
    """Serve the pages of all runs of FOLDER while they train.

    FOLDER contains run folders; the default is runs/. With -n or --context the table also has the
    jobs of a cluster, read with your own rights. The server listens only on this machine, and
    answers only at the address that it prints. Ctrl-C ends it.

    The chart's webDashboard runs it with --in-cluster: it then listens on all addresses of its pod,
    and shows jobs to viewers who sign in with a token of the cluster, using only the permissions of
    that token.
    """
    server: PageServer
    if is_in_cluster:
        server = _make_viewers_server(folder, namespaces, context, hosts, port)
    else:
        if hosts:
            message = "--accept-host is only for --in-cluster."
            raise UserError(message, "leave it out: the server answers only on 127.0.0.1.")
        server = _make_runs_server(folder, namespaces, context, port)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.is_closing.set()
    finally:
        server.server_close()


def _make_runs_server(
    folder: Path | None, namespaces: Sequence[str], context: str | None, port: int
) -> PageServer:
    """Return the server of the runs here and the jobs of namespaces. Prints its address."""
    from jaxlaunch.launcher.report.server import RunCatalog, Server

    runs_folder: Path | None = folder or run_folders.RUNS_FOLDER
    has_cluster = bool(namespaces) or context is not None
    if runs_folder is not None and not runs_folder.is_dir():
        if folder is not None or not has_cluster:
            raise UserError(
                f"{runs_folder} is not a folder.", "name the folder that holds your runs."
            )
        runs_folder = None
    jobs, shown_namespaces = None, tuple(dict.fromkeys(namespaces))
    if has_cluster:
        from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
        from jaxlaunch.launcher.kubernetes.client import Cluster
        from jaxlaunch.launcher.report.cluster_jobs import ClusterJobs

        cluster = Cluster.connect(context, output.show_messages)
        jobs = ClusterJobs(cluster, explain_job)
        shown_namespaces = shown_namespaces or (cluster.namespace,)
    path = None if runs_folder is None else runs_folder.absolute()
    server = Server(RunCatalog(path, jobs, shown_namespaces), port)
    output.show_lines(server.page_url)
    return server


def _make_viewers_server(
    folder: Path | None,
    namespaces: Sequence[str],
    context: str | None,
    hosts: Sequence[str],
    port: int,
) -> PageServer:
    """Return the server of --in-cluster. Raises UserError, and ClusterError outside of a pod."""
    from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
    from jaxlaunch.launcher.kubernetes import kubeconfig
    from jaxlaunch.launcher.kubernetes.client import connect_as_viewer
    from jaxlaunch.launcher.report.cluster_jobs import ClusterJobs
    from jaxlaunch.launcher.report.viewers import Server

    if folder is not None or context is not None:
        conflict = f"the folder {folder}" if folder is not None else f"--context {context}"
        message = f"--in-cluster cannot be combined with {conflict}."
        raise UserError(message, "it shows the jobs of the cluster that it runs in, and no others.")
    if not namespaces:
        message = "--in-cluster needs a namespace."
        raise UserError(message, "name those whose jobs it shows, each with -n NAMESPACE.")
    kubeconfig.pod_server_url()
    # Process 1 of a pod ignores signals that have no handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def open_jobs(token: str) -> ClusterJobs:
        cluster = connect_as_viewer(token, namespaces[0])
        cluster.limit_call_time(VIEWER_TIMEOUT_S)
        return ClusterJobs(cluster, explain_job)

    server = Server(open_jobs, list(dict.fromkeys(namespaces)), hosts, port)
    audience = f"on port {server.server_address[1]} to viewers who sign in"
    output.show_messages(f"serving the jobs of {', '.join(namespaces)} {audience}")
    return server
