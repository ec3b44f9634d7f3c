"""Hears the words of a leader in its pod's log; the rest of the log is left to `launcher logs`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launcher.agent import words
from launcher.cluster import Cluster
from launcher.hosts import Host
from launcher.testimony import Word

_RECENT_S = 45  # of a running leader's log: it says how the gang stands every 15 s
_TAIL = 400  # lines of the log of a leader that ended
PATIENCE_S = 8.0  # with a node that does not answer: the rest of what was seen must not wait for it
_HEAD_BYTES = 256 * 1024  # where it says what was before


def newest(cluster: Cluster, namespace: str, leader: Host, patience_s: float = PATIENCE_S) -> list[Word]:
    """How its gang stands, or how it ended. Raises ClusterError when its log cannot be read."""
    if leader.ended:
        return _words(cluster, namespace, leader, patience_s, tail=_TAIL)
    return _words(cluster, namespace, leader, patience_s, since_s=_RECENT_S)


def all_known(cluster: Cluster, namespace: str, leader: Host) -> list[Word]:
    """That, and what it said of the attempts before; two calls where the log is long."""
    found = newest(cluster, namespace, leader)
    if any(kind == "past" for kind, _ in found):
        return found
    return [*_words(cluster, namespace, leader, PATIENCE_S, limit_bytes=_HEAD_BYTES), *found]


def _words(cluster: Cluster, namespace: str, leader: Host, patience_s: float, **part: int) -> list[Word]:
    lines = cluster.log(namespace, leader.pod, container=leader.container, patience_s=patience_s, **part)  # type: ignore[arg-type]
    return list(_spoken(lines))


def _spoken(lines: Iterable[str]) -> Iterator[Word]:
    for line in lines:
        word = words.parse(line)
        if word is not None and word[0] != "tail":  # the end of an older log is as long as a log
            yield word
