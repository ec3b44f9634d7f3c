"""`launcher logs`: the lines of all processes of a job, as one stream.

The lines come from the files of a run on this machine, from the pods of a job, or with
--from-volume from the run folder of a job whose pods may no longer exist.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from jaxlaunch.launcher.cli import options
from jaxlaunch.launcher.cli.output import Printer, show_messages
from jaxlaunch.launcher.client import job_view
from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.jobs import volume
from jaxlaunch.launcher.jobs.logs import follow
from jaxlaunch.launcher.jobs.logs import lines as logs
from jaxlaunch.launcher.jobs.logs.lines import Line, LogSource, LogWindow, Selection
from jaxlaunch.launcher.jobs.status import collect, hosts, roles
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.jobs.volume import MAX_LOG_BYTES, RunFiles
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.objects import terminal_state
from jaxlaunch.launcher.local import logs as local_logs
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.local.status import run_verdict
from jaxlaunch.records import log_lines
from jaxlaunch.runs import layout

# The bytes of host 0's log that are read for --previous. Its first lines record how the previous
# generation ended.
HEAD_BYTES = 256 * 1024


@click.command("logs")
@options.name_argument
@options.cluster_options()
@options.location_options
@click.option(
    "-f",
    "--follow",
    "is_following",
    is_flag=True,
    help="Follow until the job ends, across restarts.",
)
@click.option(
    "-r",
    "--rank",
    metavar="N,N-M|all",
    help="Ranks to show. [default: all; of more than 16, 0 and the failed one]",
)
@click.option("--role", metavar="ROLE", help="Only this role of a job with roles.")
@click.option(
    "-p",
    "--previous",
    is_flag=True,
    help="Show how earlier attempts ended, and lines before the last JobSet restart.",
)
@click.option("--since", metavar="DURATION", help="Only lines newer than this, such as 90s or 10m.")
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
@click.option(
    "--tail", type=click.IntRange(0), metavar="N", help="Only the last lines of each host."
)
@options.from_volume_option
@click.option("-o", "--output", type=click.Choice(["json"]), help="Print one JSON object per line.")
def logs_command(
    name: str,
    namespace: str | None,
    context: str | None,
    location: str | None,
    is_following: bool,
    rank: str | None,
    role: str | None,
    previous: bool,
    since: str | None,
    pattern: str | None,
    tail: int | None,
    is_from_volume: bool,
    output: str | None,
) -> int:
    """Print the logs of job JOB_NAME, or of a run here.

    Lines are printed in order of time, each after its rank; the job's result comes first if there
    is one.

    Lines of processes go to stdout, those of agents and launcher to stderr. The exit code is 3 if
    no log could be read. The logs of a run, which is given by its name below runs/ or by its
    folder, are printed rank by rank.
    """
    since_s = options.parse_duration("--since", since)
    _explain_line_count(namespace)
    selection = logs.parse_selection(rank, pattern)
    window = LogWindow(None if since_s is None else int(since_s), tail)
    if (previous or is_from_volume) and is_following:
        option = "--from-volume" if is_from_volume else "--previous"
        message = f"{option} and --follow cannot be combined: earlier logs do not grow."
        raise UserError(message, "leave out --follow.")
    if is_from_volume and since is not None:
        reason = "lines on the volume have no timestamps."
        raise UserError(f"--from-volume and --since cannot be combined: {reason}")
    has_rank_option, as_json = rank is not None, output == "json"
    chosen_location = location or ("cluster" if is_from_volume else None)
    run = job_view.find_local_run(name, namespace, context, chosen_location, show_messages)
    if run is not None:
        run_options = selection, has_rank_option, tail, as_json, is_following, previous
        return _show_roles(run, since, role, *run_options)
    cluster = job_view.connect_cluster(name, context, location, show_messages)
    snapshot = _read_job(cluster, namespace or cluster.namespace, name)
    snapshot, role = _choose_role(snapshot, role)
    is_growing = is_following and terminal_state(snapshot.jobset) is None
    # A follower reads the pods again later, so only a refusal is final.
    unread_reasons = snapshot.forbidden if is_growing else snapshot.unread_reasons
    if not is_from_volume and "pods" in unread_reasons:
        raise ClusterError(f"It is not known which logs exist: {'; '.join(snapshot.unread)}")
    last_end = snapshot.report.last_end
    failed_rank = None if last_end is None else last_end.verdict.rank
    processes = hosts.initial_members(snapshot.jobset).process_count
    selection = _choose_ranks(selection, has_rank_option, processes, failed_rank)
    printer = Printer(selection, as_json=as_json, role=role or "")
    if is_from_volume:
        return _show_volume(cluster, snapshot, selection, tail, printer, previous=previous)
    if previous:
        return _show_previous(cluster, snapshot, selection, tail, printer)
    if snapshot.report.attempt_end is not None:
        show_messages(snapshot.report.attempt_end.description)
    if not is_growing:
        return _show_pods(cluster, snapshot, selection, window, printer)
    show, say = printer.show_line, show_messages
    follow.follow_logs(
        cluster,
        snapshot.namespace,
        name,
        selection=selection,
        show=show,
        say=say,
        window=window,
        role=role,
    )
    return 0


def _explain_line_count(namespace: str | None) -> None:
    """Show the option for the last lines, if the namespace is a number as `tail -n` has it."""
    if namespace is not None and namespace.isdecimal():
        advice = f"the last {namespace} lines of each host are --tail {namespace}"
        show_messages(f"-n {namespace} is read as a namespace; {advice}")


def _read_job(cluster: Cluster, namespace: str, name: str) -> Snapshot:
    snapshot = collect.read_snapshot(cluster, namespace, name)
    if isinstance(snapshot, NoSuchJob):
        message = f"Job {name} not found in namespace {snapshot.namespace}."
        raise UserError(message, "see `launcher list`.")
    return snapshot


def _choose_role(snapshot: Snapshot, role: str | None) -> tuple[Snapshot, str | None]:
    """Return a role as a job of its own, by default the one that decides, and its name."""
    parts = roles.split_roles(snapshot)
    if role is not None and role not in parts:
        message = f"--role {role}: {snapshot.name} has no role of that name."
        raise UserError(message, f"its roles: {', '.join(parts) or 'none'}.")
    if not parts:
        return snapshot, None
    chosen = role or roles.find_decisive_role(snapshot) or next(iter(parts))
    if role is None:
        others = ", ".join(name for name in parts if name != chosen)
        show_messages(f"showing role {chosen}; --role NAME shows another: {others}")
    return parts[chosen], chosen


def _choose_ranks(
    selection: Selection, has_rank_option: bool, processes: int, failed_rank: int | None
) -> Selection:
    """Return the selection, with the default ranks if --rank was not given."""
    logs.check_ranks_exist(selection, processes)
    if has_rank_option:
        return selection
    ranks = logs.default_selection(processes, failed_rank).ranks
    if ranks is not None:
        ranks_text = " and ".join(map(str, sorted(ranks)))
        show_messages(f"showing rank {ranks_text} only; --rank all shows every rank")
    return Selection(ranks, selection.pattern)


# --- a run on this machine ------------------------------------------------------------------------


def _show_run(
    run: Run,
    selection: Selection,
    has_rank_option: bool,
    tail: int | None,
    as_json: bool,
    is_following: bool,
    previous: bool,
    role: str = "",
) -> int:
    job, verdict = run.job, run_verdict(run)
    processes_per_host = 1
    if job is not None:
        processes_per_host = job.process_count_per_host
        failed_rank = None if verdict is None else verdict.rank
        selection = _choose_ranks(selection, has_rank_option, job.processes, failed_rank)
    printer = Printer(selection, as_json=as_json, role=role)
    if previous:
        for record in run.attempt_records:
            end = AttemptEnd(record.verdict, record.attempt, record.generation, record.ended)
            show_messages(end.description)
        start = 0 if run.newest_start is None else run.newest_start.start - 1
        folder = layout.start_folder(run.folder, start)
        if run.newest_start is None or not folder.is_dir():
            show_messages("there is no earlier start; the logs of this one hold all its attempts")
        else:
            _show_files(run, folder, selection, tail, processes_per_host, printer)
        return 0
    if verdict is not None:
        show_messages(f"{verdict.cause} ({verdict.code}): {verdict.message}")
    if is_following and run.holder is not None:
        local_logs.follow_logs(run, selection, tail, processes_per_host, printer.show_line)
        return 0
    folder = run.start_folder
    if _show_files(run, folder, selection, tail, processes_per_host, printer):
        return 0
    has_logs = bool(local_logs.list_ranks(folder, Selection()))
    fact = "these ranks have written nothing" if has_logs else "no rank has written anything"
    show_messages(f"{fact}, or the logs are gone: {folder}")
    return 0 if has_logs or run.holder is not None else ClusterError.exit_code


def _show_roles(
    run: Run,
    since: str | None,
    role: str | None,
    selection: Selection,
    has_rank_option: bool,
    tail: int | None,
    as_json: bool,
    is_following: bool,
    previous: bool,
) -> int:
    """Show the lines of a run, of all its roles or of one, and return the exit code."""
    if since is not None:
        reason = "whose lines have no timestamps: --since needs them."
        raise UserError(f"{run.name} is a run on this machine, {reason}")
    names = [] if run.role_table is None else list(run.role_table.names)
    if role is not None and role not in names:
        message = f"--role {role}: {run.name} has no role of that name."
        raise UserError(message, f"its roles: {', '.join(names) or 'none'}.")
    if not names:
        return _show_run(run, selection, has_rank_option, tail, as_json, is_following, previous)
    names = [name for name in names if role in (None, name)]
    if is_following and run.holder is not None:
        printer = Printer(selection, as_json=as_json)
        local_logs.follow_roles(run, names, selection, tail, printer.show_line)
        return 0
    code = ClusterError.exit_code
    for name in names:
        role_run = run.roles.get(name)
        if role_run is None:
            show_messages(f"{name}: it has not started")
            continue
        processes = 0 if role_run.job is None else role_run.job.processes
        if role is None and selection.ranks and min(selection.ranks) >= processes:
            # Other roles have the selected ranks.
            continue
        run_options = selection, has_rank_option, tail, as_json, False, previous
        code = min(code, _show_run(role_run, *run_options, role=name))
    return code


def _show_files(
    run: Run,
    folder: Path,
    selection: Selection,
    tail: int | None,
    processes_per_host: int,
    printer: Printer,
) -> bool:
    """Show the lines of each selected rank. Return False if no such rank has a log."""
    has_ranks = False
    rank_logs = local_logs.read_logs(run, folder, selection, tail, processes_per_host)
    for rank, left_out_bytes, lines in rank_logs:
        has_ranks = True
        if tail is None:
            _report_left_out_bytes(rank, left_out_bytes, "the job keeps no more (logs.kept)")
        for line in lines:
            printer.show_line(line)
    return has_ranks


def _report_left_out_bytes(rank: int, size_bytes: int, reason: str) -> None:
    if size_bytes:
        fact = f"{size_bytes} bytes of rank {rank} before these lines are left out"
        show_messages(f"{fact}: {reason}")


# --- the run folder on a volume -------------------------------------------------------------------


def read_volume_summary(cluster: Cluster, snapshot: Snapshot) -> Snapshot:
    """Add the progress in the summary on the volume to a job."""
    return _add_progress(snapshot, _read_volume(cluster, snapshot))


def _show_volume(
    cluster: Cluster,
    snapshot: Snapshot,
    selection: Selection,
    tail: int | None,
    printer: Printer,
    *,
    previous: bool,
) -> int:
    """Show the logs of the selected ranks. With `previous`, first show how the attempts ended."""
    ranks = None if selection.ranks is None else sorted(selection.ranks)
    pattern = None if selection.pattern is None else selection.pattern.pattern
    files = _read_volume(cluster, snapshot, ranks, pattern, tail)
    last_end = _add_progress(snapshot, files).report.attempt_end
    for end in files.attempts if previous else () if last_end is None else (last_end,):
        show_messages(end.description)
    limit = f"or it is beyond {MAX_LOG_BYTES >> 20} MiB of all ranks shown"
    for log in files.logs:
        if tail is None:
            reason = f"the job keeps no more (logs.kept), {limit}"
            _report_left_out_bytes(log.rank, log.left_out, reason)
        for text in log.lines:
            printer.show_line(Line(snapshot.members.host_of(log.rank), log.rank, text))
    if not files.logs:
        show_messages("the run folder has no log of these ranks")
    return 0


def _read_volume(
    cluster: Cluster,
    snapshot: Snapshot,
    ranks: Sequence[int] | None = (),
    pattern: str | None = None,
    tail: int | None = None,
) -> RunFiles:
    def explain_wait(name: str) -> str:
        """Return the reason why the JobSet that reads the volume waits."""
        return explain_job(collect.read_snapshot(cluster, snapshot.namespace, name)).headline

    return volume.read_run_folder(
        cluster,
        snapshot.jobset,
        say=show_messages,
        explain_wait=explain_wait,
        ranks=ranks,
        pattern=pattern,
        tail=tail,
    )


def _add_progress(snapshot: Snapshot, files: RunFiles) -> Snapshot:
    if files.progress is None:
        show_messages("the run folder has no summary of this job")
    return dataclasses.replace(snapshot, volume_progress=files.progress)


# --- pods -----------------------------------------------------------------------------------------


def _show_pods(
    cluster: Cluster, snapshot: Snapshot, selection: Selection, window: LogWindow, printer: Printer
) -> int:
    """Show what the pods have written so far, and return the exit code."""
    namespace, sources, unread = snapshot.namespace, _list_sources(snapshot, selection), list[str]()

    def note_unread(message: str) -> None:
        unread.append(message)
        show_messages(message)

    say, is_empty = show_messages, True
    for line in logs.read_logs(
        cluster, namespace, sources, selection, window, report_unread=note_unread, say=say
    ):
        printer.show_line(line)
        is_empty = False
    if is_empty and sources and not unread and selection.pattern is None and window.seconds is None:
        try:
            volume.find_run_folder(snapshot.jobset)
            command = f"launcher logs -n {namespace} {snapshot.name} --from-volume"
            advice = f"`{command}` reads older ones from its run folder"
        except UserError as error:
            advice = error.message[0].lower() + error.message[1:].rstrip(".")
        fact = "no process has a line in the part of its log that its kubelet still has"
        show_messages(f"{fact}; {advice}")
    return ClusterError.exit_code if len(unread) >= len(sources) else 0


def _list_sources(snapshot: Snapshot, selection: Selection) -> list[LogSource]:
    """Return the existing logs of the selected hosts, and say how many hosts have none yet."""
    pairs = (
        (host, logs.log_source(snapshot.jobset, host, snapshot.members)) for host in snapshot.hosts
    )
    selected = [(host, source) for host, source in pairs if source.may_match(selection)]
    not_started = [host for host, _ in selected if not host.has_started]
    if not_started:
        summary = f"{len(not_started)} of {len(selected)} hosts have no log yet"
        show_messages(f"{summary}, the first is {not_started[0].name}")
    elif not selected:
        command = f"launcher explain -n {snapshot.namespace} {snapshot.name}"
        advice = f"see `{command}`, or read the volume: --from-volume"
        show_messages(f"there are no pods with these ranks; {advice}")
    return [source for host, source in selected if host.has_started]


def _show_previous(
    cluster: Cluster, snapshot: Snapshot, selection: Selection, tail: int | None, printer: Printer
) -> int:
    """Show how earlier attempts ended, and the last lines of the previous generation."""
    report = snapshot.report
    for end in report.earlier_ends:
        show_messages(end.description)
    unknown_message = "earlier attempts are not known"
    if report.unknown_reason is not None:
        show_messages(f"{unknown_message}: {report.unknown_reason}")
    elif not report.earlier_ends and (snapshot.restarts or snapshot.unread):
        show_messages("; ".join([unknown_message, *snapshot.unread]))
    elif not report.earlier_ends:
        command = f"launcher logs -n {snapshot.namespace} {snapshot.name}"
        show_messages(f"there is no earlier attempt; `{command}` shows this one")
    leader = next((host for host in snapshot.hosts if host.number == 0 and host.has_started), None)
    if leader is None:
        reason = "host 0 has no log yet, and it records the earlier attempts"
        show_messages(f"{reason}; --from-volume reads them from its run folder")
        return 0
    try:
        for line in _read_previous_lines(cluster, snapshot, leader, selection, tail):
            printer.show_line(line)
    except ApiError as error:
        show_messages(logs.describe_unreadable(leader.pod, error, leader.node))
        return ClusterError.exit_code
    return 0


def _read_previous_lines(
    cluster: Cluster, snapshot: Snapshot, leader: Host, selection: Selection, tail: int | None
) -> Iterator[Line]:
    texts = cluster.log(
        snapshot.namespace, leader.pod, container=leader.container, limit_bytes=HEAD_BYTES
    )
    lines = logs.previous_lines(filter(None, map(log_lines.parse_line, texts)), snapshot.members)
    for _, rank_lines in itertools.groupby(lines, key=lambda line: line.rank):
        selected = [line for line in rank_lines if selection.matches(line, range(0))]
        yield from collections.deque(selected, maxlen=tail)
