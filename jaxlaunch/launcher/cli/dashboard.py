"""`launcher dashboard`: the pages of all runs, while they train."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.wording import visible

if TYPE_CHECKING:
    from jaxlaunch.launcher.cli.job_view import JobView
    from jaxlaunch.launcher.kubernetes.client import Cluster
    from jaxlaunch.launcher.report.serving.answers import Listening

VIEWER_S = 10.0  # of one call for a viewer, who waits for the page

Rows = tuple[list[dict[str, Any]], list[str]]  # of jobs, and what could not be read


@click.command("dashboard")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option(
    "-n", "--namespace", "namespaces", multiple=True, help="Also show the jobs of this namespace. Repeatable."
)
@click.option("--context", help="The kubeconfig context to use. [default: the current one]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on. [default: any free one]")
@click.option("--in-cluster", "is_in_cluster", is_flag=True, help="Serve from a pod to viewers who sign in.")
@click.option(
    "--accept-host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="With --in-cluster: a host name by which browsers reach the server, without port. Repeatable.",
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

    FOLDER contains run folders; the default is runs/. With -n or --context the table also has the jobs of a cluster,
    read with your own rights. The server listens only on this machine, and answers only at the address that it
    prints. Ctrl-C ends it.

    With --in-cluster it is what the chart's webDashboard runs: it listens on all addresses of its pod and shows the
    jobs of the namespaces to viewers who bring a token of the cluster, each with the rights of that token alone.
    """
    if is_in_cluster:
        return _serve(_for_viewers(folder, namespaces, context, hosts, port))
    if hosts:
        raise UserError("--accept-host is only for --in-cluster.", "leave it out: the server answers 127.0.0.1 alone.")
    from jaxlaunch.launcher.report.server import Runs, Server

    below: Path | None = folder or run_folders.HOME
    is_cluster = bool(namespaces) or context is not None
    if below is not None and not below.is_dir():
        if folder is not None or not is_cluster:
            raise UserError(f"{below} is not a folder.", "name the folder that holds your runs.")
        below = None
    jobs = _jobs(namespaces, context) if is_cluster else None
    server = Server(Runs(None if below is None else below.absolute(), jobs), port)
    output.show(server.address)
    _serve(server)


def _serve(server: Listening) -> None:
    """Returns at Ctrl-C."""
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.is_closing.set()
    finally:
        server.server_close()


def _for_viewers(
    folder: Path | None, namespaces: Sequence[str], context: str | None, hosts: Sequence[str], port: int
) -> Listening:
    """The server of --in-cluster. Raises UserError for what it does not serve, ClusterError outside a pod."""
    from jaxlaunch.launcher.kubernetes import kubeconfig
    from jaxlaunch.launcher.report.serving.viewers import Server

    if folder is not None or context is not None:
        what = f"the folder {folder}" if folder is not None else f"--context {context}"
        raise UserError(f"--in-cluster and {what} are both given.", "it shows jobs of its own cluster alone.")
    if not namespaces:
        raise UserError("--in-cluster names no namespace.", "name those whose jobs it shows, each with -n NAMESPACE.")
    kubeconfig.pod_server_url()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which process 1 of a pod would not hear of otherwise

    server = Server(_rows_of_viewer, list(dict.fromkeys(namespaces)), hosts, port)
    output.say(f"serving the jobs of {', '.join(namespaces)} on port {server.server_address[1]} to viewers who sign in")
    return server


def _rows_of_viewer(token: str, namespace: str) -> Rows:
    """The jobs of a namespace as whoever the token is of may see them. Raises ClusterError where they may not."""
    from jaxlaunch.launcher.kubernetes.client import Cluster

    cluster = Cluster.of_viewer(token, namespace)
    cluster.hurry(VIEWER_S)
    return _rows(cluster, namespace)


def _jobs(namespaces: Sequence[str], context: str | None) -> Callable[[], Rows]:
    """What reads the jobs of namespaces, with the rights of the caller's kubeconfig and no others."""
    from jaxlaunch.launcher.kubernetes.client import Cluster

    cluster = Cluster.connect(context, output.say)

    def read() -> Rows:
        rows, unread = list[dict[str, Any]](), list[str]()
        for namespace in namespaces or (cluster.namespace,):
            try:
                found, more = _rows(cluster, namespace)
            except ClusterError as error:
                found, more = [], [str(error)]
            rows += found
            unread += more
        return rows, unread

    return read


def _rows(cluster: Cluster, namespace: str) -> Rows:
    """The jobs of a namespace as rows. Raises ClusterError where they cannot be listed."""
    from jaxlaunch.launcher.cli.job_view import ClusterView
    from jaxlaunch.launcher.jobs.status import collect

    found = collect.snapshots(cluster, namespace)
    unread = list(dict.fromkeys(why for seen in found for why in seen.unread))
    return [_row(ClusterView(seen)) for seen in found], unread


def _row(view: JobView) -> dict[str, Any]:
    job = view.status
    return {
        "id": "",
        "page": "",
        "name": visible(job.name),
        "state": job.state.value.lower(),
        "why": visible(view.explanation.headline)[:300],
        "step": job.step,
        "steps": job.steps,
        "goodput": job.goodput,
        "restarts": job.restarts.total,
        "age_s": job.age_s,
        "owner": job.queue or "",
        "where": f"namespace {job.namespace}",
    }
