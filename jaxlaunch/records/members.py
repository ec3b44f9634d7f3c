"""Which hosts hold ranks: the one table of a gang, which the leader keeps, tells every agent at each start, and writes
to its log, where `status` and `logs` read it. Pure.

A host's index says who it is; its ranks follow from its place in the table. A host that is not in it is a spare: it
takes a place when one is free.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated

from jaxlaunch.records.checked import like

Wire = Annotated[str, like(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")]  # a table's hosts as text: `0-2,5`


@dataclasses.dataclass(frozen=True)
class Members:
    """The hosts that hold ranks, in the order of their ranks."""

    hosts: Sequence[int]
    each: int  # ranks of a host

    @functools.cached_property
    def _places(self) -> Mapping[int, int]:
        return {host: place for place, host in enumerate(self.hosts)}

    def __contains__(self, host: int) -> bool:
        return host in self._places

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def have_moved(self) -> bool:
        """Whether a host holds other ranks than its index says."""
        return any(place != host for place, host in enumerate(self.hosts))

    @property
    def processes(self) -> int:
        """The ranks of all hosts."""
        return len(self.hosts) * self.each

    def ranks(self, host: int) -> range:
        """The ranks of a host; none of a spare."""
        place = self._places.get(host)
        return range(0) if place is None else range(place * self.each, (place + 1) * self.each)

    def host(self, rank: int) -> int:
        """The host that holds a rank; where none does, as of a rank of a larger gang, its place."""
        place = rank // self.each
        return self.hosts[place] if place < len(self.hosts) else place

    def regrouped(self, present: Collection[int], size: int) -> Members:
        """The table of `size` of the hosts that are present, host 0 first.

        At the same size each keeps its ranks, and spares take those of the hosts that are lost. Another size numbers
        all ranks anew, by the hosts' indexes.
        """
        free = (host for host in sorted(present) if host not in self)
        if size == len(self):
            kept = [host if host in present else next(free) for host in self.hosts]
            return dataclasses.replace(self, hosts=kept)
        there = [host for host in self.hosts if host in present]
        return dataclasses.replace(self, hosts=sorted(itertools.islice(itertools.chain(there, free), size)))

    def to_wire(self) -> str:
        """The hosts as `0-2,5`."""
        runs = _runs(self.hosts)
        return ",".join(str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)


def from_wire(text: str, each: int, most: int) -> Members:
    """The table that `to_wire` wrote, `most` hosts of it at most."""
    runs = (part.partition("-") for part in text.split(","))
    hosts = itertools.chain.from_iterable(range(int(first), int(last or first) + 1) for first, _, last in runs)
    return Members(tuple(itertools.islice(hosts, most)), each)


def _runs(hosts: Sequence[int]) -> Iterator[range]:
    start = 0
    for at in range(1, len(hosts) + 1):
        if at == len(hosts) or hosts[at] != hosts[at - 1] + 1:
            yield range(hosts[start], hosts[at - 1] + 1)
            start = at
