"""What pods have written: each one's log as lines, and the logs of many merged by time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from launcher import hosts, logs
from launcher.agent import words
from launcher.checks import MAIN_CONTAINER
from launcher.cluster import Cluster
from launcher.errors import ApiError
from launcher.hosts import Host
from launcher.logs import Line, Select
from launcher.objects import Obj
from trainer import contract

STREAMS = 64  # pods that are read at once, line by line
READERS = 16  # requests at once where there are more
MANY_TAIL = 1000  # lines of each pod, where there are more and nobody said how many


@dataclasses.dataclass(frozen=True)
class Source:
    """The log of one host of one generation."""

    pod: str
    host: int
    generation: int
    ranks: range


@dataclasses.dataclass(frozen=True)
class Window:
    """How far back is read: so many seconds, the last wanted lines, or from a moment as the kubelet writes it."""

    seconds: int | None = None
    tail: int | None = None
    since: str = ""


EVERYTHING = Window()


def processes_per_host(jobset: Obj) -> int:
    return int(json.loads(hosts.environment(jobset).get(contract.JOB) or "{}").get("processes_per_host", 1))


def source(jobset: Obj, host: Host) -> Source:
    """Where the lines of a host of `jobset` are."""
    each = processes_per_host(jobset)
    return Source(host.pod, host.number, host.generation, range(host.number * each, (host.number + 1) * each))


def read(
    cluster: Cluster,
    namespace: str,
    sources: Sequence[Source],
    select: Select,
    window: Window = EVERYTHING,
    *,
    say: Callable[[str], None],
) -> Iterator[Line]:
    """The wanted lines of all sources in order of time; of more than STREAMS, the last MANY_TAIL of each at most.

    `say` hears of each log that cannot be read; its node may be gone.
    """
    many = len(sources) > STREAMS
    if many and window.tail is None:
        window = dataclasses.replace(window, tail=MANY_TAIL)

    def own(one: Source) -> Iterator[Line]:
        try:
            yield from lines(cluster, namespace, one, select, window)
        except ApiError as error:
            say(unreadable(one.pod, error))

    def begun(one: Source) -> Iterator[Line]:
        """Its lines, the first of them read: to ask one log after the other would add up what each waits."""
        found = own(one)
        return itertools.chain(list(itertools.islice(found, None if many else 1)), found)

    with ThreadPoolExecutor(READERS) as pool:
        return logs.merged(list(pool.map(begun, sources)))


def unreadable(pod: str, error: ApiError) -> str:
    return f"the log of pod {pod} cannot be read: {error.message}"


def lines(
    cluster: Cluster,
    namespace: str,
    of: Source,
    select: Select,
    window: Window = EVERYTHING,
    *,
    follow: bool = False,
) -> Iterator[Line]:
    """The wanted lines of one source; those that agents write for programs are left out."""
    reach = None if window.tail is None else _reach(cluster, namespace, of, select, window)
    found = cluster.log(
        namespace,
        of.pod,
        container=MAIN_CONTAINER,
        follow=follow,
        since_s=window.seconds,
        since=window.since,
        tail=reach,
        timestamps=True,
    )
    return _wanted(found, of, select)


def _wanted(texts: Iterator[str], of: Source, select: Select) -> Iterator[Line]:
    for text in texts:
        line = logs.stamped(of.host, of.generation, text)
        is_word = line.rank is None and words.is_word(line.text)
        if not is_word and select.wants(line, of.ranks):
            yield line


def _reach(cluster: Cluster, namespace: str, of: Source, select: Select, window: Window) -> int:
    """How many lines from its end hold the last `window.tail` of a log that are wanted."""
    wanted = window.tail or 0
    for power in itertools.count(1):
        asked = wanted * 4**power
        found = cluster.log(
            namespace, of.pod, container=MAIN_CONTAINER, since_s=window.seconds, tail=asked, timestamps=True
        )
        flags = [any(_wanted(iter([text]), of, select)) for text in found]
        places = [place for place, is_wanted in enumerate(reversed(flags), 1) if is_wanted]
        if len(places) >= wanted:
            return places[wanted - 1] if wanted else 0
        if len(flags) < asked:
            return len(flags)
    raise AssertionError("a log ends")
