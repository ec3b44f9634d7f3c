"""The table of the hosts that hold ranks. Pure.

The leader keeps the table, sends it to every agent at each start, and writes it to its log, where
`status` and `logs` read it. A host is identified by its index; its ranks follow from its place in
the table. A host that is not in the table is a spare, and takes a place when one is free.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from jaxlaunch.records.codec import matches

# The hosts of a table as text, such as `0-2,5`.
HostRanges = Annotated[str, matches(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")]


@dataclasses.dataclass(frozen=True)
class Members:
    """The hosts that hold ranks, in the order of their ranks, with equally many ranks each."""

    hosts: Sequence[int]
    ranks_per_host: int

    @functools.cached_property
    def _place_by_host(self) -> Mapping[int, int]:
        return {host: place for place, host in enumerate(self.hosts)}

    def __contains__(self, host: int) -> bool:
        return host in self._place_by_host

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def has_moved_hosts(self) -> bool:
        """Return whether a host holds other ranks than those that its index implies."""
        return any(place != host for place, host in enumerate(self.hosts))

    @property
    def process_count(self) -> int:
        """Number of ranks of all hosts."""
        return len(self.hosts) * self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host, which are none for a spare."""
        if host not in self:
            return range(0)
        first = self._place_by_host[host] * self.ranks_per_host
        return range(first, first + self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """Return the host that holds a rank, or the place of a rank beyond the table."""
        place = rank // self.ranks_per_host
        return self.hosts[place] if place < len(self.hosts) else place

    def regroup(self, present: Collection[int], size: int) -> Members:
        """Return a table with `size` of the hosts that are present.

        If the size is unchanged, hosts keep their ranks, and spares take the ranks of lost hosts.
        Otherwise all ranks are numbered by the indexes of the hosts.
        """
        free_hosts = (host for host in sorted(present) if host not in self)
        if size == len(self):
            hosts = [host if host in present else next(free_hosts) for host in self.hosts]
            return dataclasses.replace(self, hosts=hosts)
        remaining = [host for host in self.hosts if host in present]
        return dataclasses.replace(self, hosts=sorted([*remaining, *free_hosts][:size]))

    def to_wire(self) -> str:
        """Return the hosts as text, such as `0-2,5`."""
        # Hosts in a row have the same difference to their place.
        rows = itertools.groupby(enumerate(self.hosts), key=lambda item: item[1] - item[0])
        ranges = [[host for _, host in run] for _, run in rows]
        return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)


def parse_members(text: str, ranks_per_host: int, max_hosts: int) -> Members:
    """Return the table that `to_wire` wrote, with `max_hosts` hosts at most."""
    ranges = (part.partition("-") for part in text.split(","))
    hosts = itertools.chain.from_iterable(
        range(int(first), int(last or first) + 1) for first, _, last in ranges
    )
    return Members(tuple(itertools.islice(hosts, max_hosts)), ranks_per_host)
