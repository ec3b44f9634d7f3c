"""Memory of a host and of its ranks in an attempt, as an agent sends it to the leader. No I/O."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping
from typing import Any

from jaxlaunch.records import codec
from jaxlaunch.records.codec import NonNegativeInt
from jaxlaunch.records.summary import RankMemory

# A host reports its memory again after an increase by this share.
REPORTED_SHARE = 1 / 64


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The most memory of a host and of its ranks in an attempt.

    Attributes:
        in_use_mib: Most memory in use on the host or in its container, None if it is unknown.
        limit_mib: Its limit.
        peaks_mib: Most memory of a process of each rank.
    """

    in_use_mib: NonNegativeInt | None = None
    limit_mib: NonNegativeInt | None = None
    peaks_mib: Mapping[int, NonNegativeInt] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> HostMemory:
        """Read a message between agents. Raises MalformedError if a field has another form."""
        return codec.read_record(cls, fields)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields for a message between agents."""
        return {**vars(self), "peaks_mib": {str(rank): mib for rank, mib in self.peaks_mib.items()}}

    def with_peak(self, rank: int, peak_bytes: float) -> HostMemory:
        """Return the memory with that of a process of a rank."""
        peak_mib = max(int(peak_bytes) >> 20, self.peaks_mib.get(rank, 0))
        return dataclasses.replace(self, peaks_mib={**self.peaks_mib, rank: peak_mib})

    def with_use(self, in_use_bytes: float, limit_bytes: float) -> HostMemory:
        """Return the memory with a reading of the whole host."""
        in_use_mib = max(int(in_use_bytes) >> 20, self.in_use_mib or 0)
        return dataclasses.replace(self, in_use_mib=in_use_mib, limit_mib=int(limit_bytes) >> 20)

    def has_grown_from(self, reported: HostMemory) -> bool:
        """Return whether the memory is so much more than `reported` that the leader should know."""
        numbers = [(self.in_use_mib or 0, reported.in_use_mib or 0)]
        numbers += [(mib, reported.peaks_mib.get(rank, 0)) for rank, mib in self.peaks_mib.items()]
        return any(mib > last_mib * (1 + REPORTED_SHARE) for mib, last_mib in numbers)

    def rank_memory(self, rank: int, host: int) -> RankMemory | None:
        """Return the record of a rank of this host, or None if its memory is unknown."""
        if (peak_mib := self.peaks_mib.get(rank)) is None:
            return None
        use = (None if mib is None else _to_gib(mib) for mib in (self.in_use_mib, self.limit_mib))
        return RankMemory(rank, host, _to_gib(peak_mib), *use)

    def fullness(self) -> tuple[float, int]:
        """Return the key by which hosts are compared: the used share, and the largest process."""
        used_share = (self.in_use_mib or 0) / self.limit_mib if self.limit_mib else 0.0
        return used_share, max(self.peaks_mib.values(), default=0)


class GangMemory:
    """The memory of the hosts of an attempt that have reported it."""

    def __init__(self) -> None:
        self._by_host: dict[int, HostMemory] = {}

    def take_report(self, host: int, memory: HostMemory, ranks: range) -> None:
        """Take the report of a host. Raises ValueError if it names others than the host's ranks."""
        if not memory.peaks_mib.keys() <= set(ranks):
            raise ValueError(f"it does not have all of the ranks {list(memory.peaks_mib)}")
        self._by_host[host] = memory

    def find_rank(self, rank: int | None) -> RankMemory | None:
        """Return the memory of a rank and of its host, or None if it is unknown."""
        for host, memory in self._by_host.items():
            if rank is not None and rank in memory.peaks_mib:
                return memory.rank_memory(rank, host)
        return None

    def fullest_hosts(self, limit: int) -> list[RankMemory]:
        """Return the memory of the largest rank on each of the fullest hosts, the fullest first."""
        hosts = [host for host, memory in self._by_host.items() if memory.peaks_mib]
        fullest = heapq.nlargest(limit, hosts, key=lambda host: self._by_host[host].fullness())
        rows = []
        for host in fullest:
            memory = self._by_host[host]
            largest_rank = max(memory.peaks_mib, key=memory.peaks_mib.__getitem__)
            rows.append(memory.rank_memory(largest_rank, host))
        return [row for row in rows if row is not None]


def _to_gib(mib: int) -> float:
    return round(mib / 1024, 3)
