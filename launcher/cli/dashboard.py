"""`launcher dashboard`: the pages of all runs, while they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.wording import visible

if TYPE_CHECKING:
    from jaxlaunch.launcher.explain.explanation import Explanation
    from jaxlaunch.launcher.status.job_status import JobStatus


@click.command("dashboard")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@options.place("Also show the jobs of this namespace.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on. [default: any free one]")
def dashboard_command(folder: Path | None, namespace: str | None, context: str | None, port: int) -> None:
    """Serve the pages of all runs of FOLDER while they train.

    FOLDER contains run folders; the default is runs/. With -n or --context the table also has the jobs of a cluster,
    read with your own rights. The server listens only on this machine, and answers only at the address that it
    prints. Ctrl-C ends it.
    """
    from jaxlaunch.launcher.seen.server import Runs, Server

    below: Path | None = folder or run_folders.HOME
    is_cluster = namespace is not None or context is not None
    if below is not None and not below.is_dir():
        if folder is not None or not is_cluster:
            raise UserError(f"{below} is not a folder.", "name the folder that holds your runs.")
        below = None
    jobs = _jobs(namespace, context) if is_cluster else None
    server = Server(Runs(None if below is None else below.absolute(), jobs), port)
    output.show(server.address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.is_closing.set()
    finally:
        server.server_close()


def _jobs(namespace: str | None, context: str | None) -> Callable[[], tuple[list[dict[str, Any]], list[str]]]:
    """What reads the jobs of a namespace, with the rights of the caller's kubeconfig and no others."""
    from jaxlaunch.launcher.cluster.client import Cluster
    from jaxlaunch.launcher.explain.explanation import explain
    from jaxlaunch.launcher.status import collect
    from jaxlaunch.launcher.status.job_status import status_of

    cluster = Cluster.connect(context, output.say)
    where = namespace or cluster.namespace

    def read() -> tuple[list[dict[str, Any]], list[str]]:
        try:
            found = collect.snapshots(cluster, where)
        except ClusterError as error:
            return [], [str(error)]
        unread = list(dict.fromkeys(why for seen in found for why in seen.unread))
        return [_row(status_of(seen), explain(seen)) for seen in found], unread

    return read


def _row(job: JobStatus, answer: Explanation) -> dict[str, Any]:
    return {
        "id": "",
        "page": "",
        "name": visible(job.name),
        "state": job.state.value.lower(),
        "why": visible(answer.headline)[:300],
        "step": job.step,
        "steps": job.steps,
        "goodput": job.goodput,
        "restarts": job.restarts.total,
        "age_s": job.age_s,
        "owner": job.queue or "",
        "where": f"namespace {job.namespace}",
    }
