"""`launcher logs`: the lines of all processes of a job, as one stream.

They are those of a run on this machine, those that the pods of a job have, or with --from-volume the files of a job
whose pods may be gone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from jaxlaunch.launcher.cli import job_view, options
from jaxlaunch.launcher.cli.output import Printer, say
from jaxlaunch.launcher.diagnose.explain.explanation import explain
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.jobs import volume
from jaxlaunch.launcher.jobs.logs import follow
from jaxlaunch.launcher.jobs.logs import lines as logs
from jaxlaunch.launcher.jobs.logs.lines import Line, Select, Source, Window
from jaxlaunch.launcher.jobs.status import collect, hosts
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.jobs.volume import MAX_LOGS, RunFiles
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.objects import terminal_state
from jaxlaunch.launcher.local import logs as local_logs
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.local.status import verdict_of
from jaxlaunch.records import log_lines

# Bytes of host 0's log. Its first lines tell how the generation before ended.
HEAD_BYTES = 256 * 1024


@click.command("logs")
@options.name_argument
@options.cluster_options()
@options.where_options
@click.option("-f", "--follow", "is_following", is_flag=True, help="Follow until the job ends, across restarts.")
@click.option(
    "--rank", metavar="N,N-M|all", help="Ranks to show. [default: all; of more than 16, 0 and the failed one]"
)
@click.option(
    "--previous", is_flag=True, help="Show how earlier attempts ended, and lines before the last JobSet restart."
)
@click.option("--since", metavar="DURATION", help="Only lines newer than this, such as 90s or 10m.")
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last lines of each host.")
@options.from_volume_option
@click.option("-o", "--output", type=click.Choice(["json"]), help="Print one JSON object per line.")
def logs_command(
    name: str,
    namespace: str | None,
    context: str | None,
    location: str | None,
    is_following: bool,
    rank: str | None,
    previous: bool,
    since: str | None,
    pattern: str | None,
    tail: int | None,
    is_from_volume: bool,
    output: str | None,
) -> int:
    """Print the logs of job JOB_NAME, or of a run here.

    Lines are printed in order of time, each after its rank; the job's result comes first if there is one.

    Lines of processes go to stdout, those of agents and launcher to stderr. The exit code is 3 if no log could be
    read. The logs of a run, which is given by its name below runs/ or by its folder, are printed rank by rank.
    """
    since_s = options.parse_duration("--since", since)
    asked, window = logs.parse_selection(rank, pattern), Window(None if since_s is None else int(since_s), tail)
    if (previous or is_from_volume) and is_following:
        option = "--from-volume" if is_from_volume else "--previous"
        raise UserError(f"{option} and --follow cannot be combined: earlier logs do not grow.")
    if is_from_volume and since is not None:
        raise UserError("--from-volume and --since cannot be combined: lines on the volume have no timestamps.")
    run = job_view.find_local_run(name, namespace, context, location or ("cluster" if is_from_volume else None))
    if run is not None:
        if since is not None:
            raise UserError(f"{name} is a run on this machine, whose lines have no timestamps: --since needs them.")
        return _show_run(run, asked, rank is not None, tail, output == "json", is_following, previous)
    cluster = job_view.connect(name, context, location)
    snapshot = collect.snapshot(cluster, namespace or cluster.namespace, name)
    if isinstance(snapshot, NoSuchJob):
        raise UserError(f"Job {name} not found in namespace {snapshot.namespace}.", "see `launcher list`.")
    is_growing = is_following and terminal_state(snapshot.jobset) is None
    # Following reads the pods again when the server is well.
    if not is_from_volume and "pods" in (snapshot.forbidden if is_growing else snapshot.not_read):
        raise ClusterError(f"It is not known which logs exist: {'; '.join(snapshot.unread)}")
    processes, last = hosts.table(snapshot.jobset).processes, snapshot.report.last
    logs.require_ranks(asked, processes)
    chosen = asked if rank is not None else _choose_ranks(asked, processes, None if last is None else last.verdict.rank)
    printer = Printer(chosen, as_json=output == "json")
    if is_from_volume:
        _show_volume(cluster, snapshot, chosen, tail, printer, previous=previous)
        return 0
    if previous:
        return _show_previous(cluster, snapshot, chosen, tail, printer)
    if snapshot.report.verdict is not None:
        say(snapshot.report.verdict.title)
    if is_growing:
        follow.follow(cluster, snapshot.namespace, name, select=chosen, show=printer.show, say=say, window=window)
        return 0
    return _show_pods(cluster, snapshot, chosen, window, printer)


def _choose_ranks(asked: Select, processes: int, failed_rank: int | None) -> Select:
    """Return the ranks that are shown when nobody names any, with the pattern of `asked`."""
    ranks = logs.default_selection(processes, failed_rank).ranks
    if ranks is not None:
        say(f"showing rank {' and '.join(map(str, sorted(ranks)))} only; --rank all shows every rank")
    return Select(ranks, asked.pattern)


# --- a run on this machine --------------------------------------------------------------------------------------------


def _show_run(
    run: Run, asked: Select, has_ranks: bool, tail: int | None, as_json: bool, is_following: bool, previous: bool
) -> int:
    job, verdict = run.job, verdict_of(run)
    processes_per_host, chosen = 1, asked
    if job is not None:
        processes_per_host = job.process_count_per_host
        logs.require_ranks(asked, job.processes)
        if not has_ranks:
            chosen = _choose_ranks(asked, job.processes, None if verdict is None else verdict.rank)
    printer = Printer(chosen, as_json=as_json)
    if previous:
        for record in run.records:
            say(AttemptEnd(record.verdict, record.attempt, record.generation, record.ended).title)
        folder = None if run.start is None else run.folder / "starts" / str(run.start.start - 1)
        if folder is None or not folder.is_dir():
            say("there is no earlier start; the logs of this one hold all its attempts")
        else:
            _show_files(run, folder, chosen, tail, processes_per_host, printer)
        return 0
    if verdict is not None:
        say(f"{verdict.cause} ({verdict.code}): {verdict.message}")
    if is_following and run.holder is not None:
        local_logs.follow_logs(run, chosen, tail, processes_per_host, printer.show)
        return 0
    folder = run.start_folder
    if _show_files(run, folder, chosen, tail, processes_per_host, printer):
        return 0
    has_logs = bool(local_logs.list_ranks(folder, Select()))
    say(f"{'these ranks have' if has_logs else 'no rank has'} written nothing, or it is gone: {folder}")
    return 0 if has_logs or run.holder is not None else ClusterError.exit_code


def _show_files(
    run: Run, folder: Path, chosen: Select, tail: int | None, processes_per_host: int, printer: Printer
) -> bool:
    """Show the lines of each rank, and what is left out of them; return False if there is no rank."""
    has_ranks = False
    for rank, left_out, lines in local_logs.read_logs(run, folder, chosen, tail, processes_per_host):
        has_ranks = True
        if left_out and tail is None:
            say(f"{left_out} bytes of rank {rank} before these lines are left out: the job keeps no more (logs.kept)")
        for line in lines:
            printer.show(line)
    return has_ranks


# --- the run folder on a volume ---------------------------------------------------------------------------------------


def read_volume_summary(cluster: Cluster, snapshot: Snapshot) -> Snapshot:
    """Return the job, with what its summary on the volume says."""
    return _add_record(snapshot, _read_volume(cluster, snapshot))


def _show_volume(
    cluster: Cluster, snapshot: Snapshot, chosen: Select, tail: int | None, printer: Printer, *, previous: bool
) -> None:
    """Show the logs of the chosen ranks, one rank after the other; with `previous` first how the attempts ended."""
    ranks = None if chosen.ranks is None else sorted(chosen.ranks)
    pattern = None if chosen.pattern is None else chosen.pattern.pattern
    files = _read_volume(cluster, snapshot, ranks, pattern, tail)
    last = _add_record(snapshot, files).report.verdict
    for end in files.attempts if previous else () if last is None else (last,):
        say(end.title)
    for log in files.logs:
        if log.left_out and tail is None:
            reason = f"the job keeps no more (logs.kept), or it is beyond {MAX_LOGS >> 20} MiB of all ranks shown"
            say(f"{log.left_out} bytes of rank {log.rank} before these lines are left out: {reason}")
        for text in log.lines:
            printer.show(Line(snapshot.members.host(log.rank), log.rank, text))
    if not files.logs:
        say("its run folder has no log of these ranks")


def _read_volume(
    cluster: Cluster,
    snapshot: Snapshot,
    ranks: Sequence[int] | None = (),
    pattern: str | None = None,
    tail: int | None = None,
) -> RunFiles:
    def why(name: str) -> str:
        """Return the reason why the JobSet that reads the volume waits."""
        return explain(collect.snapshot(cluster, snapshot.namespace, name)).headline

    return volume.read_run_folder(cluster, snapshot.jobset, say=say, why=why, ranks=ranks, pattern=pattern, tail=tail)


def _add_record(snapshot: Snapshot, files: RunFiles) -> Snapshot:
    if files.recorded is None:
        say("its run folder has no summary of this job")
    return dataclasses.replace(snapshot, on_volume=files.recorded)


# --- pods -------------------------------------------------------------------------------------------------------------


def _show_pods(cluster: Cluster, snapshot: Snapshot, chosen: Select, window: Window, printer: Printer) -> int:
    """Show what the pods have written so far; return the exit code."""
    sources, unread = _list_sources(snapshot, chosen), list[str]()

    def note_unread(message: str) -> None:
        unread.append(message)
        say(message)

    is_empty = True
    for line in logs.read_logs(cluster, snapshot.namespace, sources, chosen, window, unread=note_unread, say=say):
        printer.show(line)
        is_empty = False
    if is_empty and sources and not unread and chosen.pattern is None and window.seconds is None:
        try:
            volume.find_run_folder(snapshot.jobset)
            command = f"launcher logs -n {snapshot.namespace} {snapshot.name} --from-volume"
            older = f"`{command}` reads older ones from its run folder"
        except UserError as error:
            older = error.message[0].lower() + error.message[1:].rstrip(".")
        say(f"no process has a line in the part of its log that its kubelet still has; {older}")
    return ClusterError.exit_code if len(unread) >= len(sources) else 0


def _list_sources(snapshot: Snapshot, chosen: Select) -> list[Source]:
    """Return the existing logs of the selected hosts, and print which hosts have none yet."""
    sources = [(host, logs.log_source(snapshot.jobset, host, snapshot.members)) for host in snapshot.hosts]
    wanted = [(host, source) for host, source in sources if source.may_have(chosen)]
    silent = [host for host, _ in wanted if not host.has_started]
    if silent:
        say(f"{len(silent)} of {len(wanted)} hosts have no log yet, the first is {silent[0].name}")
    elif not wanted:
        command = f"launcher explain -n {snapshot.namespace} {snapshot.name}"
        say(f"there are no pods with these ranks; see `{command}`, or read the volume: --from-volume")
    return [source for host, source in wanted if host.has_started]


def _show_previous(cluster: Cluster, snapshot: Snapshot, chosen: Select, tail: int | None, printer: Printer) -> int:
    """Show how earlier attempts ended, and the last lines of the generation before; return the exit code."""
    report = snapshot.report
    for end in report.earlier:
        say(end.title)
    if report.unknown is not None:
        say(f"earlier attempts are not known: {report.unknown}")
    elif not report.earlier and (snapshot.restarts or snapshot.unread):
        say(f"earlier attempts are not known{''.join(f'; {reason}' for reason in snapshot.unread)}")
    elif not report.earlier:
        say("there is no earlier attempt")
    leader = next((host for host in snapshot.hosts if host.number == 0 and host.has_started), None)
    if leader is None:
        say("host 0 has no log yet, and it records the earlier attempts; --from-volume reads them from its run folder")
        return 0
    try:
        for line in _previous_lines(cluster, snapshot, leader, chosen, tail):
            printer.show(line)
    except ApiError as error:
        say(logs.describe_unreadable(leader.pod, error, leader.node))
        return ClusterError.exit_code
    return 0


def _previous_lines(
    cluster: Cluster, snapshot: Snapshot, leader: Host, chosen: Select, tail: int | None
) -> Iterator[Line]:
    texts = cluster.log(snapshot.namespace, leader.pod, container=leader.container, limit_bytes=HEAD_BYTES)
    lines = logs.previous_lines(filter(None, map(log_lines.parse, texts)), snapshot.members)
    for _, of_rank in itertools.groupby(lines, key=lambda line: line.rank):
        wanted = [line for line in of_rank if chosen.wants(line, range(0))]
        yield from wanted if tail is None else wanted[len(wanted) - min(tail, len(wanted)) :]
