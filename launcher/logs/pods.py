"""The logs of pods: each one's lines, and the lines of many merged by time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxlaunch.launcher.cluster.client import Cluster
from jaxlaunch.launcher.errors import ApiError, ClusterError, Unreachable
from jaxlaunch.launcher.kube.labels import MAIN_CONTAINER
from jaxlaunch.launcher.kube.objects import Obj
from jaxlaunch.launcher.logs import lines as logs
from jaxlaunch.launcher.logs.lines import Line, Select
from jaxlaunch.launcher.status import hosts
from jaxlaunch.launcher.status.hosts import Host
from jaxlaunch.launcher.status.leader_log import why_unread
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

    def may_have(self, select: Select) -> bool:
        """Whether it may hold selected lines."""
        return self.may_hold_others or select.wants_any(self.ranks)


@dataclasses.dataclass(frozen=True)
class Window:
    """How far back to read: so many seconds, the last `tail` selected lines, or since a time in RFC 3339."""

    seconds: int | None = None
    tail: int | None = None
    since: str = ""


EVERYTHING = Window()


def source(jobset: Obj, host: Host, members: Members | None = None) -> Source:
    """The log of one host of `jobset`, and the ranks that it holds by the table, that of the gang's start by default.

    Where ranks move, any pod may have lines of any; of more than STREAMS pods only those that hold a rank are read.
    """
    ranks = (members or hosts.table(jobset)).ranks(host.number)
    others = hosts.moves(jobset) and hosts.expected(jobset) <= STREAMS
    return Source(host.pod, host.number, host.generation, ranks, host.node, others)


def read(
    cluster: Cluster,
    namespace: str,
    sources: Sequence[Source],
    select: Select,
    window: Window = EVERYTHING,
    *,
    say: Callable[[str], None],
) -> Iterator[Line]:
    """The selected lines of all sources in order of time; of more than STREAMS, the last MANY_TAIL of each at most.

    `say` gets a message for each log that cannot be read; its node may be gone.
    """
    many = len(sources) > STREAMS
    if many and window.tail is None:
        window = dataclasses.replace(window, tail=MANY_TAIL)

    def one_log(one: Source) -> Iterator[Line]:
        try:
            yield from lines(cluster, namespace, one, select, window)
        except (ApiError, Unreachable) as error:
            if isinstance(error, Unreachable) and not error.sent:
                raise
            say(unreadable(one.pod, error, one.node))

    def started(one: Source) -> Iterator[Line]:
        """Its lines, the first of them read: opening one log after the other would add up their latencies."""
        found = one_log(one)
        return itertools.chain(list(itertools.islice(found, None if many else 1)), found)

    with ThreadPoolExecutor(READERS) as pool:
        return logs.merged(list(pool.map(started, sources)))


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
