"""Log lines of a job: reading them from pods, selection by rank and pattern, merging by time.

The log of a pod has the lines of all processes of the host, each with its rank, and lines and
records of the agent. The kubelet prefixes each line with a timestamp.
"""

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
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import CONTINUATION_MARK, TailLine
from jaxlaunch.records.members import Members

_RANKED_LINE = re.compile(r"\[(\d+)\] ?(.*)", re.DOTALL)
_TIMESTAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)"
_TIMESTAMPED_LINE = re.compile(rf"({_TIMESTAMP})(?: (.*))?", re.DOTALL)
_EARLIEST_TIME = datetime.min.replace(tzinfo=UTC)
# By default all ranks of a gang are shown if it has at most this many.
_SMALL_GANG_SIZE = 16
_RANK_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a process, or of the agent itself if `rank` is None."""

    host: int
    rank: int | None
    text: str
    # Time of writing in RFC 3339 by the kubelet's clock, or empty if the kubelet gave none.
    at: str = ""
    generation: int = 0
    # The role of the process, in a job with roles.
    role: str = ""

    def text_with_rank(self) -> str:
        """Return the line in the agent's format, `[RANK] text`, or with a role `[ROLE RANK]`."""
        if self.rank is None:
            return f"{self.role}: {self.text}" if self.role else self.text
        rank = f"{self.role} {self.rank}" if self.role else str(self.rank)
        return f"[{rank}] {self.text}"


def parse_line(host: int, text: str) -> Line:
    """Parse a line of an agent's output: `[RANK] text` of a process, or the agent's own text."""
    match = _RANKED_LINE.fullmatch(text)
    return Line(host, int(match[1]), match[2]) if match else Line(host, None, text)


def parse_stamped_line(host: int, generation: int, text: str, previous: Line | None = None) -> Line:
    """Parse a line of a pod's log, which begins with the kubelet's timestamp.

    A continuation of a long line has no timestamp. It gets the time and rank of `previous`, the
    line before it. Any other line without a timestamp is a message of the kubelet.
    """
    match = _TIMESTAMPED_LINE.fullmatch(text)
    if match is None and previous is not None and text.startswith(CONTINUATION_MARK):
        return dataclasses.replace(previous, text=text)
    at, line_text = (match[1], match[2] or "") if match else ("", text)
    return dataclasses.replace(parse_line(host, line_text), at=at, generation=generation)


def merge_lines(streams: Iterable[Iterator[Line]]) -> Iterator[Line]:
    """Merge streams that are each sorted by time, holding one line of each in memory."""

    def line_time(line: Line) -> datetime:
        try:
            return datetime.fromisoformat(line.at)
        except ValueError:
            # A message of the kubelet, for example about a missing log, has no time. It comes
            # first.
            return _EARLIEST_TIME

    return heapq.merge(*streams, key=line_time)


# --- selection ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selection of lines by rank and pattern, by default all lines."""

    ranks: frozenset[int] | None = None
    pattern: re.Pattern[str] | None = None

    def matches(self, line: Line, ranks: range) -> bool:
        """Return whether a line is selected. An agent's line is, if one of its `ranks` is."""
        if self.pattern is not None and self.pattern.search(line.text) is None:
            return False
        return self.matches_any_rank(ranks if line.rank is None else (line.rank,))

    def matches_any_rank(self, ranks: Iterable[int]) -> bool:
        """Return whether lines of at least one of these ranks are selected."""
        return self.ranks is None or not self.ranks.isdisjoint(ranks)


def parse_selection(ranks: str | None, pattern: str | None) -> Selection:
    """Parse the values of `--rank` and `--grep`. Raises UserError if one is invalid."""
    try:
        return Selection(_parse_ranks(ranks), None if pattern is None else re.compile(pattern))
    except re.error as error:
        raise UserError(f"--grep {pattern} is not a regular expression: {error}.") from None


def _parse_ranks(text: str | None) -> frozenset[int] | None:
    if text in (None, "all"):
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        match = _RANK_RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--rank {text} is not a list of ranks.", "write 3, or 0,4-7, or all.")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(ranks)


def check_ranks_exist(selection: Selection, processes: int) -> None:
    """Raise UserError if a selected rank does not exist."""
    missing_ranks = sorted(rank for rank in selection.ranks or () if rank >= processes)
    if missing_ranks:
        hint = "the only rank is 0" if processes == 1 else f"ranks are 0–{processes - 1}"
        raise UserError(f"--rank {missing_ranks[0]} does not exist: {hint}.")


def default_selection(processes: int, failed_rank: int | None = None) -> Selection:
    """Return all ranks of a small gang, or rank 0 and the failing rank of a large one."""
    return Selection(None if processes <= _SMALL_GANG_SIZE else frozenset({0, failed_rank or 0}))


# --- the logs of pods -----------------------------------------------------------------------------

# The logs of up to this many pods are read at once, line by line.
MAX_STREAMS = 64
# The logs of more pods are read by this many threads, one log at a time each.
MAX_READERS = 16
# Timeout for a log that is not followed.
LOG_TIMEOUT_S = 20.0
# Number of last lines that are read from each of more than MAX_STREAMS pods without `--tail`.
DEFAULT_TAIL_LINES = 1000
_OUTPUT_REQUEST = b"GET /output HTTP/1.1\r\nHost: agent\r\n\r\n"


@dataclasses.dataclass(frozen=True)
class LogSource:
    """Log of one host in one generation.

    Attributes:
        pod: Name of the pod.
        host: Number of the host.
        generation: Generation of the pod.
        ranks: Ranks that the host holds now.
        node: Node of the pod.
        has_moved_ranks: Whether ranks may have moved, so that the log has lines of other ranks.
        agent_port: Port at which the agent serves the last lines, if it runs.
    """

    pod: str
    host: int
    generation: int
    ranks: range
    node: str | None = None
    has_moved_ranks: bool = False
    agent_port: int | None = None

    def may_match(self, selection: Selection) -> bool:
        """Return whether the log may contain selected lines."""
        return self.has_moved_ranks or selection.matches_any_rank(self.ranks)


@dataclasses.dataclass(frozen=True)
class LogWindow:
    """Start of the lines to read: `seconds` ago, the last `tail` selected lines, or a time."""

    seconds: int | None = None
    tail: int | None = None
    since: str = ""


FULL_WINDOW = LogWindow()


def log_source(jobset: Obj, host: Host, members: Members | None = None) -> LogSource:
    """Return the log of one host. Its ranks are from `members`, by default those at first.

    If ranks can move between hosts, any pod may have lines of any rank. For a large gang that is
    ignored, so that only the pods that hold a selected rank now are read.
    """
    ranks = (members or hosts.initial_members(jobset)).ranks_of(host.number)
    has_moved_ranks = hosts.can_move_ranks(jobset) and hosts.count_hosts(jobset) <= MAX_STREAMS
    port = hosts.metrics_port(jobset) if host.running and host.has_started else None
    return LogSource(
        pod=host.pod,
        host=host.number,
        generation=host.generation,
        ranks=ranks,
        node=host.node,
        has_moved_ranks=has_moved_ranks,
        agent_port=port,
    )


def read_logs(
    cluster: Cluster,
    namespace: str,
    sources: Sequence[LogSource],
    selection: Selection,
    window: LogWindow = FULL_WINDOW,
    *,
    report_unread: Callable[[str], None],
    say: Callable[[str], None],
) -> Iterator[Line]:
    """Yield the selected lines of all sources in order of time.

    If there are more than MAX_STREAMS sources, only the last lines of each are read. After the
    kubelet has rotated a log, it returns no lines of the processes or too few. Then the last lines
    are read from the agent, which has no times.

    Args:
        cluster: The cluster.
        namespace: Namespace of the pods.
        sources: Logs to read.
        selection: Lines to select.
        window: Start of the lines.
        report_unread: Called with a message for each log that cannot be read, for example because
            its node is gone.
        say: Called when lines come from an agent.
    """
    has_many_sources = len(sources) > MAX_STREAMS
    if has_many_sources and window.tail is None:
        window = dataclasses.replace(window, tail=DEFAULT_TAIL_LINES)

    def read_log(source: LogSource) -> Iterator[Line]:
        try:
            lines = read_pod_log(cluster, namespace, source, selection, window)
            if not has_many_sources and window.seconds is None:
                read_agent = partial(
                    _read_agent_lines, cluster, namespace, source, selection, window
                )
                lines = _complete_rotated(lines, read_agent, source, window, say)
            yield from lines
        except (ApiError, UnreachableError) as error:
            if isinstance(error, UnreachableError) and not error.was_sent:
                raise
            report_unread(describe_unreadable(source.pod, error, source.node))

    def start_reading(source: LogSource) -> Iterator[Line]:
        # The first line is read here, in a thread, so that the logs are opened concurrently.
        lines = read_log(source)
        return itertools.chain(
            list(itertools.islice(lines, None if has_many_sources else 1)), lines
        )

    with ThreadPoolExecutor(MAX_READERS) as pool:
        return merge_lines(list(pool.map(start_reading, sources)))


def _complete_rotated(
    lines: Iterator[Line],
    read_agent: Callable[[], list[Line]],
    source: LogSource,
    window: LogWindow,
    say: Callable[[str], None],
) -> Iterator[Line]:
    """Yield the lines of a log, or the agent's lines if the kubelet has none or too few."""
    # Without a tail, one line of a process shows that the kubelet has the log.
    first_lines, count = list[Line](), 0
    for line in lines:
        first_lines.append(line)
        count += line.rank is not None
        if count and window.tail is None:
            break
    needed_count = 1 if window.tail is None else window.tail
    agent_lines = read_agent() if count < needed_count else []
    if len(agent_lines) > count:
        note = "the last lines are shown as its agent has them, without times"
        say(f"the kubelet of pod {source.pod} has rotated its log: {note}")
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
    selection: Selection,
    window: LogWindow = FULL_WINDOW,
    *,
    follow: bool = False,
) -> Iterator[Line]:
    """Yield the selected lines of one source. The agents' records are left out."""
    tail = window.tail
    if tail is not None:
        tail = _tail_length(cluster, namespace, source, selection, window)
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
    return _select_lines(texts, source, selection)


def _select_lines(texts: Iterable[str], source: LogSource, selection: Selection) -> Iterator[Line]:
    line: Line | None = None
    for text in texts:
        line = parse_stamped_line(source.host, source.generation, text, line)
        is_record = line.rank is None and log_lines.is_for_programs(line.text)
        if not is_record and selection.matches(line, source.ranks):
            yield line


def _tail_length(
    cluster: Cluster, namespace: str, source: LogSource, selection: Selection, window: LogWindow
) -> int:
    """Return how many last lines of a log contain `window.tail` selected lines.

    Four times more lines are read each time, until there are enough or the log begins.
    """
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
        are_selected = [any(_select_lines([text], source, selection)) for text in texts]
        selected_positions = [
            position
            for position, is_selected in enumerate(reversed(are_selected), 1)
            if is_selected
        ]
        if len(selected_positions) >= line_count:
            return selected_positions[line_count - 1] if line_count else 0
        if len(are_selected) < length:
            return len(are_selected)
    raise AssertionError("a log ends")


def _read_agent_lines(
    cluster: Cluster, namespace: str, source: LogSource, selection: Selection, window: LogWindow
) -> list[Line]:
    """Return the last selected lines of each process from the agent, without times."""
    if source.agent_port is None:
        return []
    selected = list[Line]()
    by_rank = read_agent_lines(cluster, namespace, source.pod, source.agent_port)
    for rank, texts in by_rank.items():
        lines = [Line(source.host, rank, text, generation=source.generation) for text in texts]
        matching = [line for line in lines if selection.matches(line, source.ranks)]
        selected += matching[-(window.tail or len(matching)) :]
    return selected


def read_agent_lines(
    cluster: Cluster, namespace: str, pod: str, port: int
) -> Mapping[int, Sequence[str]]:
    """Return the last lines of each process of a pod from its agent, by rank.

    A kubelet returns only the newest file of a log, which is empty after a rotation. The result is
    empty if the agent does not answer: it is stopping, it has an older version, or the user may not
    use port-forwards.
    """
    try:
        answer = streams.exchange_bytes(cluster, namespace, pod, port, _OUTPUT_REQUEST)
        head, _, body = answer.partition(b"\r\n\r\n")
        by_rank = json.loads(body) if head.split()[1:2] == [b"200"] else {}
        return {int(rank): [str(line) for line in lines] for rank, lines in by_rank.items()}
    except (ClusterError, ValueError, TypeError, AttributeError):
        # The answer is not from an agent of this version.
        return {}


def previous_lines(records: Iterable[log_lines.Line], members: Members) -> Iterator[Line]:
    """Yield the last lines of each rank of the previous generation, the failing rank's first.

    The pods of that generation are gone, so the next leader repeats the lines of their last attempt
    in its log. The host of a line is the one that held the rank then or, if the record does not
    have it, the one in `members`.
    """
    tails = [record for record in records if isinstance(record, TailLine)]
    newest_attempt = max((tail.attempt for tail in tails), default=0)
    for tail in tails:
        if tail.attempt == newest_attempt:
            host = members.host_of(tail.rank) if tail.host is None else tail.host
            for text in tail.lines:
                yield Line(host, tail.rank, text, generation=tail.generation)
