"""`launcher logs`: what a job's processes wrote and write, one stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import click

from launcher import follow, logs, past, podlogs, world
from launcher.agent import words
from launcher.cli import options
from launcher.cli.printer import Printer
from launcher.cluster import Cluster
from launcher.errors import ApiError, UserError
from launcher.hosts import Host
from launcher.logs import Line, Select
from launcher.podlogs import Source, Window
from launcher.seen import World

HEAD_BYTES = 256 * 1024  # of host 0's log: what it says at its start of the generation before


@click.command("logs")
@click.argument("name")
@options.place()
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on until the job ends, over restarts.")
@click.option("--rank", metavar="N,N-M|all", help="Whose lines. [default: all; of a large gang 0 and the failing one]")
@click.option("--previous", is_flag=True, help="How earlier generations ended, and the last lines of the one before.")
@click.option("--since", metavar="DURATION", help="Only what is newer than this, such as 90s or 10m.")
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines in which this is found.")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Only the last lines of each host.")
@click.option("-o", "--output", type=click.Choice(["json"]), help="One JSON object a line.")
def logs_command(
    name: str,
    namespace: str | None,
    context: str | None,
    is_following: bool,
    rank: str | None,
    previous: bool,
    since: str | None,
    pattern: str | None,
    tail: int | None,
    output: str | None,
) -> None:
    """Print what job NAME writes.

    By time, each line after its rank; the verdict first when there is one.

    The processes' lines go to stdout, what agents and launcher say to stderr.
    """
    since_s = options.seconds("--since", since)
    asked, window = logs.select(rank, pattern), Window(None if since_s is None else int(since_s), tail)
    if previous and is_following:
        raise UserError("--previous and --follow cannot both be: what is past does not go on.")
    cluster = Cluster.connect(context)
    seen = world.gather(cluster, namespace or cluster.namespace, name)
    if seen.jobset is None:
        raise UserError(f"There is no job {name} in namespace {seen.namespace}.", "see `launcher list`.")
    chosen = asked if rank is not None else _usual(seen, asked)
    printer = Printer(chosen, as_json=output == "json")
    if chosen.ranks is not None and rank is None:
        printer.say(f"showing rank {' and '.join(map(str, sorted(chosen.ranks)))} alone; --rank all shows every one")
    if previous:
        return _previous(cluster, seen, chosen, tail, printer)
    if seen.told.verdict is not None:
        printer.say(seen.told.verdict.title)
    if is_following and not follow.has_ended(seen.jobset):
        return follow.follow(
            cluster, seen.namespace, name, select=chosen, show=printer.show, say=printer.say, window=window
        )
    sources = _sources(seen, chosen, printer)
    for line in podlogs.read(cluster, seen.namespace, sources, chosen, window, say=printer.say):
        printer.show(line)


def _usual(seen: World, asked: Select) -> Select:
    """The ranks that are shown when nobody names any, and the pattern that was asked for."""
    assert seen.jobset is not None, "the caller has looked"
    failing = seen.told.last.verdict.rank if seen.told.last is not None else None
    usual = logs.usual(seen.wanted * podlogs.processes_per_host(seen.jobset), failing)
    return Select(usual.ranks, asked.pattern)


def _sources(seen: World, chosen: Select, printer: Printer) -> list[Source]:
    """The logs that there are, of the hosts that are wanted; says which have none yet."""
    assert seen.jobset is not None, "the caller has looked"
    wanted = [
        (host, source) for host in seen.hosts if chosen.wants_any((source := podlogs.source(seen.jobset, host)).ranks)
    ]
    silent = [host for host, _ in wanted if not host.has_started]
    if silent:
        printer.say(f"{len(silent)} of {len(wanted)} hosts have no log yet, the first is {silent[0].name}")
    elif not wanted:
        printer.say(f"there are no pods with these ranks; `launcher explain {seen.name}` says why")
    return [source for host, source in wanted if host.has_started]


def _previous(cluster: Cluster, seen: World, chosen: Select, tail: int | None, printer: Printer) -> None:
    """What is known of the attempts before, and the ends of the logs of the generation before."""
    for ended in seen.told.before:
        printer.say(ended.title)
    if seen.told.unknown is not None:
        printer.say(f"what came before is not known: {seen.told.unknown}")
    elif not seen.told.before and (seen.restarts or seen.unread):
        printer.say(f"what came before is not known{''.join(f'; {why}' for why in seen.unread)}")
    elif not seen.told.before:
        printer.say("there is no earlier attempt")
    leader = next((host for host in seen.hosts if host.number == 0 and host.has_started), None)
    if leader is None:
        return printer.say("host 0, which tells what came before it, has no log yet")
    try:
        for line in _tails(cluster, seen, leader, chosen, tail):
            printer.show(line)
    except ApiError as error:
        printer.say(podlogs.unreadable(leader.pod, error))


def _tails(cluster: Cluster, seen: World, leader: Host, chosen: Select, tail: int | None) -> Iterator[Line]:
    assert seen.jobset is not None, "the caller has looked"
    texts = cluster.log(seen.namespace, leader.pod, container=leader.container, limit_bytes=HEAD_BYTES)
    each = podlogs.processes_per_host(seen.jobset)
    lines = past.lines(filter(None, map(words.parse, texts)), each)
    for _, of_rank in itertools.groupby(lines, key=lambda line: line.rank):
        wanted = [line for line in of_rank if chosen.wants(line, range(line.host * each, (line.host + 1) * each))]
        yield from wanted if tail is None else wanted[len(wanted) - min(tail, len(wanted)) :]
