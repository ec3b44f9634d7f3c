"""The ends of the logs of the generation before, whose pods are gone: the next leader repeats them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxlaunch.launcher.logs.lines import Line
from jaxlaunch.launcher.status.agent_report import Record


def lines(records: Iterable[Record], processes_per_host: int) -> Iterator[Line]:
    """The last lines of each rank, the failing rank's first."""
    for kind, tail in records:
        if kind == "tail":
            rank = int(tail["rank"])
            for text in tail["lines"]:
                yield Line(rank // processes_per_host, rank, text, generation=int(tail["generation"]))
