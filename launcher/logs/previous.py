"""The ends of the logs of the generation before: pods are gone with theirs, but the next leader says them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launcher.logs import Line
from launcher.testimony import Word


def lines(words: Iterable[Word], processes_per_host: int) -> Iterator[Line]:
    """The last lines of each rank, the failing rank's first."""
    for kind, said in words:
        if kind == "tail":
            rank = int(said["rank"])
            for text in said["lines"]:
                yield Line(rank // processes_per_host, rank, text, generation=int(said["generation"]))
