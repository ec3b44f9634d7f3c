"""The table of the hosts that hold ranks. Pure.

The leader keeps the table, sends it to every agent at each start, and writes it to its log, from
which `launcher status` and `launcher logs` read it. A host is identified by its index; its ranks
follow from its place in the table. A host outside the table is a spare, which gets the place of a
host that is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from jaxlaunch.records.codec import matches

# The hosts of a table as text, such as "0-2,5".
HostRanges = Annotated[str, matches(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")]


@dataclasses.dataclass(frozen=True)
class Members:
    """The hosts that hold ranks, in the order of their ranks. Each has the same number of ranks."""

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
        """Return whether any host holds ranks that differ from those of its index."""
        return any(place != host for place, host in enumerate(self.hosts))

    @property
    def process_count(self) -> int:
        """Number of ranks of all hosts."""
        return len(self.hosts) * self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host, an empty range for a spare."""
        if host not in self:
            return range(0)
        first = self._place_by_host[host] * self.ranks_per_host
        return range(first, first + self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """Return the host that holds a rank, or the place of a rank beyond the table."""
        place = rank // self.ranks_per_host
        return self.hosts[place] if place < len(self.hosts) else place

    def regroup(self, present_hosts: Collection[int], size: int) -> Members:
        """Return a table with `size` of the hosts that are present.

        If the size is unchanged, the remaining hosts keep their ranks, and spares take the ranks of
        lost hosts. Otherwise the ranks are assigned in the order of the hosts' indexes.
        """
        spares = (host for host in sorted(present_hosts) if host not in self)
        if size == len(self):
            hosts = [host if host in present_hosts else next(spares) for host in self.hosts]
            return dataclasses.replace(self, hosts=hosts)
        remaining = [host for host in self.hosts if host in present_hosts]
        return dataclasses.replace(self, hosts=sorted([*remaining, *spares][:size]))

    def to_wire(self) -> str:
        """Return the hosts as text, such as "0-2,5"."""
        # The difference between host and place is the same for all hosts of a range.
        groups = itertools.groupby(enumerate(self.hosts), key=lambda item: item[1] - item[0])
        ranges = [[host for _, host in group] for _, group in groups]
        return ",".join(
            str(hosts[0]) if len(hosts) == 1 else f"{hosts[0]}-{hosts[-1]}" for hosts in ranges
        )


def parse_members(text: str, ranks_per_host: int, max_hosts: int) -> Members:
    """Return the table that `to_wire` wrote, with at most `max_hosts` hosts."""
    ranges = (part.partition("-") for part in text.split(","))
    hosts = itertools.chain.from_iterable(
        range(int(first), int(last or first) + 1) for first, _, last in ranges
    )
    return Members(tuple(itertools.islice(hosts, max_hosts)), ranks_per_host)
