"""`launcher exec`, `shell`, `port-forward` and `copy`: enter the pod of a rank."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import click

from jaxlaunch import contract
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.client import job_view
from jaxlaunch.launcher.errors import ClusterError, UserError
from jaxlaunch.launcher.jobs.exec import enter_rank, rank_pod
from jaxlaunch.launcher.jobs.exec.rank_pod import RankPod
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.wording import format_count, format_size

rank_option = click.option(
    "-r", "--rank", type=click.IntRange(0), metavar="N", help="The rank. [default: 0]"
)
# kubectl and docker need these to give a command a terminal.
_ignored_options = click.option(
    "-i", "-t", is_flag=True, hidden=True, expose_value=False, help="Accepted for kubectl's users."
)


@click.command("exec")
@options.first_name_argument
@click.argument("command", metavar="COMMAND...", nargs=-1, required=True)
@options.cluster_options()
@options.location_options
@rank_option
@click.option("--host", type=click.IntRange(0), metavar="N", help="The host, in place of a rank.")
@_ignored_options
def exec_command(
    name: str,
    command: tuple[str, ...],
    namespace: str | None,
    context: str | None,
    location: str | None,
    rank: int | None,
    host: int | None,
) -> int:
    """Run COMMAND next to a rank of job JOB_NAME, or of a run here.

    It starts in the folder of the rank's process and with its environment, but does not join the
    gang or report as the rank. Its exit code is that of COMMAND. Write `--` before a COMMAND with
    options. If stdin and stdout are terminals, COMMAND has one, too.
    """
    if rank is not None and host is not None:
        raise UserError("--rank and --host cannot be combined.", "give one of them.")
    if len(command) == 1 and command[0].endswith((".yaml", ".yml")):
        file = command[0]
        hint = f"`launcher submit {file}` runs it on a cluster, `launcher run {file}` here."
        raise UserError(f"{file} is a job file, not a command.", hint)
    return _enter(name, command, namespace, context, location, rank, host)


@click.command("shell")
@options.name_argument
@options.cluster_options()
@options.location_options
@rank_option
def shell_command(
    name: str, namespace: str | None, context: str | None, location: str | None, rank: int | None
) -> int:
    """Open a shell next to a rank of job JOB_NAME, or of a run here.

    The shell is bash, or else sh, and has the folder and the environment of the rank's process.
    """
    return _enter(name, (), namespace, context, location, rank, None)


def _enter(
    name: str,
    command: Sequence[str],
    namespace: str | None,
    context: str | None,
    location: str | None,
    rank: int | None,
    host: int | None,
) -> int:
    if (
        run := job_view.find_local_run(name, namespace, context, location, output.show_messages)
    ) is not None:
        per_host = 1 if run.job is None else run.job.process_count_per_host
        _enter_run(run, command, (host or 0) * per_host if rank is None else rank)
    pod = _find_pod(name, namespace, context, location, rank, host)
    # Imported here, because it is not needed for a run of this machine.
    from jaxlaunch.launcher.cli import terminal

    return terminal.run_in_pod(pod, command)


def _enter_run(run: Run, command: Sequence[str], rank: int) -> NoReturn:
    """Replace this process by a command next to a rank of a run here. Raises UserError."""
    start = run.newest_start
    place = None
    if run.holder is not None and start is not None:
        place = enter_rank.find_rank(rank, {contract.UID: start.uid})
    if place is None:
        hint = f"`launcher status {run.name} -o wide` shows its ranks; its folder is {run.folder}."
        raise UserError(f"Rank {rank} of {run.name} has no process on this machine now.", hint)
    sys.stdout.flush()
    folder, environ = place
    enter_rank.start_command(
        command, folder, enter_rank.enter_environ(environ, rank_pod.new_entry())
    )


def _find_pod(
    name: str,
    namespace: str | None,
    context: str | None,
    location: str | None,
    rank: int | None,
    host: int | None = None,
) -> RankPod:
    cluster = job_view.connect_cluster(name, context, location, output.show_messages)
    return rank_pod.find_pod(cluster, namespace or cluster.namespace, name, rank, host)


def _refuse_run(name: str, namespace: str | None, context: str | None, advice: str) -> None:
    """Raise UserError if the name is that of a run here."""
    run = job_view.find_local_run(name, namespace, context, None, output.show_messages)
    if run is not None:
        raise UserError(f"{name} is a run on this machine.", advice.format(folder=run.folder))


# --- ports ----------------------------------------------------------------------------------------


@click.command("port-forward")
@options.first_name_argument
@click.argument("ports", metavar="PORT[:POD_PORT]")
@options.cluster_options()
@rank_option
def port_forward_command(
    name: str, ports: str, namespace: str | None, context: str | None, rank: int | None
) -> int:
    """Forward PORT of this machine to a rank of job JOB_NAME.

    Connections to 127.0.0.1:PORT reach POD_PORT, by default the same, in the rank's pod, until
    Ctrl-C. PORT 0 takes a free one.
    """
    local_text, _, pod_text = ports.partition(":")
    try:
        local_port, pod_port = int(local_text), int(pod_text or local_text)
        if not (0 <= local_port < 65536 and 0 < pod_port < 65536):
            raise ValueError
    except ValueError:
        message = f"{ports} is not PORT or PORT:POD_PORT."
        raise UserError(message, "such as 8888, or 8888:80.") from None
    _refuse_run(name, namespace, context, f"connect to 127.0.0.1:{pod_port}.")
    pod = _find_pod(name, namespace, context, None, rank)
    try:
        server = socket.create_server(("127.0.0.1", local_port))
    except OSError as error:
        message = f"Port {local_port} of this machine is not free: {error.strerror}."
        raise UserError(message, f"0:{pod_port} takes a free one.") from None
    with server:
        # A missing right is reported at once.
        pod.open_port(pod_port).shutdown()
        local_port = server.getsockname()[1]
        output.show_lines(f"127.0.0.1:{local_port} -> {pod.pod}:{pod_port}")
        while True:
            client = server.accept()[0]
            thread = threading.Thread(target=_forward, args=(pod, pod_port, client), daemon=True)
            thread.start()


def _forward(pod: RankPod, port: int, client: socket.socket) -> None:
    """Serve one connection to the forwarded port."""
    import websocket

    with client:
        try:
            tunnel = pod.open_port(port)
            try:
                streams.relay_connection(tunnel, client)
            finally:
                # `close` would leave the socket open if the pod has closed the connection.
                tunnel.shutdown()
        except streams.ForwardError as error:
            output.show_messages(f"port {port} of pod {pod.pod}: {error}")
        except (ClusterError, OSError, websocket.WebSocketException) as error:
            output.show_messages(f"the connection to port {port} of pod {pod.pod} ended: {error}")


# --- files ----------------------------------------------------------------------------------------


@click.command("copy")
@click.argument("source")
@click.argument("target")
@options.cluster_options()
@rank_option
def copy_command(
    source: str, target: str, namespace: str | None, context: str | None, rank: int | None
) -> int:
    """Copy a file or a folder from a rank's pod, or into it.

    One of SOURCE and TARGET is JOB_NAME:PATH, where a relative PATH begins at the folder of the
    rank's process. A copy that was cut continues, in a later call too, and every file is compared
    by its digest. Files that the target already has are not sent.
    """
    source_job, target_job = _split_job(source), _split_job(target)
    if (source_job is None) == (target_job is None):
        message = f"One of {source} and {target} must be JOB_NAME:PATH, and the other a path here."
        raise UserError(message, "such as `launcher copy digits:/tmp/profile .`.")
    name, pod_path = source_job or target_job or ("", "")
    _refuse_run(name, namespace, context, "`cp` copies its files; its folder is {folder}.")
    pod = _find_pod(name, namespace, context, None, rank)
    from jaxlaunch.launcher.jobs.exec import copy

    is_download = source_job is not None
    transfer = copy.Copy(copy.PodSide(pod), is_download=is_download, say=output.show_messages)
    paths = (pod_path, target) if is_download else (source, pod_path)
    counts = transfer.run(*paths)
    details = [format_count(counts.files, "file"), format_size(counts.sent_bytes)]
    if counts.resumed_bytes:
        details.append(f"continued after {format_size(counts.resumed_bytes)}")
    if counts.unchanged:
        details.append(f"{counts.unchanged} unchanged")
    output.show_lines(f"copied {', '.join(details)}")
    return 0


def _split_job(operand: str) -> tuple[str, str] | None:
    """Return the job and the path of JOB_NAME:PATH, or None for a path of this machine."""
    name, colon, path = operand.partition(":")
    return (name, path or ".") if colon and name and "/" not in name else None
