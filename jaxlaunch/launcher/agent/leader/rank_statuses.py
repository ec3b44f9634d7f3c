"""Statuses of all ranks of an attempt, with counts that are updated incrementally.

A gang of 80,000 ranks sends thousands of beats per second. Therefore no message may cost a pass
over all ranks, and ranks with equal statuses share one `Status` object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxlaunch.launcher.agent.gang.progress import Status, format_rank_range, parse_rank_range
from jaxlaunch.launcher.agent.io.link import HEARTBEAT_S

# Ranks of a gang step together but beat one by one: this many recent statuses are shared with the
# next ranks that come to them, and this many successors of each status.
MAX_SHARED, MAX_SUCCESSORS = 128, 16

# The age of the newest report of a rank: the time between two heartbeats, between two messages of a
# program, and on the way.
REPORT_AGE_S = HEARTBEAT_S + 0.5

Counted = TypeVar("Counted", int, str)
Key = TypeVar("Key")
Value = TypeVar("Value")


class RankStatuses:
    """Newest status of every rank.

    Attributes:
        ranks_by_host: Ranks of each host, from 0 on without a gap.
        by_rank: Statuses by rank number. A list, because the statuses of a host are read and
            replaced as one slice.
        alive: Ranks that have not ended.
        unfinished: Ranks whose program runs, or ended with an error.
        unclean: Ranks that have not ended cleanly.
        undone: Ranks that have not reported that they are done.
        committed: Newest step on storage, restored or committed by any rank.
        first_committed: First step that this attempt committed.
        versions: Ranks by version of JAX.
    """

    def __init__(self, ranks_by_host: Mapping[int, range]) -> None:
        self.ranks_by_host = ranks_by_host
        count = sum(map(len, ranks_by_host.values()))
        self.by_rank = [Status()] * count
        self.alive = self.unfinished = self.unclean = self.undone = count
        self.committed: int | None = None
        self.first_committed: int | None = None
        self.versions: dict[str, int] = {}
        self._steps: dict[int, int] = {}
        # Monotonic times, and the steps of the foremost rank.
        self._foremost: deque[tuple[float, int | None]] = deque()
        self._host_keys = {
            host: format_rank_range(ranks[0], ranks[-1]) for host, ranks in ranks_by_host.items()
        }
        self._shared = SharedStatuses()

    @property
    def first_step(self) -> int | None:
        """Step that is complete on every rank that reports one."""
        return min(self._steps, default=None)

    @property
    def last_step(self) -> int | None:
        """Step of the foremost rank."""
        return max(self._steps, default=None)

    def settled_step(self, now: float) -> int:
        """Return the step of the foremost rank when the oldest of the newest reports was sent.

        The ranks of a gang step together, but their reports are up to REPORT_AGE_S old: the newest
        step of another rank would accuse each of them by the age of its report. `now` is in
        monotonic seconds; this must be called regularly.
        """
        self._foremost.append((now, self.last_step))
        while len(self._foremost) > 1 and self._foremost[1][0] <= now - REPORT_AGE_S:
            self._foremost.popleft()
        # Before that no rank had a step, and none is behind.
        return self._foremost[0][1] or 0

    def running_statuses(self) -> dict[int, Status]:
        """Return the statuses of the ranks that neither have ended nor wait for others to end."""
        return {rank: status for rank, status in enumerate(self.by_rank) if not status.is_ending}

    def find_host(self, rank: int) -> int:
        """Return the host that holds a rank."""
        return next(host for host, ranks in self.ranks_by_host.items() if rank in ranks)

    def update(self, statuses: Mapping[int, Status]) -> None:
        """Replace the statuses of some ranks."""
        for rank, status in statuses.items():
            self.set_range(range(rank, rank + 1), status)

    def merge_changes(self, host: int, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Apply the changes in a beat of a host, as `progress.StatusChanges` wrote them.

        Raises:
            ValueError, TypeError: A key or a field is malformed.
        """
        # A spare has no ranks, and its beats have no changes.
        for key, fields in changes.items():
            ranks = self.ranks_by_host[host]
            if key != self._host_keys[host]:
                ranks = parse_rank_range(key, ranks)
            statuses = self.by_rank[ranks.start : ranks.stop]
            # The ranks of a host nearly always have the same status.
            if statuses.count(statuses[0]) == len(statuses):
                self.set_range(ranks, self._shared.apply_changes(statuses[0], fields))
                continue
            for rank, status in zip(ranks, statuses, strict=True):
                self.set_range(range(rank, rank + 1), self._shared.apply_changes(status, fields))

    def set_range(self, ranks: range, new_status: Status) -> None:
        """Replace the status of consecutive ranks, which must all have had the same one."""
        old_status, count = self.by_rank[ranks.start], len(ranks)
        if new_status is old_status:
            return
        self.by_rank[ranks.start : ranks.stop] = [new_status] * count
        if new_status.step != old_status.step:
            _move_count(self._steps, old_status.step, new_status.step, count)
        if new_status.jax != old_status.jax:
            _move_count(self.versions, old_status.jax, new_status.jax, count)
        committed, first = new_status.committed, new_status.first_committed
        if committed is not None and (self.committed is None or committed > self.committed):
            self.committed = committed
        if first is not None and (self.first_committed is None or first < self.first_committed):
            self.first_committed = first
        if new_status.done is not old_status.done:
            self.undone += count * (old_status.done - new_status.done)
        has_ended = new_status.exit is not None or old_status.exit is not None
        if has_ended or new_status.is_ending is not old_status.is_ending:
            self.alive += count * ((new_status.exit is None) - (old_status.exit is None))
            self.unfinished += count * (old_status.has_finished - new_status.has_finished)
            self.unclean += count * (old_status.has_ended_cleanly - new_status.has_ended_cleanly)


class SharedStatuses:
    """Makes one `Status` object for all ranks that come to equal statuses."""

    def __init__(self) -> None:
        # Keyed by the id of the old status, which the entry keeps alive.
        self._successors: dict[int, tuple[Status, list[tuple[Mapping[str, Any], Status]]]] = {}
        self._recent: dict[tuple[str | None, int | None], Status] = {}

    def apply_changes(self, old_status: Status, fields: Mapping[str, Any]) -> Status:
        """Return the status with these changes. Raises MalformedError for a wrong field."""
        entry = self._successors.get(id(old_status))
        if entry is not None:
            for changes, new_status in entry[1]:
                if changes == fields:
                    return new_status
        new_status = self._find_equal(old_status.with_changes(fields))
        if entry is None:
            _cache_value(self._successors, id(old_status), (old_status, [(fields, new_status)]))
        elif len(entry[1]) < MAX_SUCCESSORS:
            entry[1].append((fields, new_status))
        return new_status

    def _find_equal(self, status: Status) -> Status:
        """Return a recent status that is equal, if there is one."""
        phase_and_step = status.phase, status.step
        if (recent_status := self._recent.get(phase_and_step)) == status:
            return recent_status
        _cache_value(self._recent, phase_and_step, status)
        return status


def _cache_value(cache: dict[Key, Value], key: Key, value: Value) -> None:
    cache[key] = value
    if len(cache) > MAX_SHARED:
        del cache[next(iter(cache))]


def _move_count(
    counts: dict[Counted, int], old_key: Counted | None, new_key: Counted | None, rank_count: int
) -> None:
    """Move a number of ranks from one count to another; a count of 0 has no entry."""
    if new_key is not None:
        counts[new_key] = counts.get(new_key, 0) + rank_count
    if old_key is not None:
        counts[old_key] -= rank_count
        if not counts[old_key]:
            del counts[old_key]
