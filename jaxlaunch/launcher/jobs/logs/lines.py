"""Log lines of a job: parsed, selected by rank and pattern, and merged by time."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial

from jaxlaunch.launcher.errors import ApiError, ClusterError, UnreachableError, UserError
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.collect import explain_unread
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import CONTINUATION_MARK, TailLine
from jaxlaunch.records.members import Members

_RANKED = re.compile(r"\[(\d+)\] ?(.*)", re.DOTALL)
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)"
_STAMPED = re.compile(rf"({_TIME})(?: (.*))?", re.DOTALL)
_EARLIEST_TIME = datetime.min.replace(tzinfo=UTC)
# All ranks of a gang up to this size are shown by default.
_SMALL_GANG_SIZE = 16
_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a process, or of the agent itself if `rank` is None."""

    host: int
    rank: int | None
    text: str
    # Time of writing in RFC 3339 by the kubelet's clock, or empty if the kubelet gave none.
    at: str = ""
    generation: int = 0

    def text_with_rank(self) -> str:
        """Return the line in the agent's format: `[RANK] text`."""
        return self.text if self.rank is None else f"[{self.rank}] {self.text}"


def parse_line(host: int, text: str) -> Line:
    """Parse a line of an agent's output: `[RANK] text` of a process, or the agent's own text."""
    match = _RANKED.fullmatch(text)
    return Line(host, int(match[1]), match[2]) if match else Line(host, None, text)


def parse_stamped_line(host: int, generation: int, text: str, previous: Line | None = None) -> Line:
    """Parse a line of a pod's log, which begins with the kubelet's timestamp.

    A continuation of a long line has no timestamp and takes the time and rank of the line
    `previous` it. Any other line without a timestamp is a message of the kubelet.
    """
    match = _STAMPED.fullmatch(text)
    if match is None and previous is not None and text.startswith(CONTINUATION_MARK):
        return dataclasses.replace(previous, text=text)
    at, line_text = (match[1], match[2] or "") if match else ("", text)
    return dataclasses.replace(parse_line(host, line_text), at=at, generation=generation)


def merge_lines(streams: Iterable[Iterator[Line]]) -> Iterator[Line]:
    """Merge streams that are each sorted by time, with one line of each in memory."""

    def time_written(line: Line) -> datetime:
        try:
            return datetime.fromisoformat(line.at)
        except ValueError:
            # A message of the kubelet, such as one about a missing log, has no time and comes
            # first.
            return _EARLIEST_TIME

    return heapq.merge(*streams, key=time_written)


# --- selection ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selection of lines by rank and pattern, by default all lines."""

    ranks: frozenset[int] | None = None
    pattern: re.Pattern[str] | None = None

    def matches(self, line: Line, ranks: range) -> bool:
        """Return whether a line of the host with these `ranks` is selected."""
        if self.pattern is not None and self.pattern.search(line.text) is None:
            return False
        return self.matches_any_rank(ranks if line.rank is None else (line.rank,))

    def matches_any_rank(self, ranks: Iterable[int]) -> bool:
        """Return whether lines of at least one of these ranks are selected."""
        return self.ranks is None or not self.ranks.isdisjoint(ranks)


def parse_selection(ranks: str | None, pattern: str | None) -> Selection:
    """Parse `--rank` and `--grep`. Raises UserError when either cannot be parsed."""
    try:
        return Selection(_parse_ranks(ranks), None if pattern is None else re.compile(pattern))
    except re.error as error:
        raise UserError(f"--grep {pattern} is not a regular expression: {error}.") from None


def _parse_ranks(text: str | None) -> frozenset[int] | None:
    if text in (None, "all"):
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--rank {text} is not a list of ranks.", "write 3, or 0,4-7, or all.")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def check_ranks_exist(select: Selection, processes: int) -> None:
    """Raise UserError if a selected rank does not exist."""
    missing = sorted(rank for rank in select.ranks or () if rank >= processes)
    if missing:
        hint = "the only rank is 0" if processes == 1 else f"ranks are 0–{processes - 1}"
        raise UserError(f"--rank {missing[0]} does not exist: {hint}.")


def default_selection(processes: int, failing: int | None = None) -> Selection:
    """Return all ranks of a small gang, or rank 0 and the failing rank of a large one."""
    return Selection(None if processes <= _SMALL_GANG_SIZE else frozenset({0, failing or 0}))


# --- the logs of pods -----------------------------------------------------------------------------

# Pods that are read at once, line by line.
MAX_STREAMS = 64
# Concurrent requests for a larger number of pods.
MAX_READERS = 16
# Limit for a kubelet that does not answer, unless the log is followed.
LOG_TIMEOUT_S = 20.0
# Lines of each pod of a larger number of pods without `--tail`.
DEFAULT_TAIL_LINES = 1000
_REQUEST = b"GET /output HTTP/1.1\r\nHost: agent\r\n\r\n"


@dataclasses.dataclass(frozen=True)
class LogSource:
    """Log of one host in one generation."""

    pod: str
    host: int
    generation: int
    # Ranks that the host holds now.
    ranks: range
    node: str | None = None
    # Ranks move between hosts, so the log may have lines of other ranks.
    has_moved_ranks: bool = False
    # Port at which a running agent serves the last lines.
    agent_port: int | None = None

    def may_match(self, select: Selection) -> bool:
        """Return whether the log may contain selected lines."""
        return self.has_moved_ranks or select.matches_any_rank(self.ranks)


@dataclasses.dataclass(frozen=True)
class LogWindow:
    """Start of the lines to read: seconds ago, the last `tail` selected lines, or a time."""

    seconds: int | None = None
    tail: int | None = None
    since: str = ""


FULL_WINDOW = LogWindow()


def log_source(jobset: Obj, host: Host, members: Members | None = None) -> LogSource:
    """Return the log of one host, with its ranks by `members` or the start of the gang.

    If ranks can move between hosts, any pod may have lines of any rank. In a large gang only the
    pods that hold a rank now are read.
    """
    ranks = (members or hosts.initial_members(jobset)).ranks_of(host.number)
    may_hold_others = hosts.can_move_ranks(jobset) and hosts.count_hosts(jobset) <= MAX_STREAMS
    port = hosts.metrics_port(jobset) if host.running and host.has_started else None
    place = host.pod, host.number, host.generation
    return LogSource(*place, ranks, host.node, may_hold_others, port)


def read_logs(
    cluster: Cluster,
    namespace: str,
    sources: Sequence[LogSource],
    select: Selection,
    window: LogWindow = FULL_WINDOW,
    *,
    report_unread: Callable[[str], None],
    say: Callable[[str], None],
) -> Iterator[Line]:
    """Yield the selected lines of all sources in order of time.

    If there are many sources, only the last lines of each are read. If the kubelet has rotated a
    log and has no line of a process or too few, the agent is asked for its last lines, which have
    no times.

    Args:
        cluster: The cluster.
        namespace: Namespace of the pods.
        sources: Logs to read.
        select: Lines to select.
        window: How far back to read.
        report_unread: Called with a message for each log that cannot be read, for example because
            its node is gone.
        say: Called when lines come from an agent.
    """
    is_many = len(sources) > MAX_STREAMS
    if is_many and window.tail is None:
        window = dataclasses.replace(window, tail=DEFAULT_TAIL_LINES)

    def read_log(source: LogSource) -> Iterator[Line]:
        try:
            lines = read_pod_log(cluster, namespace, source, select, window)
            if not is_many and window.seconds is None:
                agent_lines = partial(_read_agent_lines, cluster, namespace, source, select, window)
                lines = _complete_rotated(lines, agent_lines, source, window, say)
            yield from lines
        except (ApiError, UnreachableError) as error:
            if isinstance(error, UnreachableError) and not error.was_sent:
                raise
            report_unread(describe_unreadable(source.pod, error, source.node))

    def start_reading(source: LogSource) -> Iterator[Line]:
        # The first line is read here, so that the logs are opened concurrently.
        lines = read_log(source)
        return itertools.chain(list(itertools.islice(lines, None if is_many else 1)), lines)

    with ThreadPoolExecutor(MAX_READERS) as pool:
        return merge_lines(list(pool.map(start_reading, sources)))


def _complete_rotated(
    lines: Iterator[Line],
    read_agent: Callable[[], list[Line]],
    source: LogSource,
    window: LogWindow,
    say: Callable[[str], None],
) -> Iterator[Line]:
    """Yield the lines of a log, with the agent's instead if the kubelet has none or too few."""
    # Without a tail, one line of a process is enough to know that the kubelet has its log.
    first_lines, count = list[Line](), 0
    for line in lines:
        first_lines.append(line)
        count += line.rank is not None
        if count and window.tail is None:
            break
    needed_count = 1 if window.tail is None else window.tail
    agent_lines = read_agent() if count < needed_count else []
    if len(agent_lines) > count:
        shown = "the last lines are shown as its agent has them, without times"
        say(f"the kubelet of pod {source.pod} has rotated its log: {shown}")
        first_lines = [*agent_lines, *(line for line in first_lines if line.rank is None)]
    yield from first_lines
    yield from lines


def describe_unreadable(pod: str, error: ClusterError, node: str | None) -> str:
    """Return a message about a pod whose log cannot be read."""
    return f"the log of pod {pod} cannot be read: {explain_unread(error, node)}"


def read_pod_log(
    cluster: Cluster,
    namespace: str,
    source: LogSource,
    select: Selection,
    window: LogWindow = FULL_WINDOW,
    *,
    follow: bool = False,
) -> Iterator[Line]:
    """Yield the selected lines of one source without the agents' records."""
    tail = window.tail
    if tail is not None:
        tail = _tail_length(cluster, namespace, source, select, window)
    texts = cluster.log(
        namespace,
        source.pod,
        container=MAIN_CONTAINER,
        follow=follow,
        since_s=window.seconds,
        since=window.since,
        tail=tail,
        timestamps=True,
        timeout_s=None if follow else LOG_TIMEOUT_S,
    )
    return _select_lines(texts, source, select)


def _select_lines(texts: Iterable[str], source: LogSource, select: Selection) -> Iterator[Line]:
    line: Line | None = None
    for text in texts:
        line = parse_stamped_line(source.host, source.generation, text, line)
        is_record = line.rank is None and log_lines.is_for_programs(line.text)
        if not is_record and select.matches(line, source.ranks):
            yield line


def _tail_length(
    cluster: Cluster, namespace: str, source: LogSource, select: Selection, window: LogWindow
) -> int:
    """Return the number of last lines of a log that hold `window.tail` selected lines."""
    line_count = window.tail or 0
    for power in itertools.count(1):
        length = line_count * 4**power
        texts = cluster.log(
            namespace,
            source.pod,
            container=MAIN_CONTAINER,
            since_s=window.seconds,
            tail=length,
            timestamps=True,
            timeout_s=LOG_TIMEOUT_S,
        )
        flags = [any(_select_lines([text], source, select)) for text in texts]
        positions = [place for place, is_wanted in enumerate(reversed(flags), 1) if is_wanted]
        if len(positions) >= line_count:
            return positions[line_count - 1] if line_count else 0
        if len(flags) < length:
            return len(flags)
    raise AssertionError("a log ends")


def _read_agent_lines(
    cluster: Cluster, namespace: str, source: LogSource, select: Selection, window: LogWindow
) -> list[Line]:
    """Return the last selected lines of each process as the agent has them."""
    if source.agent_port is None:
        return []
    selected = list[Line]()
    by_rank = read_agent_lines(cluster, namespace, source.pod, source.agent_port)
    for rank, texts in by_rank.items():
        lines = [Line(source.host, rank, text, generation=source.generation) for text in texts]
        matching = [line for line in lines if select.matches(line, source.ranks)]
        selected += matching[-(window.tail or len(matching)) :]
    return selected


def read_agent_lines(
    cluster: Cluster, namespace: str, pod: str, port: int
) -> Mapping[int, Sequence[str]]:
    """Return the last lines of each process of a pod from its agent, by rank.

    A kubelet returns only the newest file of a log, which is empty after a rotation. The result is
    empty if the agent does not answer because it is stopping, it is of an older version, or the
    user may not use port-forwards.
    """
    try:
        head, _, body = cluster.port_forward(namespace, pod, port, _REQUEST).partition(b"\r\n\r\n")
        by_rank = json.loads(body) if head.split()[1:2] == [b"200"] else {}
        return {int(rank): [str(line) for line in lines] for rank, lines in by_rank.items()}
    except (ClusterError, ValueError, TypeError, AttributeError):
        # Whatever answered is not an agent of this version.
        return {}


def previous_lines(records: Iterable[log_lines.Line], members: Members) -> Iterator[Line]:
    """Yield the last lines of each rank of the previous generation, the failing rank's first.

    The pods of that generation are gone, so the next leader repeats their lines in its log. The
    lines are of the newest attempt. The host is the one that held the rank then or, if the leader
    does not say it, the one in `members`.
    """
    tails = [record for record in records if isinstance(record, TailLine)]
    newest_attempt = max((tail.attempt for tail in tails), default=0)
    for tail in tails:
        if tail.attempt == newest_attempt:
            host = members.host_of(tail.rank) if tail.host is None else tail.host
            for text in tail.lines:
                yield Line(host, tail.rank, text, generation=tail.generation)
