"""The ends of the logs of the generation before, whose pods are gone: the next leader repeats them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxlaunch.launcher.jobs.logs.lines import Line
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import Tail
from jaxlaunch.records.members import Members


def lines(records: Iterable[log_lines.Line], members: Members) -> Iterator[Line]:
    """The last lines of each rank, the failing rank's first; of the newest attempt that they were repeated for.

    The host is the one that held the rank then; where the leader does not say it, the one that holds it by the table
    `members`.
    """
    tails = [record for record in records if isinstance(record, Tail)]
    newest = max((tail.attempt for tail in tails), default=0)
    for tail in tails:
        if tail.attempt == newest:
            host = members.host(tail.rank) if tail.host is None else tail.host
            for text in tail.lines:
                yield Line(host, tail.rank, text, generation=tail.generation)
