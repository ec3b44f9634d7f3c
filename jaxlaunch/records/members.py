"""The table of the hosts that hold ranks. Pure.

The leader keeps the table, sends it to every agent at each start, and writes it to its log, where `status` and `logs`
read it. A host is identified by its index; its ranks follow from its place in the table. A host that is not in the
table is a spare, and takes a place when one is free.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated

from jaxlaunch.records.checked import like

# The hosts of a table as text, such as `0-2,5`.
Wire = Annotated[str, like(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")]


@dataclasses.dataclass(frozen=True)
class Members:
    """The hosts that hold ranks, in the order of their ranks. Each host has the same number of ranks."""

    hosts: Sequence[int]
    each: int

    @functools.cached_property
    def _places(self) -> Mapping[int, int]:
        return {host: place for place, host in enumerate(self.hosts)}

    def __contains__(self, host: int) -> bool:
        return host in self._places

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def have_moved(self) -> bool:
        """Whether a host holds other ranks than those that its index implies."""
        return any(place != host for place, host in enumerate(self.hosts))

    @property
    def processes(self) -> int:
        """Number of ranks of all hosts."""
        return len(self.hosts) * self.each

    def ranks(self, host: int) -> range:
        """Return the ranks of a host, which are none for a spare."""
        place = self._places.get(host)
        return range(0) if place is None else range(place * self.each, (place + 1) * self.each)

    def host(self, rank: int) -> int:
        """Return the host that holds a rank. For a rank beyond the table, as of a larger gang, return its place."""
        place = rank // self.each
        return self.hosts[place] if place < len(self.hosts) else place

    def regrouped(self, present: Collection[int], size: int) -> Members:
        """Return a table with `size` of the hosts that are present.

        If the size is unchanged, hosts keep their ranks, and spares take the ranks of lost hosts. Otherwise all ranks
        are numbered by the indexes of the hosts.
        """
        free = (host for host in sorted(present) if host not in self)
        if size == len(self):
            kept = [host if host in present else next(free) for host in self.hosts]
            return dataclasses.replace(self, hosts=kept)
        there = [host for host in self.hosts if host in present]
        return dataclasses.replace(self, hosts=sorted(itertools.islice(itertools.chain(there, free), size)))

    def to_wire(self) -> str:
        """Return the hosts as text, such as `0-2,5`."""
        runs = _runs(self.hosts)
        return ",".join(str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs)


def from_wire(text: str, each: int, most: int) -> Members:
    """Return the table that `to_wire` wrote, with `most` hosts at most."""
    runs = (part.partition("-") for part in text.split(","))
    hosts = itertools.chain.from_iterable(range(int(first), int(last or first) + 1) for first, _, last in runs)
    return Members(tuple(itertools.islice(hosts, most)), each)


def _runs(hosts: Sequence[int]) -> Iterator[range]:
    start = 0
    for at in range(1, len(hosts) + 1):
        if at == len(hosts) or hosts[at] != hosts[at - 1] + 1:
            yield range(hosts[start], hosts[at - 1] + 1)
            start = at
