"""`launcher logs`: the lines of all processes of a job, as one stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import click

from jaxlaunch.launcher.cli import completions, from_volume, of_run, options, whose
from jaxlaunch.launcher.cli.output import Printer, say
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.jobs import reader
from jaxlaunch.launcher.jobs.logs import follow, pods
from jaxlaunch.launcher.jobs.logs import lines as logs
from jaxlaunch.launcher.jobs.logs import previous as past
from jaxlaunch.launcher.jobs.logs.lines import Line, Select
from jaxlaunch.launcher.jobs.logs.pods import Source, Window
from jaxlaunch.launcher.jobs.status import collect, hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.objects import terminal_state
from jaxlaunch.records import log_lines

HEAD_BYTES = 256 * 1024  # of host 0's log: what it writes first is how the generation before ended


@click.command("logs")
@click.argument("name", metavar="JOB_NAME", shell_complete=completions.runs)
@options.place()
@options.whose
@click.option("-f", "--follow", "is_following", is_flag=True, help="Follow until the job ends, across restarts.")
@click.option(
    "--rank", metavar="N,N-M|all", help="Ranks to show. [default: all; of more than 16, 0 and the failed one]"
)
@click.option(
    "--previous",
    is_flag=True,
    help="Show how earlier attempts ended, and lines before the last JobSet restart.",
)
@click.option("--since", metavar="DURATION", help="Only lines newer than this, such as 90s or 10m.")
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last lines of each host.")
@options.from_volume
@click.option("-o", "--output", type=click.Choice(["json"]), help="Print one JSON object per line.")
def logs_command(
    name: str,
    namespace: str | None,
    context: str | None,
    where: str | None,
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
    since_s = options.seconds("--since", since)
    asked, window = logs.select(rank, pattern), Window(None if since_s is None else int(since_s), tail)
    _require_together(previous or is_from_volume, is_following, is_from_volume, since)
    if (run := whose.run_here(name, namespace, context, where or ("cluster" if is_from_volume else None))) is not None:
        if since is not None:
            raise UserError(f"{name} is a run on this machine, whose lines have no timestamps: --since needs them.")
        return of_run.logs(run, asked, rank is not None, tail, output == "json", is_following, previous)
    cluster = whose.connect(name, context, where)
    seen = collect.snapshot(cluster, namespace or cluster.namespace, name)
    if isinstance(seen, NoSuchJob):
        raise UserError(f"Job {name} not found in namespace {seen.namespace}.", "see `launcher list`.")
    is_growing = is_following and terminal_state(seen.jobset) is None
    if not is_from_volume:
        _require_pods(seen, is_growing)
    logs.exist(asked, hosts.table(seen.jobset).processes)
    chosen = asked if rank is not None else _usual(seen, asked)
    printer = Printer(chosen, as_json=output == "json")
    if chosen.ranks is not None and rank is None:
        say(f"showing rank {' and '.join(map(str, sorted(chosen.ranks)))} only; --rank all shows every rank")
    if is_from_volume:
        from_volume.logs(cluster, seen, chosen, tail, printer, previous=previous)
        return 0
    if previous:
        return _previous(cluster, seen, chosen, tail, printer)
    if seen.report.verdict is not None:
        say(seen.report.verdict.title)
    if is_growing:
        follow.follow(cluster, seen.namespace, name, select=chosen, show=printer.show, say=say, window=window)
        return 0
    return _of_pods(cluster, seen, chosen, window, printer)


def _of_pods(cluster: Cluster, seen: Snapshot, chosen: Select, window: Window, printer: Printer) -> int:
    """What the pods have written so far; the exit code."""
    sources, unread = _sources(seen, chosen, printer), list[str]()

    def _unread(message: str) -> None:
        unread.append(message)
        say(message)

    is_empty = True
    for line in pods.read(cluster, seen.namespace, sources, chosen, window, unread=_unread, say=say):
        printer.show(line)
        is_empty = False
    if is_empty and sources and not unread and chosen.pattern is None and window.seconds is None:
        none = f"no process has a line in the part of its log that its kubelet still has; {_older(seen)}"
        say(none)
    return ClusterError.exit_code if len(unread) >= len(sources) else 0


def _older(seen: Snapshot) -> str:
    """Where lines are that a kubelet has no longer."""
    try:
        reader.folder(seen.jobset)
    except UserError as error:
        return error.message[0].lower() + error.message[1:].rstrip(".")
    return f"`launcher logs -n {seen.namespace} {seen.name} --from-volume` reads older ones from its run folder"


def _require_together(is_earlier: bool, is_following: bool, is_from_volume: bool, since: str | None) -> None:
    """Raises UserError for options that exclude each other."""
    if is_earlier and is_following:
        option = "--from-volume" if is_from_volume else "--previous"
        raise UserError(f"{option} and --follow cannot be combined: earlier logs do not grow.")
    if is_from_volume and since is not None:
        raise UserError("--from-volume and --since cannot be combined: lines on the volume have no timestamps.")


def _require_pods(seen: Snapshot, is_growing: bool) -> None:
    """Raises ClusterError when the pods are not known; following reads them again when the server is well."""
    if "pods" in (seen.forbidden if is_growing else seen.not_read):
        raise ClusterError(f"It is not known which logs exist: {'; '.join(seen.unread)}")


def _usual(seen: Snapshot, asked: Select) -> Select:
    """The ranks that are shown when nobody names any, and the pattern that was asked for."""
    failing = seen.report.last.verdict.rank if seen.report.last is not None else None
    usual = logs.usual(hosts.table(seen.jobset).processes, failing)
    return Select(usual.ranks, asked.pattern)


def _sources(seen: Snapshot, chosen: Select, printer: Printer) -> list[Source]:
    """The logs that there are, of the hosts that are wanted; says which have none yet."""
    known = [(host, pods.source(seen.jobset, host, seen.members)) for host in seen.hosts]
    wanted = [(host, source) for host, source in known if source.may_have(chosen)]
    silent = [host for host, _ in wanted if not host.has_started]
    if silent:
        say(f"{len(silent)} of {len(wanted)} hosts have no log yet, the first is {silent[0].name}")
    elif not wanted:
        told = (
            f"there are no pods with these ranks; see `launcher explain -n {seen.namespace} {seen.name}`, "
            "or read the volume: --from-volume"
        )
        say(told)
    return [source for host, source in wanted if host.has_started]


def _previous(cluster: Cluster, seen: Snapshot, chosen: Select, tail: int | None, printer: Printer) -> int:
    """What is known of the attempts before, and the ends of the logs of the generation before; the exit code."""
    for ended in seen.report.earlier:
        say(ended.title)
    if seen.report.unknown is not None:
        say(f"earlier attempts are not known: {seen.report.unknown}")
    elif not seen.report.earlier and (seen.restarts or seen.unread):
        say(f"earlier attempts are not known{''.join(f'; {why}' for why in seen.unread)}")
    elif not seen.report.earlier:
        say("there is no earlier attempt")
    leader = next((host for host in seen.hosts if host.number == 0 and host.has_started), None)
    if leader is None:
        say("host 0 has no log yet, and it records the earlier attempts; --from-volume reads them from its run folder")
        return 0
    try:
        for line in _tails(cluster, seen, leader, chosen, tail):
            printer.show(line)
    except ApiError as error:
        say(pods.unreadable(leader.pod, error, leader.node))
        return ClusterError.exit_code
    return 0


def _tails(cluster: Cluster, seen: Snapshot, leader: Host, chosen: Select, tail: int | None) -> Iterator[Line]:
    texts = cluster.log(seen.namespace, leader.pod, container=leader.container, limit_bytes=HEAD_BYTES)
    lines = past.lines(filter(None, map(log_lines.parse, texts)), seen.members)
    for _, of_rank in itertools.groupby(lines, key=lambda line: line.rank):
        wanted = [line for line in of_rank if chosen.wants(line, range(0))]
        yield from wanted if tail is None else wanted[len(wanted) - min(tail, len(wanted)) :]
