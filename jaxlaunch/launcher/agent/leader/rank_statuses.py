"""Statuses of all ranks of an attempt, with counts that are updated incrementally.

A gang of 80,000 ranks sends thousands of beats per second. Therefore no message may cost a pass over all ranks, and
ranks with equal statuses share one `Status` object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from jaxlaunch.launcher.agent.gang.progress import Status, key_of, ranks_of

# Ranks of a gang step together but beat one by one: this many recent statuses are shared with the next ranks that come
# to them, and this many successors of each status.
MAX_SHARED, MAX_SUCCESSORS = 128, 16

Counted = TypeVar("Counted", int, str)
Key = TypeVar("Key")
Value = TypeVar("Value")


class RankStatuses:
    """Newest status of every rank.

    Attributes:
        ranks_by_host: Ranks of each host, from 0 on without a gap.
        by_rank: Statuses by rank number. A list, because the statuses of a host are read and replaced as one slice.
        alive: Ranks that have not ended.
        staying: Ranks that have neither ended nor begun to exit.
        unclean: Ranks that have not ended cleanly.
        committed: Newest step on storage, restored or committed by any rank.
        first_committed: First step that this attempt committed.
        versions: Ranks by version of JAX.
    """

    def __init__(self, ranks_by_host: Mapping[int, range]) -> None:
        self.ranks_by_host = ranks_by_host
        count = sum(map(len, ranks_by_host.values()))
        self.by_rank = [Status()] * count
        self.alive = self.staying = self.unclean = count
        self.committed: int | None = None
        self.first_committed: int | None = None
        self.versions: dict[str, int] = {}
        self._steps: dict[int, int] = {}
        self._host_keys = {host: key_of(ranks[0], ranks[-1]) for host, ranks in ranks_by_host.items()}
        self._shared = SharedStatuses()

    @property
    def first_step(self) -> int | None:
        """Step that is complete on every rank that reports one."""
        return min(self._steps, default=None)

    @property
    def last_step(self) -> int | None:
        """Step of the foremost rank."""
        return max(self._steps, default=None)

    def living(self) -> dict[int, Status]:
        """Return the statuses of the ranks whose process has not ended."""
        return {rank: status for rank, status in enumerate(self.by_rank) if status.exit is None}

    def host_of(self, rank: int) -> int:
        """Return the host that holds a rank."""
        return next(host for host, ranks in self.ranks_by_host.items() if rank in ranks)

    def update(self, statuses: Mapping[int, Status]) -> None:
        """Replace the statuses of some ranks."""
        for rank, status in statuses.items():
            self.set_range(range(rank, rank + 1), status)

    def merge(self, host: int, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Apply the changes in a beat of a host, as `progress.StatusChanges` wrote them.

        Raises:
            ValueError, TypeError: A key or a field is malformed.
        """
        # A spare has no ranks, and its beats have no changes.
        for key, fields in changes.items():
            host_ranks = self.ranks_by_host[host]
            ranks = host_ranks if key == self._host_keys[host] else ranks_of(key, host_ranks)
            statuses = self.by_rank[ranks.start : ranks.stop]
            # The ranks of a host nearly always have the same status.
            if statuses.count(statuses[0]) == len(statuses):
                self.set_range(ranks, self._shared.apply(statuses[0], fields))
                continue
            for rank, status in zip(ranks, statuses, strict=True):
                self.set_range(range(rank, rank + 1), self._shared.apply(status, fields))

    def set_range(self, ranks: range, after: Status) -> None:
        """Replace the status of consecutive ranks, which must all have had the same one."""
        before, count = self.by_rank[ranks.start], len(ranks)
        if after is before:
            return
        self.by_rank[ranks.start : ranks.stop] = [after] * count
        if after.step != before.step:
            _move(self._steps, before.step, after.step, count)
        if after.jax != before.jax:
            _move(self.versions, before.jax, after.jax, count)
        if after.committed is not None and (self.committed is None or after.committed > self.committed):
            self.committed = after.committed
        first = after.first_committed
        if first is not None and (self.first_committed is None or first < self.first_committed):
            self.first_committed = first
        if after.exit is not None or before.exit is not None or after.left is not before.left:
            self.alive += count * ((after.exit is None) - (before.exit is None))
            self.staying += count * (_stays(after) - _stays(before))
            self.unclean += count * (before.ended_clean - after.ended_clean)


class SharedStatuses:
    """Makes one `Status` object for all ranks that come to equal statuses."""

    def __init__(self) -> None:
        # Keyed by the id of the old status, which the entry keeps alive.
        self._successors: dict[int, tuple[Status, list[tuple[Mapping[str, Any], Status]]]] = {}
        self._recent: dict[tuple[str | None, int | None], Status] = {}

    def apply(self, before: Status, fields: Mapping[str, Any]) -> Status:
        """Return the status with these changes. Raises Malformed for a wrong field."""
        entry = self._successors.get(id(before))
        if entry is not None:
            for changes, after in entry[1]:
                if changes == fields:
                    return after
        after = self._share(before.changed(fields))
        if entry is None:
            _remember(self._successors, id(before), (before, [(fields, after)]))
        elif len(entry[1]) < MAX_SUCCESSORS:
            entry[1].append((fields, after))
        return after

    def _share(self, status: Status) -> Status:
        """Return the recent status that is equal, if there is one: ranks come to one step from several others."""
        place = status.phase, status.step
        if (recent := self._recent.get(place)) == status:
            return recent
        _remember(self._recent, place, status)
        return status


def _remember(cache: dict[Key, Value], key: Key, value: Value) -> None:
    cache[key] = value
    if len(cache) > MAX_SHARED:
        del cache[next(iter(cache))]


def _stays(status: Status) -> bool:
    return not status.left and status.exit is None


def _move(counts: dict[Counted, int], before: Counted | None, after: Counted | None, ranks: int) -> None:
    """Move a number of ranks from one count to another; a count of 0 has no entry."""
    if after is not None:
        counts[after] = counts.get(after, 0) + ranks
    if before is not None:
        counts[before] -= ranks
        if not counts[before]:
            del counts[before]
