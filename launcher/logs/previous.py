"""The ends of the logs of the generation before, whose pods are gone: the next leader repeats them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxlaunch.launcher.logs.lines import Line
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import Tail


def lines(records: Iterable[log_lines.Line], processes_per_host: int) -> Iterator[Line]:
    """The last lines of each rank, the failing rank's first; of the newest attempt that they were repeated for."""
    tails = [record for record in records if isinstance(record, Tail)]
    newest = max((tail.attempt for tail in tails), default=0)
    for tail in tails:
        if tail.attempt == newest:
            for text in tail.lines:
                yield Line(tail.rank // processes_per_host, tail.rank, text, generation=tail.generation)
