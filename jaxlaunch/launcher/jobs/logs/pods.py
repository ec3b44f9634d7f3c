"""The logs of pods: each one's lines, and the lines of many merged by time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxlaunch.launcher.errors import ApiError, ClusterError, Unreachable
from jaxlaunch.launcher.jobs.logs import lines as logs
from jaxlaunch.launcher.jobs.logs.lines import Line, Select
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.leader_log import why_unread
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.records import log_lines
from jaxlaunch.records.members import Members

STREAMS = 64  # pods that are read at once, line by line
READERS = 16  # requests at once where there are more
PATIENCE_S = 20.0  # of a kubelet that does not answer, where nothing is followed
MANY_TAIL = 1000  # lines of each pod, where there are more and no `--tail` is given


@dataclasses.dataclass(frozen=True)
class Source:
    """The log of one host of one generation."""

    pod: str
    host: int
    generation: int
    ranks: range  # that its host holds now
    node: str | None = None
    may_hold_others: bool = False  # lines of other ranks too: ranks move between hosts
    agent_port: int | None = None  # at which its agent gives the last lines, while it runs

    def may_have(self, select: Select) -> bool:
        """Whether it may hold selected lines."""
        return self.may_hold_others or select.wants_any(self.ranks)


@dataclasses.dataclass(frozen=True)
class Window:
    """How far back to read: so many seconds, the last `tail` selected lines, or since a time in RFC 3339."""

    seconds: int | None = None
    tail: int | None = None
    since: str = ""


_REQUEST = b"GET /output HTTP/1.1\r\nHost: agent\r\n\r\n"
EVERYTHING = Window()


def source(jobset: Obj, host: Host, members: Members | None = None) -> Source:
    """The log of one host of `jobset`, and the ranks that it holds by the table, that of the gang's start by default.

    Where ranks move, any pod may have lines of any; of more than STREAMS pods only those that hold a rank are read.
    """
    ranks = (members or hosts.table(jobset)).ranks(host.number)
    others = hosts.moves(jobset) and hosts.expected(jobset) <= STREAMS
    port = hosts.metrics_port(jobset) if host.running and host.has_started else None
    return Source(host.pod, host.number, host.generation, ranks, host.node, others, port)


def read(
    cluster: Cluster,
    namespace: str,
    sources: Sequence[Source],
    select: Select,
    window: Window = EVERYTHING,
    *,
    unread: Callable[[str], None],
    say: Callable[[str], None],
) -> Iterator[Line]:
    """The selected lines of all sources in order of time; of more than STREAMS, the last MANY_TAIL of each at most.

    `unread` gets a message for each log that cannot be read; its node may be gone. Where the kubelet has no line of a
    process, or fewer than `window.tail`, its agent is asked for the last ones, which have no times: `say` gets that.
    """
    many = len(sources) > STREAMS
    if many and window.tail is None:
        window = dataclasses.replace(window, tail=MANY_TAIL)

    def one_log(one: Source) -> Iterator[Line]:
        try:
            found = lines(cluster, namespace, one, select, window)
            if not many and window.seconds is None:
                found = _completed(found, window.tail, lambda: by_agent(one), lambda: say(_rotated(one.pod)))
            yield from found
        except (ApiError, Unreachable) as error:
            if isinstance(error, Unreachable) and not error.sent:
                raise
            unread(unreadable(one.pod, error, one.node))

    def by_agent(one: Source) -> list[Line]:
        if one.agent_port is None:
            return []
        by_rank = last_lines(cluster, namespace, one.pod, one.agent_port)
        every = [[Line(one.host, rank, text, generation=one.generation) for text in by_rank[rank]] for rank in by_rank]
        chosen = [[line for line in of_rank if select.wants(line, one.ranks)] for of_rank in every]
        return [line for of_rank in chosen for line in of_rank[-(window.tail or len(of_rank)) :]]

    def started(one: Source) -> Iterator[Line]:
        """Its lines, the first of them read: opening one log after the other would add up their latencies."""
        found = one_log(one)
        return itertools.chain(list(itertools.islice(found, None if many else 1)), found)

    with ThreadPoolExecutor(READERS) as pool:
        return logs.merged(list(pool.map(started, sources)))


def _completed(
    found: Iterator[Line], tail: int | None, by_agent: Callable[[], Sequence[Line]], tell: Callable[[], None]
) -> Iterator[Line]:
    """The lines of a log; those of processes as its agent has them, which `tell` says, where the kubelet has fewer than
    are wanted."""
    kept, of_ranks = list[Line](), 0
    for line in found:
        kept.append(line)
        of_ranks += line.rank is not None
        if of_ranks and tail is None:  # it has lines, any number
            break
    more = by_agent() if of_ranks < (1 if tail is None else tail) else ()
    if len(more) > of_ranks:
        tell()
        kept = [*more, *(line for line in kept if line.rank is None)]
    yield from kept
    yield from found


def _rotated(pod: str) -> str:
    return (
        f"the kubelet of pod {pod} has rotated its log: the last lines are shown as its agent has them, without times"
    )


def unreadable(pod: str, error: ClusterError, node: str | None) -> str:
    """The message about a pod whose log cannot be read."""
    return f"the log of pod {pod} cannot be read: {why_unread(error, node)}"


def lines(
    cluster: Cluster,
    namespace: str,
    of: Source,
    select: Select,
    window: Window = EVERYTHING,
    *,
    follow: bool = False,
) -> Iterator[Line]:
    """The selected lines of one source; the agents' own records are left out."""
    tail = None if window.tail is None else _tail_length(cluster, namespace, of, select, window)
    found = cluster.log(
        namespace,
        of.pod,
        container=MAIN_CONTAINER,
        follow=follow,
        since_s=window.seconds,
        since=window.since,
        tail=tail,
        timestamps=True,
        patience_s=None if follow else PATIENCE_S,
    )
    return _selected(found, of, select)


def _selected(texts: Iterator[str], of: Source, select: Select) -> Iterator[Line]:
    line: Line | None = None
    for text in texts:
        line = logs.stamped(of.host, of.generation, text, line)
        is_record = line.rank is None and log_lines.is_for_programs(line.text)
        if not is_record and select.wants(line, of.ranks):
            yield line


def _tail_length(cluster: Cluster, namespace: str, of: Source, select: Select, window: Window) -> int:
    """How many lines at the end of a log contain its last `window.tail` selected lines."""
    wanted = window.tail or 0
    for power in itertools.count(1):
        length = wanted * 4**power
        found = cluster.log(
            namespace,
            of.pod,
            container=MAIN_CONTAINER,
            since_s=window.seconds,
            tail=length,
            timestamps=True,
            patience_s=PATIENCE_S,
        )
        flags = [any(_selected(iter([text]), of, select)) for text in found]
        places = [place for place, is_wanted in enumerate(reversed(flags), 1) if is_wanted]
        if len(places) >= wanted:
            return places[wanted - 1] if wanted else 0
        if len(flags) < length:
            return len(flags)
    raise AssertionError("a log ends")


def last_lines(cluster: Cluster, namespace: str, pod: str, port: int) -> Mapping[int, Sequence[str]]:
    """Return the last lines of each process of a pod as its agent has them, by rank.

    A kubelet gives only the newest file of a log, which is empty after it has rotated a long one. The result is empty
    where the agent does not answer: it ends, its version is older, or the user may not use port-forwards.
    """
    try:
        head, _, body = cluster.port_forward(namespace, pod, port, _REQUEST).partition(b"\r\n\r\n")
        by_rank = json.loads(body) if head.split()[1:2] == [b"200"] else {}
        return {int(rank): [str(line) for line in lines] for rank, lines in by_rank.items()}
    except (ClusterError, ValueError, TypeError, AttributeError):  # what answers is no such agent
        return {}
